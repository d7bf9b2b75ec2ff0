"""The types of what the calls of zckpt take and return, for annotations. The errors are in ``zckpt.errors``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zckpt.checkpoint.background import PendingWrite as PendingWrite
    from zckpt.checkpoint.cleaning.cleanup import Cleanup as Cleanup
    from zckpt.checkpoint.cleaning.cleanup import Removed as Removed
    from zckpt.checkpoint.listing.tensors import PieceInfo as PieceInfo
    from zckpt.checkpoint.listing.tensors import TensorInfo as TensorInfo
    from zckpt.checkpoint.reading.checkpoint import Checkpoint as Checkpoint
    from zckpt.checkpoint.restore import RankStates as RankStates
    from zckpt.checkpoint.restoring.plan import Restored as Restored
    from zckpt.frameworks.preemption import Preemption as Preemption
    from zckpt.offloading.offload import Offloaded as Offloaded
    from zckpt.progress import Progress as Progress
    from zckpt.tools.comparing.report import Difference as Difference
    from zckpt.tools.comparing.report import StateDifference as StateDifference
    from zckpt.tools.comparing.report import TensorDifference as TensorDifference
    from zckpt.tools.converting.convert import Converted as Converted
    from zckpt.tools.exporting.export import Exported as Exported
    from zckpt.tools.repairing.repair import RepairReport as RepairReport
    from zckpt.tools.validating.report import Finding as Finding
    from zckpt.tools.validating.report import Observation as Observation
    from zckpt.tools.validating.report import Report as Report
    from zckpt.tools.where import Placement as Placement
    from zckpt.tools.where import PlacementEntry as PlacementEntry
    from zckpt.tools.where import RankMemory as RankMemory

_HOMES = {
    "PendingWrite": "checkpoint.background",
    "Cleanup": "checkpoint.cleaning.cleanup",
    "Removed": "checkpoint.cleaning.cleanup",
    "PieceInfo": "checkpoint.listing.tensors",
    "TensorInfo": "checkpoint.listing.tensors",
    "Checkpoint": "checkpoint.reading.checkpoint",
    "RankStates": "checkpoint.restore",
    "Restored": "checkpoint.restoring.plan",
    "Preemption": "frameworks.preemption",
    "Offloaded": "offloading.offload",
    "Progress": "progress",
    "Difference": "tools.comparing.report",
    "StateDifference": "tools.comparing.report",
    "TensorDifference": "tools.comparing.report",
    "Converted": "tools.converting.convert",
    "Exported": "tools.exporting.export",
    "RepairReport": "tools.repairing.repair",
    "Finding": "tools.validating.report",
    "Observation": "tools.validating.report",
    "Report": "tools.validating.report",
    "Placement": "tools.where",
    "PlacementEntry": "tools.where",
    "RankMemory": "tools.where",
}
"""The module of each type. It is imported when the type is first used, because most of them import torch."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"zckpt.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
