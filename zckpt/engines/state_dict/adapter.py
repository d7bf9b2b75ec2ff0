"""The ``StateAdapter`` of a ``FlatState``. The tensors of a state dict belong to the part ``param``. Those of which
each rank has its own belong to the part ``buffer``, which may have several copies of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.contract import StateAdapter
from zckpt.engines.state_dict.flat import STATE_DICT
from zckpt.plan.inventory import BUFFER, PARAM, Inventory

if TYPE_CHECKING:
    from collections.abc import Collection

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
    def devices(self) -> Collection[torch.device]:
        return self.engine.devices

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        pass  # What cannot be written was refused when the FlatState was made.

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        return Inventory(self.engine.fragments, self.engine.aliases)

    def state(self) -> dict[str, Any]:
        return {STATE_DICT: self.engine.tree}
