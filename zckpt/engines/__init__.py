"""The training engines that zckpt reads from and restores into: one adapter per framework, found by ``adapt``."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from zckpt.engines.contract import EngineAdapter

__all__ = ["adapt", "group_of", "is_engine"]


class Framework(NamedTuple):
    """Where the engines of a framework and zckpt's adapter for them are defined; each is ``module:class``."""

    engine: str
    adapter: str


FRAMEWORKS = (
    Framework("deepspeed:DeepSpeedEngine", "zckpt.engines.deepspeed.adapter:DeepSpeedAdapter"),
    Framework("zckpt.testing.engine:ReferenceEngine", "zckpt.testing.adapter:ReferenceAdapter"),
)


def adapt(engine: Any) -> EngineAdapter:
    """The adapter for a live training engine. Raises UnsupportedError that names the type of any other object."""
    adapter = _adapter_of(engine)
    if adapter is None:
        raise UnsupportedError(
            f"{type(engine).__module__}.{type(engine).__qualname__} is not a training engine that zckpt knows",
            hint="supported: the engine that deepspeed.initialize returns",
        )
    return adapter(engine)


def group_of(engine: Any) -> ProcessGroup | None:
    """The process group of the ranks over which an engine is spread; None for all ranks of the job, and for any object
    that is not an engine. Never raises. A job that trains several models may give each of them some of its ranks."""
    adapter = _adapter_of(engine)
    return None if adapter is None else adapter.process_group(engine)


def is_engine(value: Any) -> bool:
    """Whether ``value`` is a training engine that zckpt knows. This never raises an error."""
    return _adapter_of(value) is not None


def _adapter_of(engine: Any) -> type[EngineAdapter] | None:
    """No framework is imported: an engine of a framework that nobody has imported cannot exist."""
    for framework in FRAMEWORKS:
        name, _, engine_class = framework.engine.partition(":")
        module = sys.modules.get(name)
        if module is not None and isinstance(engine, getattr(module, engine_class)):
            name, _, adapter_class = framework.adapter.partition(":")
            adapter: type[EngineAdapter] = getattr(import_module(name), adapter_class)
            return adapter
    return None
