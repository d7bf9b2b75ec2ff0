"""The tree of an optimizer that was read back, in which state is looked up by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.adapters.flats import geometry, is_bound
from zckpt.adapters.optimizer.classes import COUNTED, COUNTING_TOGETHER, KERNELS
from zckpt.adapters.optimizer.values import distinct, equal, narrowed
from zckpt.engines.contract import without_left_out
from zckpt.errors import FormatError, first_few

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from zckpt.adapters.flats import FlatBuffer


class State(NamedTuple):
    """What was saved for parameters that have equal states."""

    values: Mapping[str, Any]
    """The values that were saved beside the moments, such as ``step``, by the optimizer's keys."""
    moments: Sequence[str]
    """The names of the moments that were saved."""
    bound: Sequence[str] = ()
    """The keys of the values that are in the trees of the ranks."""
    bound_keys: Sequence[str] = ()
    """The keys of all values that are bound to a flat buffer, as text."""


NOTHING = State({}, ())
"""The state of a flat buffer for which nothing was saved."""


class Together(NamedTuple):
    """What was saved for parameters whose steps are counted together in the live optimizer."""

    alike: bool
    """Whether these parameters were counted together when they were saved, and one of them has counted."""
    states: Sequence[State]
    """What was saved for any of these parameters."""


class Saved:
    """A tree that was read back, in which state is looked up by parameter name. Raises FormatError for a tree that
    ``capture`` could not have made.

    ``bound``: what ``capture_bound`` returned on this same rank, or None if there was no such rank. ``kept``: the
    parameters whose weights are not restored. What was saved for them is ignored, as if the checkpoint did not have
    them. ``keeps_settings``: as in ``Selection``. ``live_class``: the class of the optimizer that gets the state.
    """

    def __init__(
        self,
        tree: Any,
        bound: Any = None,
        kept: Collection[str] = (),
        *,
        keeps_settings: bool = False,
        live_class: str | None = None,
    ) -> None:
        self._keeps_settings = keeps_settings
        self.left_out: set[str] = set()
        """The keys of the states that the save has left out. The engine keeps its own values of these."""
        has_no_class = isinstance(tree, Mapping) and tree.get("class", "") is None
        self.optimizer_class = None if has_no_class else _member(tree, "class", str, "optimizer")
        self._joined = isinstance(tree, Mapping) and tree.get("joined") is True
        self.decouples = tree.get("decoupled_weight_decay") if isinstance(tree, Mapping) else None
        self.is_of_another_class = None not in (self.optimizer_class, live_class) and self.optimizer_class != live_class
        """Whether the state is that of another class in ``INTERCHANGEABLE`` than the live optimizer."""
        self.inner_class = _member(tree, "inner_class", str, "optimizer") if "inner_class" in tree else None
        self.groups: list[Mapping[str, Any]] = [without_left_out(group) for group in _members(tree, "param_groups")]
        for entry in _member(tree, "numpy", list, "optimizer") if "numpy" in tree else ():
            match entry:
                case [int() as index, str() as key, dtype] if 0 <= index < len(self.groups):
                    group = self.groups[index]
                    self.groups[index] = {**group, key: narrowed(group.get(key), dtype)}
                case _:
                    raise FormatError(f"state: optimizer.numpy has {entry!r}")
        self._group_of = {name: group for group in self.groups for name in group["params"]}
        self._state_of: dict[str, State] = {}
        for entry in _members(tree, "states"):
            self._state_of.update(dict.fromkeys(entry["params"], self._state(entry)))
        self.begins_anew = not (self._state_of or kept)
        """Whether all weights are restored, and the optimizer had no state when it was saved, as before its first
        step."""
        self._counted = self._state_of
        if (self.inner_class or self.optimizer_class) in COUNTING_TOGETHER:
            self._counted = {name: state for group in self.groups for name, state in self._counted_in(group)}
        self._kept = frozenset(kept)
        for name in self._kept:
            for by_name in (self._group_of, self._state_of, self._counted):
                by_name.pop(name, None)
        self._bound: dict[str, Mapping[str, Any]] = {}
        """What ``bound`` has for each flat buffer, by the text of its geometry."""
        for entry in [] if bound is None else _members({"bound": bound}, "bound"):
            values = self._kept_values(_member(entry, "values", dict, "optimizer.bound"))
            self._bound[repr(entry.get("geometry"))] = values

    def _state(self, entry: Any) -> State:
        """Returns an entry of ``states``, which is checked."""
        _names(entry, "moments", "optimizer.states")
        step = _member(entry, "values", dict, "optimizer.states").get("step", 0)
        if type(step) is int and not 0 <= step < 2**31:
            raise FormatError(f"state: optimizer.states.values.step is {step!r}")
        if "bound" in entry:
            _names(entry, "bound", "optimizer.states")
        bound, values = entry.get("bound", ()), self._kept_values(entry["values"])
        bound_keys = {*bound, *(str(key) for key, value in values.items() if is_bound(value))}
        return State(values, entry["moments"], bound, sorted(bound_keys))

    def _kept_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        kept = without_left_out(values)
        self.left_out |= values.keys() - kept.keys()
        return kept

    @staticmethod
    def has_bound(tree: Any) -> bool:
        """Returns whether some of the state that ``tree`` describes is in the trees of the ranks."""
        return any(
            isinstance(entry, Mapping) and "bound" in entry for entry in _member(tree, "states", list, "optimizer")
        )

    def keeps(self, names: Iterable[str]) -> bool:
        """Returns whether all of these parameters keep their weights, and with them their optimizer state and its
        step."""
        return self._kept.issuperset(names)

    def has_state(self, name: str) -> bool:
        """Returns whether the optimizer had any state for the parameter when it was saved."""
        return name in self._state_of

    def group_of(self, names: Iterable[str]) -> int | None:
        """Returns the index of the first param group that had one of ``names`` when it was saved."""
        group = next((self._group_of[name] for name in names if name in self._group_of), None)
        return next((index for index, saved in enumerate(self.groups) if saved is group), None)

    def restores(self, key: str, live: Collection[str], saved: Iterable[Collection[str]]) -> bool:
        """Returns whether the entry ``key`` of a param group is restored. ``live``: the entries that the live group
        has. ``saved``: those of the groups that its parameters had when they were saved."""
        if key in ("params", "moe") or key in KERNELS:
            return False
        # DeepSpeed makes groups of their own for experts, and names them by the ranks of the experts.
        if key == "name" and any("moe" in group for group in (live, *saved)):
            return False
        if self.is_of_another_class and key not in live:  # Another class has settings that this one does not have.
            return False
        return not self._keeps_settings or key in COUNTED or key not in live

    def settings(
        self, names: Sequence[str], unknown: Collection[str], live: Collection[str] = ()
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns the settings that all of ``names`` had in their param groups when they were saved, and the reasons
        why they cannot be restored. A parameter that is kept, or is in ``unknown``, need not have had settings: then it
        gets those that the other parameters had. ``live``: the names of the settings that the live group has."""
        optional = self._kept.union(names if self._keeps_settings else unknown)
        groupless = [name for name in names if name not in self._group_of and name not in optional]
        if groupless:
            return {}, [f"{first_few(groupless, 1)}: in no param group of the checkpoint"]
        groups = distinct(self._group_of[name] for name in names if name in self._group_of)
        saved = [{key: group[key] for key in group if self.restores(key, live, groups)} for group in groups]
        if not saved:
            return {}, []
        first = saved[0]
        keys = {key for settings in saved for key in settings}
        differing = sorted(key for key in keys if any(not equal(other.get(key), first.get(key)) for other in saved))
        if differing:
            return {}, [
                f"{first_few(names, 1)}: one param group here, several with other {', '.join(differing)} when saved"
            ]
        return first, []

    def together(self, names: Sequence[str]) -> Together:
        """Returns what was saved for parameters whose steps are counted together now, and whether their steps were
        counted together when they were saved."""
        group = self._group_of.get(names[0])
        # The parameters of one pipeline stage are some of those of a group. They are alike if one of them, the last
        # one, has counted the steps of the group.
        last = next((name for name in reversed(names) if name in self._state_of), names[0])
        alike = group is not None and (
            group["params"] == names
            or (self._joined and {*names} <= {*group["params"]} and self._state_of.get(last) == self._counted.get(last))
        )
        return Together(alike, self._states(names, self._counted))

    def state(self, flat: FlatBuffer, together: Together | None) -> State | str:
        """Returns what was saved for a flat buffer, or the reason why it cannot be restored.

        ``together``: what was saved for all parameters whose steps are counted together with those of the flat buffer,
        or None if its steps are counted alone. Parameters that had no state when they were saved get the scalars of the
        others.
        """
        names = flat.stored_names
        if together is not None and names[0] not in self._group_of:
            states = together.states
        else:
            alike = together is not None and together.alike
            states = self._states(names, self._state_of if alike else self._counted)
        if not states:
            return NOTHING
        bound_values = self._bound.get(repr(geometry(flat))) if self._bound else None
        for state in states:
            if state.bound_keys and (bound_values is None if state.bound else not flat.whole):
                return _misfit(state.bound_keys, flat, self.optimizer_class or "the optimizer")
        first, *others = states
        if not all(equal(state, first) for state in others):
            return f"{first_few(names, 1)}: one sub-group here, but other optimizer scalars for each when saved"
        return first._replace(values={**first.values, **bound_values}) if bound_values else first

    @staticmethod
    def _states(names: Iterable[str], state_of: Mapping[str, State]) -> list[State]:
        """Returns the distinct states that these parameters have in ``state_of``."""
        states = [state_of[name] for name in names if name in state_of]
        return states if len(states) == 1 else distinct(states)

    def _counted_in(self, group: Mapping[str, Any]) -> Iterator[tuple[str, State]]:
        """Yields for each parameter of a group that has a state the one that it would have if every state had the
        ``step`` that only one state of the group has counted."""
        states = {name: self._state_of[name] for name in group["params"] if name in self._state_of}
        unequal = distinct(states.values())
        steps = [state.values["step"] for state in unequal if type(state.values.get("step")) is int]
        counted = {"step": max(steps)} if steps else {}
        counting = {id(state): state._replace(values={**state.values, **counted}) for state in unequal}
        for name, state in states.items():
            yield name, counting[id(state)]


def _misfit(keys: Sequence[str], flat: FlatBuffer, optimizer_class: str) -> str:
    return (
        f"{first_few(flat.stored_names, 1)}: {', '.join(keys)} of {optimizer_class} cannot be cut anew, it fits only "
        "the elements that it was made for: restore with the writer's stage, number of ranks and param groups, or the "
        "weights alone"
    )


def _members(tree: Mapping[str, Any], key: str) -> list[Any]:
    members: list[Any] = _member(tree, key, list, "optimizer")
    for member in members:
        _names(member, "params", f"optimizer.{key}")
    return members


def _names(tree: Any, key: str, path: str) -> None:
    if not all(isinstance(name, str) for name in _member(tree, key, list, path)):
        raise FormatError(f"state: {path}.{key} holds a name that is not a string")


def _member(tree: Any, key: str, kind: type, path: str) -> Any:
    if not isinstance(tree, Mapping) or not isinstance(tree.get(key), kind):
        raise FormatError(f"state: {path}.{key} is missing or not a {kind.__name__}")
    return tree[key]
