"""What an optimizer keeps besides weights and moments, as a plain tree keyed by parameter names, and back.

    {"class": "FusedAdam",
     "param_groups": [{"params": ["a.weight", ...], "lr": 0.001, "betas": (0.9, 0.999), ...}, ...],
     "states": [{"params": ["a.weight", ...], "moments": ["exp_avg", "exp_avg_sq"], "values": {"step": 5}}, ...]}

The order of the groups is the optimizer's. ``states`` has one entry for all parameters whose values are equal; a
parameter without any state is in none of them. Names make the tree independent of world size, sub-groups and stage. The
class is None where the tree was made from files that do not say which class it was; every optimizer then fits.

What is bound to a flat (flats.py) cannot be. If the flat is a whole parameter, equal on every rank, it stands among the
``values`` of that parameter. All else is in the tree of its rank, and ``"bound": ["factors"]`` in an entry names it:

    [{"params": ["a.weight", ...], "geometry": {...}, "values": {"factors": <tensor>}}, ...]

Muon leaves some parameters to another optimizer inside it: ``"inner_class": "FusedAdam"`` is that one's class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zckpt.engines.deepspeed.flats import Flat, bound, geometry, is_collective, moments, numbers
from zckpt.errors import FormatError, first_few

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

INTERCHANGEABLE = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
"""Classes with the same state: DeepSpeed picks between them by where the optimizer is offloaded to."""

COUNTING_TOGETHER = frozenset({"FusedAdam"})
"""Classes that count the steps of all tensors of a param group in the state of one of them alone: the last in use."""


def inner(optimizer: Any) -> Any:
    """The optimizer to which Muon leaves what is no matrix; None in any other."""
    return getattr(optimizer, "aux_optimizer", None)


def counts_together(optimizer: Any, group: int) -> bool:
    """Whether one state alone has the ``step`` of several. The ZeRO stages leave one tensor at a time in a group."""
    kind = type(inner(optimizer) or optimizer).__name__
    return kind in COUNTING_TOGETHER and len(optimizer.param_groups[group]["params"]) > 1


def capture(optimizer: Any, flats: Sequence[Flat]) -> dict[str, Any]:
    """The tree of a live optimizer."""
    groups: list[dict[str, Any]] = [
        {"params": [], **{key: value for key, value in group.items() if key != "params"}}
        for group in optimizer.param_groups
    ]
    states: list[dict[str, Any]] = []
    alike: dict[str, list[dict[str, Any]]] = {}
    """The states among ``states`` in which any number of parameters may be; equal states have the same key."""
    for flat in flats:
        groups[flat.group]["params"].extend(flat.names)
        state = optimizer.state.get(flat.master, {})
        if not state:
            continue
        own: dict[str, Any] = {"moments": sorted(moments(flat, state)), "values": numbers(flat, state)}
        tied = bound(flat, state)
        if tied and flat.whole:
            own["values"] |= tied
            states.append({"params": list(flat.names), **own})  # This one equals no other flat's.
            continue
        if tied:
            own["bound"] = sorted(map(str, tied))
        candidates = alike.setdefault(_key(own), [])
        entry = next((entry for entry in candidates if _same_state(entry, own)), None)
        if entry is None:
            entry = {"params": [], **own}
            states.append(entry)
            candidates.append(entry)
        entry["params"].extend(flat.names)
    aux = {} if inner(optimizer) is None else {"inner_class": type(inner(optimizer)).__name__}
    return {"class": type(optimizer).__name__, **aux, "param_groups": groups, "states": states}


def capture_bound(optimizer: Any, flats: Sequence[Flat]) -> list[dict[str, Any]]:
    """What is bound to the flats of this rank, for the tree of this rank."""
    found = []
    for flat in flats:
        tied = bound(flat, optimizer.state.get(flat.master, {}))
        if tied and not flat.whole:
            found.append({"params": list(flat.names), "geometry": geometry(flat), "values": tied})
    return found


class State(NamedTuple):
    """What was saved for all parameters of a flat."""

    values: Mapping[str, Any]
    moments: Sequence[str]


NOTHING = State({}, ())


class Together(NamedTuple):
    """What was saved for parameters whose steps are counted together."""

    alike: bool
    """Whether they, and no others, were counted together then."""
    entries: Sequence[Mapping[str, Any]]
    """What was saved for any of them."""


class Saved:
    """A tree read back, looked up by parameter name. Raises FormatError where it is not such a tree.

    ``bound``: what ``capture_bound`` made on this very rank; None if there is no such rank. ``kept``: parameters whose
    weights are not restored. What was saved for them is left aside, as if the checkpoint did not know them.
    """

    def __init__(self, tree: Any, bound: Any = None, kept: Collection[str] = ()) -> None:
        unknown = isinstance(tree, Mapping) and tree.get("class", "") is None
        self.optimizer_class = None if unknown else _member(tree, "class", str, "optimizer")
        self.inner_class = _member(tree, "inner_class", str, "optimizer") if "inner_class" in tree else None
        self.groups = _members(tree, "param_groups")
        self._group_of = {name: group for group in self.groups for name in group["params"]}
        self._state_of: dict[str, Mapping[str, Any]] = {}
        for entry in _members(tree, "states"):
            _names(entry, "moments", "optimizer.states")
            step = _member(entry, "values", dict, "optimizer.states").get("step", 0)
            if type(step) is int and not 0 <= step < 2**31:
                raise FormatError(f"state: optimizer.states.values.step is {step!r}")
            if "bound" in entry:
                _names(entry, "bound", "optimizer.states")
            self._state_of.update(dict.fromkeys(entry["params"], entry))
        self._counted = self._state_of
        if (self.inner_class or self.optimizer_class) in COUNTING_TOGETHER:
            self._counted = {name: state for group in self.groups for name, state in self._counted_in(group)}
        self._kept = frozenset(kept)
        self._group_of, self._state_of, self._counted = (
            {name: found for name, found in all_of.items() if name not in self._kept}
            for all_of in (self._group_of, self._state_of, self._counted)
        )
        self._bound = {}
        for entry in [] if bound is None else _members({"bound": bound}, "bound"):
            _member(entry, "values", dict, "optimizer.bound")
            self._bound[tuple(entry["params"])] = entry

    @staticmethod
    def has_bound(tree: Any) -> bool:
        """Whether a part of ``tree`` is in the trees of the ranks."""
        return any(
            isinstance(entry, Mapping) and "bound" in entry for entry in _member(tree, "states", list, "optimizer")
        )

    def keeps(self, names: Iterable[str]) -> bool:
        """Whether all of these parameters keep their weights, and so their optimizer state with its step."""
        return self._kept.issuperset(names)

    def has_state(self, name: str) -> bool:
        return name in self._state_of

    def settings(self, names: Sequence[str], unknown: Collection[str]) -> tuple[dict[str, Any], list[str]]:
        """The settings that all of ``names`` had when they were saved, and what stands against it. Those that are kept
        or in ``unknown`` need not have had any: they take the others'.
        """
        optional = self._kept.union(unknown)
        groupless = [name for name in names if name not in self._group_of and name not in optional]
        if groupless:
            return {}, [f"{first_few(groupless, 1)}: in no param group of the checkpoint"]
        groups = _distinct(self._group_of.get(name) for name in names)
        merged = [{key: value for key, value in group.items() if key != "params"} for group in groups if group]
        if not merged:
            return {}, []
        keys = {key for settings in merged for key in settings}
        differing = sorted(key for key in keys if any(not _equal(m.get(key), merged[0].get(key)) for m in merged))
        if differing:
            return {}, [
                f"{first_few(names, 1)}: one param group here, several with other {', '.join(differing)} when saved"
            ]
        return merged[0], []

    def together(self, names: Sequence[str]) -> Together:
        """What was saved for parameters whose steps are counted together now, and whether they were counted together
        when they were saved."""
        there = self._group_of.get(names[0])
        return Together(there is not None and there["params"] == names, self._entries(names, self._counted))

    def state(self, flat: Flat, together: Together | None) -> tuple[State, list[str]]:
        """What was saved for a flat, and what stands against it.

        ``together``: of all parameters that are counted together with the flat's; None if it counts alone. Parameters
        that had no state when they were saved take the others' scalars.
        """
        if together is not None and flat.names[0] not in self._group_of:
            entries = together.entries
        else:
            alike = together is not None and together.alike
            entries = self._entries(flat.names, self._state_of if alike else self._counted)
        if not entries:
            return NOTHING, []
        own = self._bound.get(flat.names, {})
        for entry in entries:
            apart = entry.get("bound", ())
            tied = sorted({*apart, *(str(key) for key, value in entry["values"].items() if is_collective(value))})
            if tied and (own.get("geometry") != geometry(flat) if apart else not flat.whole):
                return NOTHING, [_misfit(tied, flat, self.optimizer_class or "the optimizer")]
        first, *others = entries
        if not all(_same_state(entry, first) for entry in others):
            against = f"{first_few(flat.names, 1)}: one sub-group here, but other optimizer scalars for each when saved"
            return NOTHING, [against]
        return State({**first["values"], **own.get("values", {})}, first["moments"]), []

    @staticmethod
    def _entries(names: Iterable[str], state_of: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [entry for entry in _distinct(state_of.get(name) for name in names) if entry]

    def _counted_in(self, group: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What each parameter of a group would have if every state had the ``step`` that was counted in one."""
        entries = {name: self._state_of[name] for name in group["params"] if name in self._state_of}
        steps = [entry["values"]["step"] for entry in entries.values() if type(entry["values"].get("step")) is int]
        counted = {"step": max(steps)} if steps else {}
        for name, entry in entries.items():
            yield name, {**entry, "values": {**entry["values"], **counted}}


def problems(
    saved: Saved,
    optimizer: Any,
    flats: Sequence[Flat],
    restored: Collection[str],
    unknown: Collection[str],
) -> list[str]:
    """What keeps ``saved`` from being restored, given the keys of the tensors that will be, and the parameters that
    need not be in it. Changes nothing."""
    found = []
    aux = None if inner(optimizer) is None else type(inner(optimizer)).__name__
    for there, here in ((saved.optimizer_class, type(optimizer).__name__), (saved.inner_class, aux)):
        if there != here and not {there, here} <= INTERCHANGEABLE and saved.optimizer_class is not None:
            found.append(f"optimizer: {there} in the checkpoint, {here} in the engine")
    names = _by_group(flats)
    for index in range(len(optimizer.param_groups)):
        found += _settings(saved, index, names, unknown)[1]
    for flat, state, against in _states(saved, optimizer, flats):
        if state is None:
            continue
        found += against
        stale = bound(flat, optimizer.state.get(flat.master, {})).keys() - state.values.keys()
        if stale and not against:
            found.append(f"missing: optimizer state {', '.join(sorted(map(str, stale)))} of {first_few(flat.names, 1)}")
        absent = [
            f"{part}/{slot.name}"
            for part in state.moments
            for slot in flat.slots
            if f"{part}/{slot.name}" not in restored and saved.has_state(slot.name)
        ]
        if absent:
            found.append(f"{first_few(absent, 1)}: not restored, though the optimizer's scalars would be")
    return found


def restore(saved: Saved, optimizer: Any, flats: Sequence[Flat], unknown: Collection[str]) -> None:
    """Sets the param groups and the scalars of every flat; call it only where ``problems`` found none."""
    names = _by_group(flats)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in _settings(saved, index, names, unknown)[0].items():
            group[key] = _placed(value, group.get(key), torch.device("cpu"))
    for flat, saved_state, _ in _states(saved, optimizer, flats):
        if saved_state is None:
            continue
        if not saved_state.values and not saved_state.moments:
            live = optimizer.state.get(flat.master, {})
            if "step" in live:  # that of other moments, which are gone
                live["step"] = 0 * live["step"]
            continue
        state, group = optimizer.state[flat.master], optimizer.param_groups[flat.group]
        for key, value in saved_state.values.items():
            # As torch's own load_state_dict: `step` stays on the host unless the kernel reads it on the device.
            on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
            device = torch.device("cpu") if on_host else flat.master.device
            state[key] = _placed(value, state.get(key), device)
        for part in saved_state.moments:
            if part not in state:  # nothing to be restored: the flat is all padding, or its parameters are unknown
                state[part] = torch.zeros_like(flat.master, requires_grad=False)


def _by_group(flats: Sequence[Flat]) -> dict[int, list[str]]:
    """Maps the index of each param group to the names of its parameters."""
    names: dict[int, list[str]] = {}
    for flat in flats:
        names.setdefault(flat.group, []).extend(flat.names)
    return names


def _settings(
    saved: Saved, index: int, names: Mapping[int, Sequence[str]], unknown: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    if index in names:
        return saved.settings(names[index], unknown)
    # All frozen: nothing to go by but its place.
    group = saved.groups[index] if index < len(saved.groups) else {"params": ["?"]}
    return ({} if group["params"] else {key: value for key, value in group.items() if key != "params"}), []


def _states(saved: Saved, optimizer: Any, flats: Sequence[Flat]) -> Iterator[tuple[Flat, State | None, list[str]]]:
    """What was saved for each flat, and what stands against it; None for one that keeps its own state: none of the
    parameters that share its step is restored."""
    groups = _by_group(flats)
    together = {group: saved.together(names) for group, names in groups.items() if counts_together(optimizer, group)}
    for flat in flats:
        if saved.keeps(groups[flat.group] if flat.group in together else flat.names):
            yield flat, None, []
        else:
            yield flat, *saved.state(flat, together.get(flat.group))


def _misfit(keys: Sequence[str], flat: Flat, optimizer_class: str) -> str:
    return (
        f"{first_few(flat.names, 1)}: {', '.join(keys)} of {optimizer_class} cannot be cut anew, it fits only the "
        "elements that it was made for: restore with the writer's stage, number of ranks and param groups, or the "
        "weights alone"
    )


def _placed(value: Any, present: Any, device: torch.device) -> Any:
    """A copy of ``value`` with its tensors on ``device``; in the memory of ``present`` if it is alike.

    A function stands for a tensor or an array that has not been read yet.
    """
    if callable(value):
        value = value()
    if isinstance(value, torch.Tensor):
        if isinstance(present, torch.Tensor) and present.shape == value.shape and present.dtype == value.dtype:
            return present.copy_(value)
        return value.detach().to(device, copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(item, None, device) for item in value)
    if isinstance(value, dict):
        placed = copy(value)  # of the same class
        placed.update({key: _placed(item, None, device) for key, item in value.items()})
        return placed
    return value


def _equal(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or (a != a and b != b)


def _same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    alike = a["moments"] == b["moments"] and a.get("bound") == b.get("bound")
    return alike and _equal(a["values"], b["values"])


def _key(state: Mapping[str, Any]) -> str:
    values = {str(key): v.tolist() if isinstance(v, torch.Tensor) else v for key, v in state["values"].items()}
    return repr((state["moments"], state.get("bound"), sorted(values.items())))


def _distinct(items: Iterable[Mapping[str, Any] | None]) -> list[Mapping[str, Any] | None]:
    return list({id(item): item for item in items}.values())


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
