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

``README.md`` says what zckpt does, ``spec/format.md`` says what its files look like, and ``docs/architecture.md`` shows
how a byte gets from an engine to the disk and back.

This table is for people who change zckpt. It has the modules and folders of the package, from the lowest to the
highest. Each imports only itself and the rows above it. This includes imports that are only for type checkers:

    version    no torch, no I/O the version of the library
    errors     no torch, no I/O all errors, and how an error of the operating system becomes one of them
    progress   no torch         the progress that a caller gets while bytes move, and a progress bar that shows it
    system     no torch         calls that only Linux has, joined threads, available memory, the garbage collector
    geometry   no torch, no I/O the order of a tensor's elements: grids, boxes, spans, and how one order lies in another
    format     no torch, no I/O encodes and decodes each file of the format as bytes, and checks rules and limits
    state      no torch, no I/O the training state of one rank: fragments of tensors, and where they are
    plan       no torch, no I/O pure functions that lay out files, plan writes and reads, select keys and reshard
    ranks      no files         messages between ranks, and how a rank notices that another one has died
    storage    torch late       the contract of a store, local directories, scratch files, the lock of a writer
    transfer   -                carries out planned writes and reads: buffers, budget, copies to devices, digests
    engines    -                the contract of an engine adapter, and a folder for each framework
    offloading -                the steps of zckpt.offload: write and read storages, free them, watch their use
    listing    torch late       what is in the directory of a run, and in each checkpoint, without its tensors
    reading    -                what zckpt.open returns, which loads any part of a checkpoint as tensors
    validation -                checks a checkpoint against the specification, and reports what it has found
    repairing  -                the steps of zckpt.repair: find the data files, rebuild, compare, put in place
    writing    -                the steps of zckpt.write: collect, agree, write files, commit
    restoring  -                the steps of zckpt.restore: match tensors, plan, report what does not fit
    exporting  -                the steps of zckpt.export: select, merge and convert tensors, write files
    converting -                the steps of zckpt.convert: recognize a folder, read it, write it as a checkpoint
    comparing  -                the steps of zckpt.diff: pair the tensors, plan the reads, compare values and trees
    copying    -                the steps of zckpt.cp: plan the contents of each file, write the files, commit
    cleaning   -                the steps of zckpt.gc and zckpt.prune: find what to remove, and remove it under a lock
    tiers      -                several places: uploads, the choice of what is restored, reads from the nearest place
    reporting  -                the steps of zckpt.report: compute statistics, collect what a page shows, write it
    api        -                the functions that users call, a file for each task
    dcp        -                a writer and a reader for PyTorch's distributed checkpoints
    torchtitan -                torchtitan's manager of checkpoints, with zckpt in it
    __init__   torch late       the public names
    testing    -                a reference engine, and the test suites that each store and each engine has to pass
    cli        torch late         the command line
    __main__   torch late         what `python -m zckpt` runs

"no torch": the module does not import torch while it runs. "no I/O": it does not call the operating system, but it may
issue a Python warning. What it imports of zckpt makes the same promise. "torch late": it imports torch, and modules
that import torch, only inside of functions, and not while it is imported itself. "no files": it does not open files
itself. ``tests/package/test_imports.py`` reads this table, and fails for every import that the table does not allow.
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
    from zckpt.api.attach import attach, attach_all, detach
    from zckpt.api.background import PendingWrite, wait
    from zckpt.api.convert import Converted, convert
    from zckpt.api.cp import cp
    from zckpt.api.diff import diff
    from zckpt.api.export import Exported, export
    from zckpt.api.gc import gc
    from zckpt.api.offload import Offloaded, offload, offloaded, reload
    from zckpt.api.open import open  # noqa: A004  zckpt.open reads like the builtin on purpose
    from zckpt.api.preemption import Preemption, on_preemption
    from zckpt.api.prune import prune
    from zckpt.api.register import register
    from zckpt.api.repair import RepairReport, repair
    from zckpt.api.report import report
    from zckpt.api.restore import RankStates, Restored, restore
    from zckpt.api.state_dict import write_state_dict
    from zckpt.api.validate import validate
    from zckpt.api.where import Placement, PlacementEntry, RankMemory, where
    from zckpt.api.write import write
    from zckpt.api.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.cleaning.cleanup import Cleanup, Removed
    from zckpt.comparing.report import Difference, StateDifference, TensorDifference
    from zckpt.engines.pytorch.train_state import TrainState
    from zckpt.listing.contents import PieceInfo, TensorInfo
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.transfer.budget import Budget
    from zckpt.validation.report import Finding, Observation, Report

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
    "api.attach": ["attach", "attach_all", "detach"],
    "api.background": ["PendingWrite", "wait"],
    "api.export": ["Exported", "export"],
    "api.convert": ["Converted", "convert"],
    "api.cp": ["cp"],
    "api.diff": ["diff"],
    "api.gc": ["gc"],
    "api.offload": ["Offloaded", "offload", "offloaded", "reload"],
    "api.open": ["open"],
    "api.preemption": ["Preemption", "on_preemption"],
    "api.prune": ["prune"],
    "api.register": ["register"],
    "api.repair": ["RepairReport", "repair"],
    "api.report": ["report"],
    "api.restore": ["RankStates", "Restored", "restore"],
    "api.state_dict": ["write_state_dict"],
    "api.validate": ["validate"],
    "api.where": ["Placement", "PlacementEntry", "RankMemory", "where"],
    "api.write": ["write"],
    "api.zero_to_fp32": [
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    ],
    "cleaning.cleanup": ["Cleanup", "Removed"],
    "comparing.report": ["Difference", "StateDifference", "TensorDifference"],
    "engines.pytorch.train_state": ["TrainState"],
    "listing.contents": ["PieceInfo", "TensorInfo"],
    "reading.checkpoint": ["Checkpoint"],
    "transfer.budget": ["Budget"],
    "validation.report": ["Finding", "Observation", "Report"],
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
