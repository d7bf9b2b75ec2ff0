"""A Hugging Face Trainer that knows nothing of zckpt: trainer.py DIRECTORY STAGE|fsdp STEPS [CHECKPOINT]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.support.fsdp_on_cpu import fsdp_accelerator

directory, stage, steps, *resume_from = sys.argv[1:]
tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
kind: dict[str, Any]
if stage == "fsdp":
    setattr(transformers.trainer, "Accelerator", fsdp_accelerator)  # noqa: B010
    kind = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
else:
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    }
    kind = {"bf16": True, "deepspeed": deepspeed}
arguments = TrainingArguments(
    directory,
    use_cpu=True,
    max_steps=int(steps),
    save_steps=3,
    logging_steps=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    weight_decay=0.1,
    report_to=[],
    disable_tqdm=True,
    **kind,
)
torch.manual_seed(len(resume_from))  # so that a resumed run starts from other weights
dataset = [{"input_ids": t, "labels": t} for t in tokens]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset)
trainer.train(resume_from_checkpoint=resume_from[0] if resume_from else None)
if os.environ["RANK"] == "0":
    history = trainer.state.log_history[: int(steps)]
    logged = [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in history]
    Path(directory, "losses.json").write_text(json.dumps(logged))
