"""A training loop with Accelerate and FSDP2 that knows nothing of zckpt: accelerated_fsdp.py DIRECTORY save|load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

directory, what = sys.argv[1:]
options: dict[str, Any] = {"auto_wrap_policy": "no_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
# Accelerate uses FSDP only on accelerators. On the CPU, FSDP2 works all the same.
PartialState._shared_state["distributed_type"] = DistributedType.FSDP
accelerator.state.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)

torch.manual_seed(0 if what == "save" else 1)
model: Any = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
