"""The objects that are saved and restored with an engine on each rank, such as data loaders. ``zckpt.register``
registers them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zckpt.engines import adapt, engine_of
from zckpt.errors import warn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.engines.contract import EngineAdapter

_REGISTERED = "_zckpt_registered"
"""The attribute of an engine that has its ``Registered``. A table of all engines would keep alive every object to which
a registered object refers."""
_METHODS = ("state_dict", "load_state_dict")


class Stateful(Protocol):
    """An object that can be registered."""

    def state_dict(self) -> Any:
        """Returns the state of the object as plain values, tensors and arrays."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Sets the state of the object to what ``state_dict`` has returned."""


class Registered:
    """The objects that are registered with one engine, on this rank."""

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        """The registered objects by name, in the order in which they were registered."""
        self.unclaimed: Mapping[str, Any] = {}
        """The states that the last restore has read under names that are not registered. An object that is registered
        under one of these names before the engine's next step gets its state."""

    def load(self, states: Mapping[str, Any]) -> None:
        """Passes to each registered object the state that ``states`` has under its name, if there is one."""
        for name, stateful in self.objects.items():
            if name in states:
                stateful.load_state_dict(states[name])

    def keep(self, states: Mapping[str, Any], adapter: EngineAdapter, *, warns: bool) -> None:
        """Keeps ``states`` as the unclaimed ones, until the next step of the engine. ``warns``: whether that step gives
        a warning if some of their names are not registered by then."""
        self.unclaimed = dict(states)
        if states:
            adapter.before_change(partial(self._end, warns))

    def _end(self, warns: bool) -> None:
        unclaimed, self.unclaimed = self.unclaimed, {}
        if unclaimed and warns:
            warn(
                "the checkpoint that was restored has values of each rank that nothing has taken "
                f"({', '.join(map(repr, unclaimed))}), such as a position in the data: call "
                "zckpt.register(engine, name, object) before the first step, or get them by "
                "zckpt.restore(..., with_rank_state=True)"
            )


def registered(engine: object) -> Registered:
    """Returns the ``Registered`` of an engine, which is made when it is first asked for."""
    existing = getattr(engine, _REGISTERED, None)
    if not isinstance(existing, Registered):
        existing = Registered()
        setattr(engine, _REGISTERED, existing)
    return existing


def with_registered(engine: object, rank_state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns ``rank_state`` together with the states of the registered objects of the engine by name, or None if there
    is neither. Raises ValueError for a name that is in both, and any error that a ``state_dict`` raises."""
    objects = registered(engine).objects
    both = sorted(objects.keys() & (rank_state or {}).keys())
    if both:
        raise ValueError(
            f"rank_state has {', '.join(map(repr, both))}, and an object is registered with the engine under that name"
        )
    if rank_state is None and not objects:
        return None
    return {**(rank_state or {}), **{name: stateful.state_dict() for name, stateful in objects.items()}}


def register(engine: object, name: str, stateful: Stateful) -> None:
    """Makes every save and restore of the engine include the state of an object, such as a data loader.

    Each rank registers its own object under the same name. From now on ``zckpt.write`` and the ``save_checkpoint`` of
    an attached engine save what the object's ``state_dict()`` returns on each rank. ``zckpt.restore`` and
    ``load_checkpoint`` pass it to ``load_state_dict`` on the same rank, after the engine is restored on every rank. A
    restore of some parts, such as a warm start of the weights, leaves the object alone.

    An object that does not exist at the restore may be registered later, before the engine's next step. It then gets
    its state at once. If the checkpoint has a state that no object has taken by this step, a warning says so.

    If an object is registered before the restore, and the checkpoint has no state of its name, the restore raises
    MismatchError on every rank and changes nothing. With ``strict=False`` it gives a warning instead. If such an object
    is to begin anew, register it after the restore. If the number of ranks differs from that of the writer, no rank
    gets a state, and a warning says so. ``Checkpoint.client_rank_state`` returns the states of all ranks of the writer,
    so that they can be divided anew. If ``state_dict()`` or ``load_state_dict`` fails on one rank, every rank raises an
    error. Only a ``load_state_dict`` during a late ``register`` fails on its rank alone.

    The engine keeps the object alive, and nothing keeps the engine alive. Registering the same object a second time
    changes nothing.

    Args:
        engine: the engine that ``deepspeed.initialize`` has returned, a ``zckpt.TrainState``, or a tuple as for
            ``zckpt.write``.
        name: the name of the state. It has to be the same on all ranks.
        stateful: an object with the methods ``state_dict()``, which returns plain values, tensors and arrays, and
            ``load_state_dict(state)``, such as torchdata's ``StatefulDataLoader``.

    Raises:
        ValueError: another object is registered under this name.
        TypeError: the object does not have both methods, or the name is not a string.
        UnsupportedError: zckpt does not support engines of this kind.
    """
    engine = engine_of(engine)
    adapt(engine)
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    missing = [method for method in _METHODS if not callable(getattr(stateful, method, None))]
    if missing:
        raise TypeError(
            f"{type(stateful).__name__} has no {' and no '.join(missing)}, so it cannot be registered as {name!r}; "
            "torchdata.stateful_dataloader.StatefulDataLoader is a data loader that has both"
        )
    of_engine = registered(engine)
    if of_engine.objects.setdefault(name, stateful) is not stateful:
        raise ValueError(f"another object is registered as {name!r} with this engine: choose another name")
    if name in of_engine.unclaimed:
        states = dict(of_engine.unclaimed)
        stateful.load_state_dict(states.pop(name))
        of_engine.unclaimed = states
