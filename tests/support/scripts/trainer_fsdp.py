"""A Hugging Face Trainer with FSDP2 that knows nothing of zckpt: trainer_fsdp.py DIRECTORY STEPS [CHECKPOINT]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types.
    """Accelerate uses FSDP only on accelerators. On the CPU, FSDP2 works all the same."""

    def __init__(self, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **options)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.state.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=fsdp_plugin)


setattr(transformers.trainer, "Accelerator", Accelerator)  # noqa: B010
directory, steps, *resume_from = sys.argv[1:]
tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
options: dict[str, Any] = {"fsdp": True}
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
    fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    **options,
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
