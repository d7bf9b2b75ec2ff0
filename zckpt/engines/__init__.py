"""The training engines that zckpt reads from and restores into: one adapter per framework, found by ``adapt``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from zckpt.engines.base import EngineAdapter

__all__ = ["adapt"]


def adapt(engine: Any) -> EngineAdapter:
    """The adapter for a live training engine. Raises UnsupportedError that names the type of any other object.

    No framework is imported: an engine of a framework that nobody has imported cannot exist.
    """
    framework = sys.modules.get("deepspeed")
    if framework is not None and isinstance(engine, framework.DeepSpeedEngine):
        from zckpt.engines.deepspeed.adapter import DeepSpeedAdapter

        return DeepSpeedAdapter(engine)
    raise UnsupportedError(
        f"{type(engine).__module__}.{type(engine).__qualname__} is not a training engine that zckpt knows",
        hint="supported: the engine that deepspeed.initialize returns",
    )
