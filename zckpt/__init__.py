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

All errors are in ``zckpt.errors``, and the types of results in ``zckpt.types``. ``README.md`` says what zckpt does, and
``spec/format.md`` says what its files look like. ``docs/architecture.md`` is for people who change zckpt. It has a
table of the modules and folders, and says what each of them may import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, RankError, ZckptError
from zckpt.progress import ProgressBar
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt import dcp, errors, types
    from zckpt.adapters.pytorch.train_state import TrainState
    from zckpt.checkpoint.background import PendingWrite, wait
    from zckpt.checkpoint.open import open  # noqa: A004  zckpt.open reads like the builtin on purpose
    from zckpt.checkpoint.reading.checkpoint import Checkpoint
    from zckpt.checkpoint.restore import restore
    from zckpt.checkpoint.state_dict import write_state_dict
    from zckpt.checkpoint.write import write
    from zckpt.checkpoint.writing.options import Background, CopyTo
    from zckpt.engines.registered import register
    from zckpt.errors import *  # noqa: F403  type checkers take ``import *`` and ``import a as a`` for public names
    from zckpt.frameworks.attach import attach
    from zckpt.frameworks.attach import attach_all as attach_all
    from zckpt.frameworks.attach import detach as detach
    from zckpt.frameworks.preemption import on_preemption
    from zckpt.frameworks.zero_to_fp32 import *  # noqa: F403
    from zckpt.offloading.offload import offload, offloaded, reload
    from zckpt.tools.comparing.diff import diff
    from zckpt.tools.converting.convert import convert
    from zckpt.tools.copying.cp import cp
    from zckpt.tools.exporting.export import export
    from zckpt.tools.gc import gc as gc
    from zckpt.tools.prune import prune
    from zckpt.tools.repairing.repair import repair as repair
    from zckpt.tools.reporting.write_report import report
    from zckpt.tools.validating.validate import validate
    from zckpt.tools.where import where
    from zckpt.transfer.budget import Budget
    from zckpt.types import *  # noqa: F403

__all__ = [
    "Background",
    "Budget",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CopyTo",
    "FormatError",
    "PendingWrite",
    "ProgressBar",
    "RankError",
    "TrainState",
    "ZckptError",
    "__version__",
    "attach",
    "convert",
    "cp",
    "dcp",
    "diff",
    "errors",
    "export",
    "offload",
    "offloaded",
    "on_preemption",
    "open",
    "prune",
    "register",
    "reload",
    "report",
    "restore",
    "types",
    "validate",
    "wait",
    "where",
    "write",
    "write_state_dict",
]

_LATE = {
    "frameworks.attach": ["attach", "attach_all", "detach"],
    "checkpoint.background": ["PendingWrite", "wait"],
    "tools.exporting.export": ["export"],
    "tools.converting.convert": ["convert"],
    "tools.copying.cp": ["cp"],
    "tools.comparing.diff": ["diff"],
    "tools.gc": ["gc"],
    "offloading.offload": ["offload", "offloaded", "reload"],
    "checkpoint.open": ["open"],
    "frameworks.preemption": ["on_preemption"],
    "tools.prune": ["prune"],
    "engines.registered": ["register"],
    "tools.repairing.repair": ["repair"],
    "tools.reporting.write_report": ["report"],
    "checkpoint.restore": ["restore"],
    "checkpoint.state_dict": ["write_state_dict"],
    "tools.validating.validate": ["validate"],
    "tools.where": ["where"],
    "checkpoint.write": ["write"],
    "checkpoint.writing.options": ["Background", "CopyTo"],
    "frameworks.zero_to_fp32": [
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    ],
    "adapters.pytorch.train_state": ["TrainState"],
    "checkpoint.reading.checkpoint": ["Checkpoint"],
    "transfer.budget": ["Budget"],
}
"""The public names by module. These are the imports above for type checkers. Each module is imported when one of its
names is first used, because most of these modules import torch, which takes longer than many commands."""
_MODULES = ("dcp", "errors", "types")
"""The public modules, which are imported in the same way."""
_HOME = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    # All errors and types are found here too, although few programs need their names.
    places = [_HOME[name]] if name in _HOME else ["errors", "types"] if name[:1].isupper() else []
    for module in (import_module(f"{__name__}.{place}") for place in places):
        if hasattr(module, name):
            globals()[name] = value = getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
