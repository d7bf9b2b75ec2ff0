"""The training engines that zckpt reads from and restores into: one adapter per framework, found by ``adapt``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from zckpt.engines.base import EngineAdapter

__all__ = ["adapt", "group_of"]


def adapt(engine: Any) -> EngineAdapter:
    """The adapter for a live training engine. Raises UnsupportedError that names the type of any other object.

    No framework is imported: an engine of a framework that nobody has imported cannot exist.
    """
    if _is_deepspeed(engine):
        from zckpt.engines.deepspeed.adapter import DeepSpeedAdapter

        return DeepSpeedAdapter(engine)
    raise UnsupportedError(
        f"{type(engine).__module__}.{type(engine).__qualname__} is not a training engine that zckpt knows",
        hint="supported: the engine that deepspeed.initialize returns",
    )


def group_of(engine: Any) -> ProcessGroup | None:
    """The process group of the ranks over which an engine is spread; None for all ranks of the job, and for any object
    that is not an engine. Never raises. A job that trains several models may give each of them some of its ranks."""
    if not _is_deepspeed(engine):
        return None
    from zckpt.engines.deepspeed.group import process_group

    return process_group(engine)


def _is_deepspeed(engine: Any) -> bool:
    framework = sys.modules.get("deepspeed")
    return framework is not None and isinstance(engine, framework.DeepSpeedEngine)
