"""Turns what a live optimizer keeps into a tree, and joins the trees of several ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from zckpt.adapters.flats import divided, geometry
from zckpt.adapters.optimizer.classes import COUNTING_TOGETHER, class_name, decouples, inner
from zckpt.adapters.optimizer.values import equal, identity, narrow_dtype
from zckpt.engines.composed import decomposed
from zckpt.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.adapters.flats import FlatBuffer


def capture(optimizer: Any, flats: Sequence[FlatBuffer]) -> dict[str, Any]:
    """Returns the tree of a live optimizer."""
    groups: list[dict[str, Any]] = [
        {"params": [], **{key: value for key, value in group.items() if key != "params"}}
        for group in optimizer.param_groups
    ]
    states: list[dict[str, Any]] = []
    shared_entries: dict[Any, dict[str, Any]] = {}
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
        key = _key(summary)
        if key not in shared_entries:
            shared_entries[key] = {"params": [], **summary}
            states.append(shared_entries[key])
        shared_entries[key]["params"].extend(flat.stored_names)
    subtracts = decouples(optimizer)
    decay_entry = {} if subtracts is None else {"decoupled_weight_decay": subtracts}
    inner_entry = {} if inner(optimizer) is None else {"inner_class": type(inner(optimizer)).__name__}
    narrow = [
        [index, key, dtype]
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key != "params" and (dtype := narrow_dtype(value)) is not None
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
        same = equal(*({k: v for k, v in one.items() if k not in ("param_groups", "states")} for one in (tree, first)))
        numbers: Counter[str] = Counter()
        for group in tree["param_groups"]:
            # DeepSpeed names all groups of a stage that has experts, and none of another stage.
            name = str(group.get("name")) if "moe" in group else ""
            joined_group = groups.setdefault((name, numbers[name]), {**group, "params": []})
            numbers[name] += 1
            without = [{key: one[key] for key in one if key not in ("params", "name")} for one in (group, joined_group)]
            same = same and equal(*without)
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


def _same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    alike = a["moments"] == b["moments"] and a.get("bound") == b.get("bound")
    return alike and equal(a["values"], b["values"])


def _key(state: Mapping[str, Any]) -> tuple[object, ...]:
    """Returns a key that only equal states have, so that a state need not be compared with all others."""
    values = frozenset((key, *identity(value)) for key, value in state["values"].items())
    return values, *state["moments"], None, *state.get("bound", ())
