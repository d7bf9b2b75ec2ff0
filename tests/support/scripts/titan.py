"""torchtitan's own trainer on a tiny model: titan.py DIRECTORY zckpt|torchtitan STEPS OPTIONS, with the options of the
manager of checkpoints as JSON.

torchtitan expects an accelerator. To let it run on the CPU, this script replaces functions of ``torch.cpu``, and the
attention of the model. It replaces nothing that saves or loads.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 does not have it yet
    setattr(torch.distributed, "set_timeout", lambda *_: None)  # noqa: B010
for name, function in {
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**30),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: defaultdict(int),
}.items():
    setattr(torch.cpu, name, function)

from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from zckpt import torchtitan

if TYPE_CHECKING:
    from collections.abc import Iterator


def causal(_: Any, q: Any, k: Any, v: Any, *, enable_gqa: bool = False, **__: Any) -> Any:
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query, key, value, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)


FlexAttention.forward = causal  # FlexAttention has no backward pass on the CPU


class Tokens(IterableDataset):  # type: ignore[type-arg]
    """Endless random tokens, whose state is the number of samples that were taken."""

    def __init__(self, rank: int, seq_len: int) -> None:
        self.rank, self.seq_len, self.taken = rank, seq_len, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.taken)
            self.taken += 1
            tokens = torch.randint(2000, (self.seq_len + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(self.seq_len)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any):
        super().__init__(Tokens(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, tokenizer_path: Any = None) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


directory, manager, steps, options = sys.argv[1:]
of_manager = torchtitan.CheckpointManager if manager == "zckpt" else CheckpointManager
config = llama3_debugmodel()
config.checkpoint = of_manager.Config(**{"enable": True, "interval": 3, **json.loads(options)})
config.dataloader, config.tokenizer, config.dump_folder = Loader.Config(), Tokenizer.Config(), directory
config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, int(steps)
config.training.disable_cuda_graphs = True
config.lr_scheduler.total_steps = 10
config.validator.enable = False
config.optimizer.implementation = "foreach"
config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a nightly build of torch
config.debug.seed = 0
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction for FSDP2
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
