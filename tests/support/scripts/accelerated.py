"""A training loop with Accelerate that knows nothing of zckpt: accelerated.py DIRECTORY deepspeed|fsdp save|load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

from tests.support.fsdp_on_cpu import fsdp_accelerator

directory, with_what, what = sys.argv[1:]
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
if with_what == "fsdp":
    options: dict[str, Any] = {"auto_wrap_policy": "no_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
    accelerator = fsdp_accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **options))
else:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
torch.manual_seed(0 if what == "save" else 1)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
rank = torch.distributed.get_rank()  # not Accelerate's rank, because on the CPU it takes each rank for the first


def train(first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        random = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 32, generator=random)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if what == "save":
    train(0, 3)
    accelerator.save_state(f"{directory}/state")
else:
    train(0, 1)
    accelerator.load_state(f"{directory}/state")
losses = train(3, 6)
Path(directory, f"{what}-{rank}.json").write_text(json.dumps(losses))
