"""The objects that are saved and restored with an engine on each rank, such as data loaders: ``zckpt.register``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zckpt.errors import warn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.engines.contract import EngineAdapter

_REGISTERED = "_zckpt_registered"
"""The attribute of an engine with its ``Registered``. A table of all engines would keep those alive that a registered
object refers to."""


class Stateful(Protocol):
    """What can be registered."""

    def state_dict(self) -> Any:
        """Plain values, tensors and arrays."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Takes what ``state_dict`` has returned."""


class Registered:
    """What is registered with one engine, on this rank."""

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        """By name, in the order in which they were registered."""
        self.unclaimed: Mapping[str, Any] = {}
        """The states that the last restore has read of names that were not registered. Whoever registers one of these
        names before the engine's next step gets its state."""

    def load(self, states: Mapping[str, Any]) -> None:
        """Gives each registered object its state of ``states``, where it has one."""
        for name, stateful in self.objects.items():
            if name in states:
                stateful.load_state_dict(states[name])

    def keep(self, states: Mapping[str, Any], adapter: EngineAdapter, *, warns: bool) -> None:
        """Makes ``states`` the unclaimed ones, until the next step of the engine. ``warns``: that step gives a warning
        if nobody has registered their names by then."""
        self.unclaimed = dict(states)
        if states:
            adapter.before_change(partial(self._end, warns))

    def _end(self, warns: bool) -> None:
        unclaimed, self.unclaimed = self.unclaimed, {}
        if unclaimed and warns:
            warn(
                f"the checkpoint that was restored has a state of {', '.join(unclaimed)} of each rank, which nothing "
                "has taken: zckpt.register(engine, name, object) before the first step, or "
                "zckpt.restore(..., with_rank_state=True), so that no position in the data is lost"
            )


def registered(engine: object) -> Registered:
    """What is registered with an engine; made when it is first asked for."""
    found = getattr(engine, _REGISTERED, None)
    if not isinstance(found, Registered):
        found = Registered()
        setattr(engine, _REGISTERED, found)
    return found


def with_registered(engine: object, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``given``, and the states of all objects that are registered with the engine, by name; None if there is neither.
    Raises ValueError for a name that is in both, and what ``state_dict`` raises."""
    found = getattr(engine, _REGISTERED, None)
    objects = found.objects if isinstance(found, Registered) else {}
    both = sorted(objects.keys() & (given or {}).keys())
    if both:
        raise ValueError(f"rank_state has {', '.join(both)}, under which an object is registered with the engine")
    if given is None and not objects:
        return None
    return {**(given or {}), **{name: stateful.state_dict() for name, stateful in objects.items()}}
