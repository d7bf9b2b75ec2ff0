"""The ``StateAdapter`` of a ``FlatState``. The tensors of a state dict belong to the part ``param``. Those of which
each rank has its own belong to the part ``buffer``, which may have several copies of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.contract import StateAdapter
from zckpt.engines.group import rank_group_of
from zckpt.engines.state_dict.flat import STATE_DICT
from zckpt.engines.tensors import dtype_name
from zckpt.format.names import Tier
from zckpt.plan.inventory import BUFFER, PARAM, Fragment, Inventory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.distributed import ProcessGroup

    from zckpt.engines.state_dict.flat import FlatState


class StateDictAdapter(StateAdapter):
    """Reads one state dict on one rank. ``StateAdapter`` documents its methods."""

    engine: FlatState
    trains = False
    parts = (PARAM, BUFFER)
    if_replicas_differ = 'per_rank=["<name>"] keeps what each rank has, such as the statistics of a BatchNorm'

    @staticmethod
    def process_group(engine: FlatState) -> ProcessGroup | None:
        return engine.group

    @property
    def step(self) -> int:
        return self.engine.step

    def set_step(self, step: int) -> None:
        self.engine.step = step

    @property
    def description(self) -> dict[str, str]:
        return {"framework": f"torch {torch.__version__}", "mode": "a state dict", "optimizer": "none"}

    @property
    def devices(self) -> frozenset[torch.device]:
        return frozenset(data.device for tensor in self.engine.tensors.values() for _, data in tensor.chunks)

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        pass  # What cannot be written was refused when the FlatState was made.

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        return Inventory(tuple(self._fragments()), self.engine.aliases)

    def _fragments(self) -> Iterator[Fragment]:
        rank, aliases, first_ranks = rank_group_of(self.engine.group).rank, self.engine.aliases, self.engine.first_ranks
        tier_of_host = Tier.HOST if torch.accelerator.is_available() else Tier.DEVICE
        for name, (chunks, replicated, own) in self.engine.tensors.items():
            if name in aliases:
                continue
            part, copy = (BUFFER, rank) if own else (PARAM, 0)
            for span, data in chunks:
                grid, first, stop = span
                if first < stop or (0 in grid.shape and first_ranks.get(name, 0) == rank):
                    tier = tier_of_host if data.is_cpu else Tier.DEVICE
                    yield Fragment(part, name, dtype_name(data.dtype, name), span, tier, copy, data, replicated)

    def state(self) -> dict[str, Any]:
        return {STATE_DICT: self.engine.tree}
