"""The contract of training engines, and what the core has to know of them. Each framework has one adapter class, which
is named as text in ``FRAMEWORKS``, and ``adapt`` returns the adapter for an engine."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zckpt.engines.contract import EngineAdapter, StateAdapter
from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["adapt", "engine_of", "group_of", "is_engine", "readable"]


TRAIN_STATE = "zckpt.adapters.pytorch.train_state:TrainState"
"""The class of the engine that zckpt makes of a tuple of a model and its optimizers."""
FRAMEWORKS = {
    "deepspeed:DeepSpeedEngine": "zckpt.adapters.deepspeed.adapter:DeepSpeedAdapter",
    TRAIN_STATE: "zckpt.adapters.pytorch.adapter:TorchAdapter",
    "zckpt.testing.engine:ReferenceEngine": "zckpt.testing.adapter:ReferenceAdapter",
    "zckpt.engines.state_dict:FlatState": "zckpt.engines.state_dict:StateDictAdapter",
}
"""The class of zckpt's adapter for each class of engines, both in the form ``module:class``."""


def adapt(engine: Any) -> EngineAdapter:
    """Returns the adapter for a live training engine. For any other object, raises UnsupportedError with the object's
    type."""
    adapter = readable(engine)
    if not isinstance(adapter, EngineAdapter):
        raise _unknown(engine)
    return adapter


def readable(state: Any) -> StateAdapter:
    """Returns the adapter by which a write reads a live state: a training engine, or a state dict as a ``FlatState``.
    For any other object, raises UnsupportedError as ``adapt`` does."""
    adapter = _adapter_of(state)
    if adapter is None:
        raise _unknown(state)
    return adapter(state)


def _unknown(engine: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(engine).__module__}.{type(engine).__qualname__} is not a training engine that zckpt knows",
        hint="supported: the engine that deepspeed.initialize returns, zckpt.TrainState(model, optimizer), and the "
        "tuple (model, optimizer); zckpt.write_state_dict writes a dict",
    )


def engine_of(value: object) -> Any:
    """Returns the engine that a caller has passed: the ``TrainState`` of a tuple ``(model, optimizer)`` or ``(model,
    optimizer, scheduler)``, and any other value unchanged. Raises TypeError for a tuple of other objects."""
    if not isinstance(value, tuple):
        return value
    if len(value) not in (2, 3):
        raise TypeError(f"a tuple is (model, optimizer) or (model, optimizer, scheduler), not one of {len(value)}")
    train_state: Any = import_module(TRAIN_STATE.partition(":")[0])
    return train_state.train_state_of(*value)


def group_of(engine: Any) -> ProcessGroup | None:
    """Returns the process group of the ranks over which an engine is spread. A job that trains several models may give
    each of them only some of its ranks. Returns None if the engine uses all ranks of the job, and if the object is not
    an engine. This never raises an error."""
    adapter = _adapter_of(engine)
    return None if adapter is None else adapter.process_group(engine)


def is_engine(value: Any) -> bool:
    """Returns whether ``value`` is a training engine that zckpt knows. This never raises an error."""
    return _adapter_of(value) is not None


def _adapter_of(engine: Any) -> type[StateAdapter] | None:
    """Returns the adapter class for an engine, or None for any other object. No framework is imported here, because an
    engine cannot exist unless somebody has imported its framework already."""
    for engine_name, adapter_name in FRAMEWORKS.items():
        name, _, engine_class = engine_name.partition(":")
        module = sys.modules.get(name)
        if module is not None and isinstance(engine, getattr(module, engine_class)):
            name, _, adapter_class = adapter_name.partition(":")
            adapter: type[StateAdapter] = getattr(import_module(name), adapter_class)
            return adapter
    return None
