"""The optimizer of ZeRO-3 with ``offload_optimizer.ratio``, which DeepSpeed calls Twin-Flow: some sub-groups stay on
the GPU, where a torch AdamW updates them, and DeepSpeed's C++ Adam updates the others in host memory.

The torch AdamW is ``backup_optimizer`` of ``DeepSpeedZeroOptimizer_Stage3``. This file has all code that uses it.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch


class TwinOptimizer:
    """Looks like the C++ Adam, but its ``state`` has the states of all sub-groups."""

    def __init__(self, wrapper: Any) -> None:
        self._inner = wrapper.optimizer
        self.class_name = type(wrapper.optimizer).__name__
        self.state = _States(wrapper)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _States:
    """The states of both optimizers, by the master weights of a sub-group."""

    def __init__(self, wrapper: Any) -> None:
        self._in_host_memory, self._on_device = wrapper.optimizer.state, wrapper.backup_optimizer.state
        self._masters_on_device = {
            id(master)
            for number, master in enumerate(wrapper.fp32_partitioned_groups_flat)
            if wrapper.subgroup_to_device[number] != "cpu"
            and not (getattr(wrapper, "use_muon", False) and wrapper.sub_groups_using_muon[number])
        }

    def __getitem__(self, master: torch.Tensor) -> Any:
        on_device = id(master) in self._masters_on_device
        return _CountedInInt(self._on_device[master]) if on_device else self._in_host_memory[master]

    def get(self, master: torch.Tensor, default: Any = None) -> Any:
        states = self._on_device if id(master) in self._masters_on_device else self._in_host_memory
        return self[master] if master in states else default


class _CountedInInt(UserDict[str, Any]):
    """Shows the state that torch's AdamW has for a tensor, and changes it. The step is as the C++ Adam counts it: in an
    int."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.data = state  # UserDict.__init__ would make a copy of the state.

    def __getitem__(self, key: str) -> Any:
        return int(self.data[key]) if key == "step" else self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        # torch keeps the step in host memory.
        self.data[key] = torch.tensor(float(value), device="cpu") if key == "step" else value
