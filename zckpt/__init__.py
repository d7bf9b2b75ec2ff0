"""zckpt writes, restores and reads checkpoints of training states: those of DeepSpeed ZeRO, FSDP2, DDP, or one process.

Every rank makes these calls. An engine is what ``deepspeed.initialize`` returns, or a ``zckpt.TrainState``:

    zckpt.write(engine)                  writes a checkpoint, which exists only once all of it is durable
    zckpt.restore(engine, path)          restores a checkpoint of any world size, stage and offload
    zckpt.where(engine)                  shows which part of the state is in which memory and file
    zckpt.offload(engine, directory)     moves live states to a local disk; zckpt.reload brings them back

Any process can make these:

    zckpt.open(path).load(keys)          loads any part of a checkpoint, and reads only the bytes of that part
    zckpt.export(path, out)              writes the weights as a Hugging Face folder, or as one file for torch.load
    zckpt.validate(path)                 checks a checkpoint against the specification
    zckpt.report(paths, "report.html")   writes a page about one checkpoint, or about several of a run

``README.md`` says what zckpt does, and ``spec/format.md`` says what its files look like. ``docs/architecture.md`` is
for people who change zckpt. It has a table of the modules and folders, and says what each of them may import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zckpt.errors import (
    CastError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DeviceError,
    DigestError,
    FeatureError,
    FormatError,
    KeyNotFoundError,
    LockedError,
    MismatchError,
    MissingFileError,
    NoSpaceError,
    OffloadedError,
    RankError,
    RepairError,
    SizeError,
    StateError,
    StorageError,
    TagError,
    UnfinishedWriteError,
    UnsupportedError,
    VersionError,
    ZckptError,
)
from zckpt.progress import Progress, ProgressBar
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt import dcp
    from zckpt.checkpoint.background import PendingWrite, wait
    from zckpt.checkpoint.cleaning.cleanup import Cleanup, Removed
    from zckpt.checkpoint.listing.contents import PieceInfo, TensorInfo
    from zckpt.checkpoint.open import open  # noqa: A004  zckpt.open reads like the builtin on purpose
    from zckpt.checkpoint.reading.checkpoint import Checkpoint
    from zckpt.checkpoint.register import register
    from zckpt.checkpoint.restore import RankStates, Restored, restore
    from zckpt.checkpoint.state_dict import write_state_dict
    from zckpt.checkpoint.write import write
    from zckpt.engines.pytorch.train_state import TrainState
    from zckpt.frameworks.attach import attach, attach_all, detach
    from zckpt.frameworks.preemption import Preemption, on_preemption
    from zckpt.frameworks.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.offloading.offload import Offloaded, offload, offloaded, reload
    from zckpt.tools.comparing.diff import diff
    from zckpt.tools.comparing.report import Difference, StateDifference, TensorDifference
    from zckpt.tools.converting.convert import Converted, convert
    from zckpt.tools.copying.cp import cp
    from zckpt.tools.exporting.export import Exported, export
    from zckpt.tools.gc import gc
    from zckpt.tools.prune import prune
    from zckpt.tools.repairing.repair import RepairReport, repair
    from zckpt.tools.reporting.write_report import report
    from zckpt.tools.validating.report import Finding, Observation, Report
    from zckpt.tools.validating.validate import validate
    from zckpt.tools.where import Placement, PlacementEntry, RankMemory, where
    from zckpt.transfer.budget import Budget

__all__ = [
    "Budget",
    "CastError",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "Cleanup",
    "Converted",
    "DeviceError",
    "Difference",
    "DigestError",
    "Exported",
    "FeatureError",
    "Finding",
    "FormatError",
    "KeyNotFoundError",
    "LockedError",
    "MismatchError",
    "MissingFileError",
    "NoSpaceError",
    "Observation",
    "Offloaded",
    "OffloadedError",
    "PendingWrite",
    "PieceInfo",
    "Placement",
    "PlacementEntry",
    "Preemption",
    "Progress",
    "ProgressBar",
    "RankError",
    "RankMemory",
    "RankStates",
    "Removed",
    "RepairError",
    "RepairReport",
    "Report",
    "Restored",
    "SizeError",
    "StateDifference",
    "StateError",
    "StorageError",
    "TagError",
    "TensorDifference",
    "TensorInfo",
    "TrainState",
    "UnfinishedWriteError",
    "UnsupportedError",
    "VersionError",
    "ZckptError",
    "__version__",
    "attach",
    "attach_all",
    "convert",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "cp",
    "dcp",
    "detach",
    "diff",
    "export",
    "gc",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "offload",
    "offloaded",
    "on_preemption",
    "open",
    "prune",
    "register",
    "reload",
    "repair",
    "report",
    "restore",
    "validate",
    "wait",
    "where",
    "write",
    "write_state_dict",
]

_LATE = {
    "frameworks.attach": ["attach", "attach_all", "detach"],
    "checkpoint.background": ["PendingWrite", "wait"],
    "tools.exporting.export": ["Exported", "export"],
    "tools.converting.convert": ["Converted", "convert"],
    "tools.copying.cp": ["cp"],
    "tools.comparing.diff": ["diff"],
    "tools.gc": ["gc"],
    "offloading.offload": ["Offloaded", "offload", "offloaded", "reload"],
    "checkpoint.open": ["open"],
    "frameworks.preemption": ["Preemption", "on_preemption"],
    "tools.prune": ["prune"],
    "checkpoint.register": ["register"],
    "tools.repairing.repair": ["RepairReport", "repair"],
    "tools.reporting.write_report": ["report"],
    "checkpoint.restore": ["RankStates", "Restored", "restore"],
    "checkpoint.state_dict": ["write_state_dict"],
    "tools.validating.validate": ["validate"],
    "tools.where": ["Placement", "PlacementEntry", "RankMemory", "where"],
    "checkpoint.write": ["write"],
    "frameworks.zero_to_fp32": [
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    ],
    "checkpoint.cleaning.cleanup": ["Cleanup", "Removed"],
    "tools.comparing.report": ["Difference", "StateDifference", "TensorDifference"],
    "engines.pytorch.train_state": ["TrainState"],
    "checkpoint.listing.contents": ["PieceInfo", "TensorInfo"],
    "checkpoint.reading.checkpoint": ["Checkpoint"],
    "transfer.budget": ["Budget"],
    "tools.validating.report": ["Finding", "Observation", "Report"],
}
"""The public names by module. These are the imports above for type checkers. Each module is imported when one of its
names is first used, because most of these modules import torch, which takes longer than many commands."""
_MODULES = ("dcp",)
"""The public modules, which are imported in the same way."""
_HOME = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
