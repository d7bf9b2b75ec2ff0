"""Turns what an optimizer keeps, apart from weights and moments, into a plain tree keyed by parameter names, and back.

    {"class": "FusedAdam",
     "param_groups": [{"params": ["a.weight", ...], "lr": 0.001, "betas": (0.9, 0.999), ...}, ...],
     "states": [{"params": ["a.weight", ...], "moments": ["exp_avg", "exp_avg_sq"], "values": {"step": 5}}, ...]}

The groups are in the order of the optimizer. ``states`` has one entry for all parameters that have equal values. A
parameter without any state is in no entry. Because the tree uses names, it does not depend on the world size, the
sub-groups or the stage. The class is None if the tree was made from files that do not name the optimizer's class. Such
a tree fits every optimizer.

Values that are bound to a flat buffer (see flats.py) cannot be shared between parameters. If the flat buffer is one
whole parameter that is equal on every rank, they are among the ``values`` of that parameter. Otherwise they are in the
tree of their rank, and ``"bound": ["factors"]`` in the entry of ``states`` names them:

    [{"params": ["a.weight", ...], "geometry": {...}, "values": {"factors": <tensor>}}, ...]

For the classes in ``INTERCHANGEABLE``, ``"decoupled_weight_decay": True`` says whether the optimizer subtracts the
weight decay from the weights, as AdamW does, or adds it to the gradients. It is missing if there is no weight decay.

``"joined": True`` says that the tree was joined of those of ranks with different parameters.

Muon leaves some parameters to another optimizer inside it, whose class is in ``"inner_class": "FusedAdam"``.

A numpy scalar is kept as the number of Python that equals it. If it has fewer than 64 bits, arithmetic with it is less
precise than with that number, so ``"numpy": [[0, "lr", "float32"], ...]`` has the index of the group, the key and the
dtype. For a list or tuple, it has a list of the dtypes of the items, and null for items of other types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zckpt.engines.composed import compose, decomposed, is_composed, is_decomposed, misfit
from zckpt.engines.contract import without_left_out
from zckpt.engines.flats import FlatBuffer, divided, geometry, is_bound
from zckpt.engines.tensors import set_in_place
from zckpt.errors import FormatError, StateError, first_few

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

TORCH_CLASSES = frozenset({"Adam", "AdamW"})
DEEPSPEED_CLASSES = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
INTERCHANGEABLE = DEEPSPEED_CLASSES | TORCH_CLASSES
"""The classes of optimizers that have the same state and do the same step, if they treat the weight decay alike: those
of DeepSpeed, which chooses between them by the device to which the optimizer is offloaded, and those of torch."""

KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""The settings of torch's optimizers that choose how a step is computed, and not what it does. No restore sets
them."""

COUNTING_TOGETHER = frozenset({"FusedAdam"})
"""The classes of optimizers that count the steps of all tensors of a param group in one state only: that of the last
tensor that was updated."""

COUNTED = frozenset({"step", "k", "d", "d_max", "d_numerator", "weight_sum", "lr_max", "scheduled_lr"})
"""The entries of param groups that optimizers change themselves while they train: those of pytorch_optimizer,
D-Adaptation, Prodigy and schedule-free ones. They are no settings."""

NARROW: dict[str, type[np.generic]] = {"float16": np.float16, "float32": np.float32}
"""The types of numpy scalars with which arithmetic is less precise than with numbers of Python."""


def inner(optimizer: Any) -> Any:
    """Returns the optimizer to which Muon leaves the parameters that are not matrices. Returns None for any other
    optimizer."""
    return getattr(optimizer, "aux_optimizer", None)


def class_name(optimizer: Any) -> str:
    """Returns the name of the class of an optimizer."""
    return str(getattr(optimizer, "class_name", type(optimizer).__name__))


def _decouples(optimizer: Any) -> bool | None:
    """Returns whether an optimizer of a class in ``INTERCHANGEABLE`` subtracts the weight decay from the weights, as
    AdamW does, or adds it to the gradients. Returns None for other optimizers, if there is no weight decay, and if this
    is not known, as from DeepSpeed's files."""
    name, decaying = class_name(optimizer), [group for group in optimizer.param_groups if _decay(group)]
    if name not in INTERCHANGEABLE or not decaying:
        return None
    if name not in TORCH_CLASSES:
        mode = getattr(optimizer, "adam_w_mode", None)
        return None if mode is None else bool(mode)
    # Before torch 2.8, the param groups of AdamW do not say so.
    return all(group.get("decoupled_weight_decay", name == "AdamW") for group in decaying)


def _decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("weight_decay"))


def counts_together(optimizer: Any, group: int) -> bool:
    """Returns whether one state has the ``step`` for several tensors of a param group. This is so only at stage 0,
    because the other ZeRO stages let a group have only one tensor at a time."""
    kind = class_name(inner(optimizer) or optimizer)
    return kind in COUNTING_TOGETHER and len(optimizer.param_groups[group]["params"]) > 1


def capture(optimizer: Any, flats: Sequence[FlatBuffer]) -> dict[str, Any]:
    """Returns the tree of a live optimizer."""
    groups: list[dict[str, Any]] = [
        {"params": [], **{key: value for key, value in group.items() if key != "params"}}
        for group in optimizer.param_groups
    ]
    states: list[dict[str, Any]] = []
    shared_entries: dict[str, list[dict[str, Any]]] = {}
    """Those entries of ``states`` that several parameters may share. Equal entries have the same key here."""
    for flat in flats:
        groups[flat.group]["params"].extend(flat.stored_names)
        state = optimizer.state.get(flat.master, {})
        if not state:
            continue
        moments, values, bound_values = divided(flat, state)
        summary: dict[str, Any] = {"moments": sorted(moments), "values": values}
        if bound_values and flat.whole:
            summary["values"] |= _decomposed(bound_values)
            states.append({"params": list(flat.stored_names), **summary})  # No other flat buffer has an equal state.
            continue
        if bound_values:
            summary["bound"] = sorted(map(str, bound_values))
        candidates = shared_entries.setdefault(_key(summary), [])
        entry = next((entry for entry in candidates if _same_state(entry, summary)), None)
        if entry is None:
            entry = {"params": [], **summary}
            states.append(entry)
            candidates.append(entry)
        entry["params"].extend(flat.stored_names)
    decouples = _decouples(optimizer)
    decay_entry = {} if decouples is None else {"decoupled_weight_decay": decouples}
    inner_entry = {} if inner(optimizer) is None else {"inner_class": type(inner(optimizer)).__name__}
    narrow = [
        [index, key, dtype]
        for index, group in enumerate(groups)
        for key, value in group.items()
        if (dtype := _narrow_dtype(value)) is not None
    ]
    numpy_entry = {"numpy": narrow} if narrow else {}
    tree: dict[str, Any] = {
        "class": class_name(optimizer), **decay_entry, **inner_entry, **numpy_entry, "param_groups": groups,
        "states": states,
    }  # fmt: skip
    _name_once(tree)
    return tree


def _name_once(tree: dict[str, Any]) -> None:
    """Leaves each name in one param group and in one entry of ``states``. Several parameters of an engine may be parts
    of one tensor of the checkpoint. Raises StateError if what the optimizer keeps for them differs."""
    for key in ("param_groups", "states"):
        last: dict[str, Mapping[str, Any]] = {}
        for entry in tree[key]:
            for name in entry["params"]:
                other = last.get(name, entry)
                if other is not entry and not (key == "states" and _counted_elsewhere(tree, other, entry)):
                    raise StateError(f"optimizer: the parts of {name} have other {key} than one another", key=name)
                last[name] = entry
        for entry in tree[key]:
            entry["params"] = [name for name in dict.fromkeys(entry["params"]) if last[name] is entry]
    tree["states"] = [entry for entry in tree["states"] if entry["params"]]


def joined(trees: Sequence[dict[str, Any]], *, leave_out: bool) -> dict[str, Any]:
    """Returns one tree of the trees that ``capture`` has made on the ranks of an engine whose ranks have different
    parameters. A stage of a pipeline without experts has no param groups for experts. If ranks have different settings
    of the same param group, or different values for a parameter, it raises StateError, or takes those of the first of
    these ranks if ``leave_out``."""
    first = trees[0]
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for rank, tree in enumerate(trees):
        same = _equal(*({k: v for k, v in one.items() if k not in ("param_groups", "states")} for one in (tree, first)))
        numbers: Counter[str] = Counter()
        for group in tree["param_groups"]:
            # DeepSpeed names all groups of a stage that has experts, and none of another stage.
            name = str(group.get("name")) if "moe" in group else ""
            joined_group = groups.setdefault((name, numbers[name]), {**group, "params": []})
            numbers[name] += 1
            without = [{key: one[key] for key in one if key not in ("params", "name")} for one in (group, joined_group)]
            same = same and _equal(*without)
            joined_group["params"] = list(dict.fromkeys([*joined_group["params"], *group["params"]]))
        if not (same or leave_out):
            raise StateError(f"rank {rank} has other settings of its param groups than the ranks before it", rank=rank)
    states: list[dict[str, Any]] = []
    of_name: dict[str, dict[str, Any]] = {}
    for rank, tree in enumerate(trees):
        for entry in tree["states"]:
            whole = next((known for known in states if _same_state(known, entry)), None)
            if whole is None:
                whole = {**entry, "params": []}
                states.append(whole)
            for name in entry["params"]:
                if name not in of_name:
                    of_name[name] = whole
                    whole["params"].append(name)
                elif of_name[name] is not whole and not (leave_out or _counted_elsewhere(first, of_name[name], entry)):
                    raise StateError(f"optimizer: rank {rank} has other values for {name}", key=name, rank=rank)
    states = [entry for entry in states if entry["params"]]
    return {**first, "joined": True, "param_groups": [*groups.values()], "states": states}


def _counted_elsewhere(tree: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two entries of ``states`` differ only because a class in ``COUNTING_TOGETHER`` counts the steps
    in another parameter."""
    without_step = [
        {**entry, "values": {key: value for key, value in entry["values"].items() if key != "step"}}
        for entry in (one, other)
    ]
    return tree["class"] in COUNTING_TOGETHER and _same_state(*without_step)


def capture_bound(optimizer: Any, flats: Sequence[FlatBuffer]) -> list[dict[str, Any]]:
    """Returns the values that are bound to the flat buffers of this rank, for the tree of this rank."""
    entries = []
    for flat in flats:
        # If it is whole, its values are in the tree of the optimizer.
        bound = {} if flat.whole else divided(flat, optimizer.state.get(flat.master, {})).bound
        if bound:
            values = _decomposed(bound)
            entries.append({"params": list(flat.stored_names), "geometry": geometry(flat), "values": values})
    return entries


def _decomposed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: decomposed(value) for key, value in values.items()}


class State(NamedTuple):
    """What was saved for all parameters of one flat buffer."""

    values: Mapping[str, Any]
    """The values that were saved beside the moments, such as ``step``, by the optimizer's keys."""
    moments: Sequence[str]
    """The names of the moments that were saved."""


NOTHING = State({}, ())
"""The state of a flat buffer for which nothing was saved."""


class Together(NamedTuple):
    """What was saved for parameters whose steps are counted together in the live optimizer."""

    alike: bool
    """Whether these parameters were counted together when they were saved, and one of them has counted."""
    entries: Sequence[Mapping[str, Any]]
    """The entries of ``states`` that were saved for any of these parameters."""


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
                    self.groups[index] = {**group, key: _narrowed(group.get(key), dtype)}
                case _:
                    raise FormatError(f"state: optimizer.numpy has {entry!r}")
        self._group_of = {name: group for group in self.groups for name in group["params"]}
        self._state_of: dict[str, Mapping[str, Any]] = {}
        for entry in map(dict, _members(tree, "states")):
            _names(entry, "moments", "optimizer.states")
            step = _member(entry, "values", dict, "optimizer.states").get("step", 0)
            if type(step) is int and not 0 <= step < 2**31:
                raise FormatError(f"state: optimizer.states.values.step is {step!r}")
            if "bound" in entry:
                _names(entry, "bound", "optimizer.states")
            entry["values"] = self._kept_values(entry["values"])
            self._state_of.update(dict.fromkeys(entry["params"], entry))
        self._counted = self._state_of
        if (self.inner_class or self.optimizer_class) in COUNTING_TOGETHER:
            self._counted = {name: state for group in self.groups for name, state in self._counted_in(group)}
        self._kept = frozenset(kept)
        self._group_of, self._state_of, self._counted = (
            {name: entry for name, entry in by_name.items() if name not in self._kept}
            for by_name in (self._group_of, self._state_of, self._counted)
        )
        self._bound: dict[str, Mapping[str, Any]] = {}
        """What ``bound`` has for each flat buffer, by the text of its geometry."""
        for entry in [] if bound is None else _members({"bound": bound}, "bound"):
            values = self._kept_values(_member(entry, "values", dict, "optimizer.bound"))
            self._bound[repr(entry.get("geometry"))] = values

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
        why they cannot be restored. Parameters that are kept, and those in ``unknown``, need not have had settings.
        They get the settings of the others. ``live``: as in ``restores``."""
        optional = self._kept.union(names if self._keeps_settings else unknown)
        groupless = [name for name in names if name not in self._group_of and name not in optional]
        if groupless:
            return {}, [f"{first_few(groupless, 1)}: in no param group of the checkpoint"]
        groups = [group for group in _distinct(self._group_of.get(name) for name in names) if group]
        saved = [{key: group[key] for key in group if self.restores(key, live, groups)} for group in groups]
        if not saved:
            return {}, []
        first = saved[0]
        keys = {key for settings in saved for key in settings}
        differing = sorted(key for key in keys if any(not _equal(other.get(key), first.get(key)) for other in saved))
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
        return Together(alike, self._entries(names, self._counted))

    def state(self, flat: FlatBuffer, together: Together | None) -> tuple[State, list[str]]:
        """Returns what was saved for a flat buffer, and the reasons why it cannot be restored.

        ``together``: what was saved for all parameters whose steps are counted together with those of the flat buffer,
        or None if its steps are counted alone. Parameters that had no state when they were saved get the scalars of the
        others.
        """
        if together is not None and flat.stored_names[0] not in self._group_of:
            entries = together.entries
        else:
            alike = together is not None and together.alike
            entries = self._entries(flat.stored_names, self._state_of if alike else self._counted)
        if not entries:
            return NOTHING, []
        bound_values = self._bound.get(repr(geometry(flat)))
        for entry in entries:
            bound_keys = entry.get("bound", ())
            keys = sorted({*bound_keys, *(str(key) for key, value in entry["values"].items() if is_bound(value))})
            if keys and (bound_values is None if bound_keys else not flat.whole):
                return NOTHING, [_misfit(keys, flat, self.optimizer_class or "the optimizer")]
        first, *others = entries
        if not all(_same_state(entry, first) for entry in others):
            name = first_few(flat.stored_names, 1)
            problem = f"{name}: one sub-group here, but other optimizer scalars for each when saved"
            return NOTHING, [problem]
        return State({**first["values"], **(bound_values or {})}, first["moments"]), []

    @staticmethod
    def _entries(names: Iterable[str], state_of: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the distinct entries that these parameters have in ``state_of``."""
        return [entry for entry in _distinct(state_of.get(name) for name in names) if entry]

    def _counted_in(self, group: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields for each parameter of a group that has a state the entry that it would have if every state had the
        ``step`` that only one state of the group has counted."""
        entries = {name: self._state_of[name] for name in group["params"] if name in self._state_of}
        steps = [entry["values"]["step"] for entry in entries.values() if type(entry["values"].get("step")) is int]
        counted = {"step": max(steps)} if steps else {}
        for name, entry in entries.items():
            yield name, {**entry, "values": {**entry["values"], **counted}}


def problems(
    saved: Saved,
    optimizer: Any,
    flats: Sequence[FlatBuffer],
    restored: Collection[str],
    unknown: Collection[str],
) -> list[str]:
    """Returns the reasons why ``saved`` cannot be restored. ``restored``: the keys of the tensors that will be
    restored. ``unknown``: the parameters that ``saved`` need not have. Changes nothing."""
    reasons = []
    inner_class = None if inner(optimizer) is None else type(inner(optimizer)).__name__
    classes = ((saved.optimizer_class, class_name(optimizer)), (saved.inner_class, inner_class))
    for saved_class, live_class in classes:
        fits = saved_class == live_class or {saved_class, live_class} <= INTERCHANGEABLE
        if not fits and saved.optimizer_class is not None:
            reasons.append(f"optimizer: {saved_class} in the checkpoint, {live_class} in the engine")
    decouples = _decouples(optimizer)
    if not reasons and None not in (saved.decouples, decouples) and saved.decouples != decouples:
        ways = {True: "subtracts it from the weights (AdamW)", False: "adds it to the gradients (Adam)"}
        reasons.append(
            f"weight decay: the optimizer of the checkpoint {ways[bool(saved.decouples)]}, that of the engine "
            f"{ways[bool(decouples)]}"
        )
    names = _by_group(flats)
    for index in range(len(optimizer.param_groups)):
        reasons += _settings(saved, index, names, unknown, optimizer)[1]
    for flat, state, reasons_of_state in _states(saved, optimizer, flats):
        if state is None:
            continue
        reasons += reasons_of_state
        live = optimizer.state.get(flat.master, {})
        not_saved = divided(flat, live).bound.keys() - state.values.keys() - saved.left_out
        if not_saved and not reasons_of_state:
            keys = ", ".join(sorted(map(str, not_saved)))
            reasons.append(f"missing: optimizer state {keys} of {first_few(flat.stored_names, 1)}")
        for key, value in state.values.items():
            why = None
            if is_decomposed(value):
                why = misfit(value, live.get(key))
            elif is_composed(live.get(key)):
                why = f"is no {type(live[key]).__qualname__} in the checkpoint, as it is in the engine"
            if why is not None:
                reasons.append(f"{key} of {first_few(flat.stored_names, 1)} {why}")
        absent = [
            f"{part}/{name}"
            for part in state.moments
            for name in flat.stored_names
            if f"{part}/{name}" not in restored and saved.has_state(name)
        ]
        if absent:
            reasons.append(f"{first_few(absent, 1)}: not restored, though the optimizer's scalars would be")
    return reasons


def restore(saved: Saved, optimizer: Any, flats: Sequence[FlatBuffer], unknown: Collection[str]) -> None:
    """Sets the param groups, and the scalars of every flat buffer. Call this only if ``problems`` returned no
    reasons."""
    names = _by_group(flats)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in _settings(saved, index, names, unknown, optimizer)[0].items():
            group[key] = _placed(value, group.get(key), torch.device("cpu"))
    for flat, saved_state, _ in _states(saved, optimizer, flats):
        if saved_state is None:
            continue
        if not saved_state.values and not saved_state.moments:
            live = optimizer.state.get(flat.master, {})
            if "step" in live:  # It belongs to moments that the engine had before, and that are gone now.
                live["step"] = 0 * live["step"]
            continue
        state, group = optimizer.state[flat.master], optimizer.param_groups[flat.group]
        for key, value in saved_state.values.items():
            # As in torch.optim.Optimizer.load_state_dict, `step` stays in host memory unless the kernel reads it on the
            # device.
            on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
            device = torch.device("cpu") if on_host else flat.master.device
            place = compose if is_decomposed(value) else _placed
            if key == "step" and saved.is_of_another_class:
                value = _counted_as(value, optimizer)
            state[key] = place(value, state.get(key), device)
        for part in saved_state.moments:
            if part not in state:  # The flat buffer is only padding, or the checkpoint does not have its parameters.
                state[part] = torch.zeros_like(flat.master, requires_grad=False)


def _counted_as(step: Any, optimizer: Any) -> Any:
    """Returns a number of steps as a class in ``INTERCHANGEABLE`` counts them: those of torch in a tensor, those of
    DeepSpeed in an int."""
    count = step.item() if isinstance(step, torch.Tensor) else step
    in_tensor = class_name(optimizer) in TORCH_CLASSES
    return torch.tensor(float(count), dtype=torch.float32, device="cpu") if in_tensor else int(count)


def _by_group(flats: Sequence[FlatBuffer]) -> dict[int, list[str]]:
    """Returns the names of the parameters of each param group, by the index of the group."""
    names: dict[int, list[str]] = {}
    for flat in flats:
        names.setdefault(flat.group, []).extend(flat.stored_names)
    return {group: list(dict.fromkeys(of_group)) for group, of_group in names.items()}


def matching_groups(saved: Saved, optimizer: Any, flats: Sequence[FlatBuffer]) -> list[int | None]:
    """Returns for each live param group the index of the saved one, or None if the checkpoint does not have it."""
    names = _by_group(flats)
    indices = range(len(optimizer.param_groups))
    return [saved.group_of(names[index]) if index in names else _without_trained(saved, index) for index in indices]


def _without_trained(saved: Saved, index: int) -> int | None:
    """Returns ``index`` if the saved param group of that index has only frozen parameters, and otherwise None. A live
    group of frozen parameters is known only by its index."""
    return index if index < len(saved.groups) and not saved.groups[index]["params"] else None


def _settings(
    saved: Saved, index: int, names: Mapping[int, Sequence[str]], unknown: Collection[str], optimizer: Any
) -> tuple[dict[str, Any], list[str]]:
    """Returns what ``Saved.settings`` returns for the live param group ``index``."""
    live = optimizer.param_groups[index]
    if index in names:
        return saved.settings(names[index], unknown, live)
    if _without_trained(saved, index) is None:
        return {}, []
    group = saved.groups[index]
    return {key: value for key, value in group.items() if saved.restores(key, live, [group])}, []


def _states(
    saved: Saved, optimizer: Any, flats: Sequence[FlatBuffer]
) -> Iterator[tuple[FlatBuffer, State | None, list[str]]]:
    """Yields each flat buffer with what was saved for it, and the reasons why that cannot be restored. The state is
    None for a flat buffer that keeps its own state, because none of the parameters that share its step is restored."""
    groups = _by_group(flats)
    together = {group: saved.together(names) for group, names in groups.items() if counts_together(optimizer, group)}
    for flat in flats:
        if saved.keeps(groups[flat.group] if flat.group in together else flat.stored_names):
            yield flat, None, []
        else:
            yield flat, *saved.state(flat, together.get(flat.group))


def _misfit(keys: Sequence[str], flat: FlatBuffer, optimizer_class: str) -> str:
    return (
        f"{first_few(flat.stored_names, 1)}: {', '.join(keys)} of {optimizer_class} cannot be cut anew, it fits only "
        "the elements that it was made for: restore with the writer's stage, number of ranks and param groups, or the "
        "weights alone"
    )


def _placed(value: Any, present: Any, device: torch.device) -> Any:
    """Returns a copy of ``value`` whose tensors are on ``device``. If ``present`` is a tensor of the same shape and
    dtype, its memory is used for the copy.

    A function stands for a tensor or an array that has not been read yet. If ``present`` is a numpy scalar that can
    have the value of a number of Python, so is the copy.
    """
    if callable(value):
        value = value()
    if isinstance(value, torch.Tensor):
        if isinstance(present, torch.Tensor) and present.shape == value.shape and present.dtype == value.dtype:
            set_in_place(present, value)
            return present
        return value.detach().to(device, copy=True)
    if isinstance(value, (list, tuple)):
        alike = isinstance(present, (list, tuple)) and len(present) == len(value)
        items = zip(value, present if alike else [None] * len(value), strict=True)
        return type(value)(_placed(*pair, device) for pair in items)
    if isinstance(value, dict):
        placed = copy(value)  # The copy has the same class, such as OrderedDict.
        placed.update({key: _placed(item, None, device) for key, item in value.items()})
        return placed
    return like(value, present)


def _narrow_dtype(value: Any) -> Any:
    """Returns the name of the dtype if the value is a numpy scalar of ``NARROW``, a list of such names if it is a list
    or tuple with such scalars, and otherwise None."""
    if isinstance(value, (list, tuple)):
        dtypes = [*map(_narrow_dtype, value)]
        return dtypes if any(dtypes) else None
    return type(value).__name__ if type(value) in NARROW.values() else None


def _narrowed(value: Any, dtype: Any) -> Any:
    """Returns a saved value as the numpy scalars that it was. ``dtype``: what ``_narrow_dtype`` has returned. Raises
    FormatError if it cannot have returned this."""
    if dtype is None:
        return value
    if isinstance(dtype, list) and isinstance(value, (list, tuple)) and len(dtype) == len(value):
        return type(value)(map(_narrowed, value, dtype))
    if isinstance(dtype, str) and dtype in NARROW and type(value) is float:
        return NARROW[dtype](value)
    raise FormatError(f"state: optimizer.numpy has {dtype!r} for {value!r}")


def like(value: Any, present: Any) -> Any:
    """Returns a number of Python as a numpy scalar, if ``present`` is one and its type has an equal number. Returns all
    other values unchanged."""
    if isinstance(present, (np.bool_, np.number)) and type(value) in (bool, int, float):
        with suppress(OverflowError), np.errstate(all="ignore"):
            same = type(present)(value)
            if _equal(same.item(), value):
                return same
    return value


def _equal(a: Any, b: Any) -> bool:
    """Returns whether two values, and all values inside of them, have the same types and are equal. NaN counts as equal
    to itself."""
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
    """Returns a text that is the same for equal states, so that a state need not be compared with all others."""
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
