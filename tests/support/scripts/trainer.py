"""A Hugging Face Trainer on DeepSpeed that knows nothing of zckpt: trainer.py DIRECTORY STAGE STEPS [CHECKPOINT]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

directory, stage, steps, *resume_from = sys.argv[1:]
tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
arguments = TrainingArguments(
    directory,
    use_cpu=True,
    bf16=True,
    max_steps=int(steps),
    save_steps=3,
    logging_steps=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    weight_decay=0.1,
    report_to=[],
    disable_tqdm=True,
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    },
)
torch.manual_seed(len(resume_from))  # so that a resumed run starts from other weights
dataset = [{"input_ids": t, "labels": t} for t in tokens]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset)
trainer.train(resume_from_checkpoint=resume_from[0] if resume_from else None)
if trainer.is_world_process_zero():
    history = trainer.state.log_history[: int(steps)]
    logged = [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in history]
    Path(directory, "losses.json").write_text(json.dumps(logged))
