"""The objects that are saved and restored with an engine on each rank, such as data loaders. ``zckpt.register``
registers them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zckpt.errors import warn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.engines.contract import EngineAdapter

_REGISTERED = "_zckpt_registered"
"""The attribute of an engine that has its ``Registered``. A table of all engines would keep alive every object to which
a registered object refers."""


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
    """Returns ``rank_state`` together with the states of all objects that are registered with the engine, by name.
    Returns None if there is neither. Raises ValueError for a name that is in both, and any error that a ``state_dict``
    raises."""
    existing = getattr(engine, _REGISTERED, None)
    objects = existing.objects if isinstance(existing, Registered) else {}
    both = sorted(objects.keys() & (rank_state or {}).keys())
    if both:
        raise ValueError(
            f"rank_state has {', '.join(map(repr, both))}, and an object is registered with the engine under that name"
        )
    if rank_state is None and not objects:
        return None
    return {**(rank_state or {}), **{name: stateful.state_dict() for name, stateful in objects.items()}}
