"""What the page of zckpt.report shows, as frozen data, and the functions that gather it. No tensor is read here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from zckpt.comparing.trees import tree_differences
from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zckpt.comparing.report import StateDifference
    from zckpt.listing.contents import Holders, TensorInfo
    from zckpt.listing.summary import CheckpointSummary
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.reporting.values import Found, Values
    from zckpt.validation.report import Report

_LAYER = re.compile(r".*?\.\d+(?=\.)|\d+(?=\.)")
"""The beginning of a name up to its first component that is a number."""
_SIGNIFICANT = 6
"""Digits of a number that is no count."""
_DEPTH_MAX = 64
"""Modules around one another in the treemap. Of a name with more components, the last ones are one."""
_Tree = dict[str, "_Tree | int"]
"""Parts and modules, whose names end with a dot, and the bytes of tensors."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the last checkpoint."""

    info: TensorInfo
    other_names: tuple[str, ...]
    """The further names of a tied weight."""
    holders: Holders | None
    """None if the index is damaged."""
    values: Values | None
    """None if they were not looked at."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part, a module or a tensor in the treemap."""

    label: str
    parent: int
    """Its number in the treemap, which is smaller than that of its children; -1 for the root."""
    nbytes: int
    """Of one copy of each tensor."""
    tensors: int


@dataclass(frozen=True, slots=True)
class Layers:
    """Norms over all tensors of a part that belong to one layer. They have the shape
    ``[parts][layers][checkpoints]``; None where the layer has no such tensor, or one that was not looked at."""

    names: tuple[str, ...]
    parts: tuple[str, ...]
    norms: tuple[tuple[tuple[float | None, ...], ...], ...]
    """The square roots of the sums of squares."""
    updates: tuple[tuple[tuple[float | None, ...], ...], ...]
    """Those of the differences to the checkpoint before."""


@dataclass(frozen=True, slots=True)
class Compared:
    """How the values of the tensors that two neighbours have in the same shape and dtype differ."""

    equal: int
    """Tensors."""
    changed: int
    """Tensors."""
    elements: int
    """Of all these tensors."""
    changed_elements: int


@dataclass(frozen=True, slots=True)
class Change:
    """What differs between two neighbours."""

    compared: Compared | None
    """None if values were not looked at."""
    added: tuple[str, ...]
    """Keys."""
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    """Keys whose shape or dtype is another one."""
    settings: tuple[StateDifference, ...]


@dataclass(frozen=True, slots=True)
class PageData:
    """All that the page shows."""

    summaries: tuple[CheckpointSummary, ...]
    """Of the checkpoints, the one of the lowest step first."""
    reports: tuple[Report, ...]
    """What ``zckpt.validate`` has found, and what was found to be damaged while values were looked at."""
    tensors: tuple[Tensor, ...]
    treemap: tuple[Node, ...]
    rank_bytes: dict[str, tuple[int, ...]]
    """By part, the bytes of the files of each rank of the last checkpoint. The headers of the files count too."""
    layers: Layers | None
    """None for a single checkpoint, and if values were not looked at."""
    changes: tuple[Change, ...]
    """Between each checkpoint and the next one."""
    with_values: bool


def gather(
    checkpoints: Sequence[Checkpoint],
    summaries: Sequence[CheckpointSummary],
    reports: Sequence[Report],
    trees: Sequence[object],
    found: Sequence[Found] | None,
) -> PageData:
    """Puts together what is known of checkpoints, the one of the lowest step first. ``trees``: what each of them holds
    beside tensors; None where that is damaged. ``found``: what ``values.look`` has found; None if it has not looked."""
    last = checkpoints[-1]
    tensors = _tensors(last, {} if found is None else found[-1])
    several = len(checkpoints) > 1
    return PageData(
        tuple(summaries),
        tuple(reports),
        tensors,
        treemap((one.info.key, one.info.nbytes) for one in tensors),
        _rank_bytes(last),
        layers(last.parts, found) if several and found is not None else None,
        tuple(
            _change(*pair, trees[number - 1], trees[number], None if found is None else found[number])
            for number, pair in enumerate(pairwise(checkpoints), 1)
        ),
        found is not None,
    )


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first component that is a number, as in
    ``model.layers.3``; where there is none, the name of its module."""
    found = _LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order in which people count: ``layers.2`` before ``layers.10``."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(set(names), key=key)


def treemap(sizes: Iterable[tuple[str, int]]) -> tuple[Node, ...]:
    """A tree of parts, modules and tensors, by keys and bytes. A module whose only child is a module is one with it."""
    root: _Tree = {}
    for key, nbytes in sizes:
        part, _, name = key.partition("/")
        *modules, leaf = [part, *name.split(".", _DEPTH_MAX)]
        inner = root
        for module in modules:
            below = inner.setdefault(f"{module}.", {})  # The dot keeps it apart from a tensor of the same name.
            assert isinstance(below, dict)
            inner = below
        inner[leaf] = nbytes
    nodes: list[Node] = []

    def add(label: str, parent: int, below: _Tree) -> Node:
        """Adds a part or a module, and all below it."""
        while parent > 0 and len(below) == 1:
            ((child, only),) = below.items()
            if isinstance(only, int):
                break
            label, below = f"{label}.{child.removesuffix('.')}", only
        number = len(nodes)
        nodes.append(Node(label, parent, 0, 0))
        inside = []
        for name, one in below.items():
            if isinstance(one, int):
                inside.append(Node(name, number, one, 1))
                nodes.append(inside[-1])
            else:
                inside.append(add(name.removesuffix("."), number, one))
        nodes[number] = Node(label, parent, sum(one.nbytes for one in inside), sum(one.tensors for one in inside))
        return nodes[number]

    add("all parts", -1, root)
    return tuple(nodes)


def layers(parts: Sequence[str], found: Sequence[Found]) -> Layers:
    """The norms of each layer in each checkpoint, from what was found of the tensors."""
    names = tuple(in_order(layer_of(key.partition("/")[2]) for one in found for key in one))
    sums: dict[tuple[str, str, int], list[float]] = {}
    for number, one in enumerate(found):
        for key, values in one.items():
            part, _, name = key.partition("/")
            sum_of = sums.setdefault((part, layer_of(name), number), [0.0, 0.0])
            sum_of[0] += math.nan if values is None else values.statistics.sum_of_squares
            sum_of[1] += math.nan if values is None or values.update is None else values.update.sum_of_squares

    def norms(which: int) -> tuple[tuple[tuple[float | None, ...], ...], ...]:
        def norm(part: str, layer: str, number: int) -> float | None:
            total = sums.get((part, layer, number), [math.nan] * 2)[which]
            return math.sqrt(total) if math.isfinite(total) else None

        counted = range(len(found))
        return tuple(tuple(tuple(norm(part, name, n) for n in counted) for name in names) for part in parts)

    return Layers(names, tuple(parts), norms(0), norms(1))


def _tensors(checkpoint: Checkpoint, found: Found) -> tuple[Tensor, ...]:
    infos = list(checkpoint.values())
    holders: Sequence[Holders | None]
    try:
        holders = checkpoint.contents.holders(infos)
    except FormatError:  # The index is damaged, which is among the findings.
        holders = [None] * len(infos)
    names: dict[str, list[str]] = {}
    for alias, name in checkpoint.aliases.items():
        names.setdefault(name, []).append(alias)
    rows = zip(infos, holders, strict=True)
    return tuple(Tensor(info, tuple(names.get(info.name, ())), held, found.get(info.key)) for info, held in rows)


def _rank_bytes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    manifest = checkpoint.manifest
    sums = {part.name: [0] * manifest.world_size for part in manifest.parts}
    files = manifest.files
    for rank, part, nbytes in zip(files.rank, files.part, files.nbytes, strict=True):
        sums[manifest.parts[part].name][rank] += nbytes
    return {part: tuple(of_ranks) for part, of_ranks in sums.items() if any(of_ranks)}


def _change(before: Checkpoint, after: Checkpoint, tree_before: object, tree: object, found: Found | None) -> Change:
    kinds_before, kinds_after = ({key: (i.dtype_name, i.shape) for key, i in one.items()} for one in (before, after))
    both = [key for key in kinds_after if key in kinds_before]
    known = tree_before is not None and tree is not None
    return Change(
        None if found is None else _compared(found),
        tuple(key for key in kinds_after if key not in kinds_before),
        tuple(key for key in kinds_before if key not in kinds_after),
        tuple(key for key in both if kinds_before[key] != kinds_after[key]),
        tuple(tree_differences(tree_before, tree, "")) if known else (),
    )


def _compared(found: Found) -> Compared:
    updates = [values.update for values in found.values() if values is not None and values.update is not None]
    equal = sum(one.zeros == one.numel for one in updates)
    elements = sum(one.numel for one in updates)
    return Compared(equal, len(updates) - equal, elements, elements - sum(one.zeros for one in updates))


def to_json(data: PageData) -> dict[str, Any]:
    """What the scripts of the page read. Numbers that JSON does not have are None."""
    return {
        "steps": [one.step for one in data.summaries],
        "withValues": data.with_values,
        "treemap": {
            "labels": [one.label for one in data.treemap],
            "parents": [one.parent for one in data.treemap],
            "nbytes": [one.nbytes for one in data.treemap],
            "tensors": [one.tensors for one in data.treemap],
        },
        "rankBytes": data.rank_bytes,
        "tensors": [_row(one) for one in data.tensors],
        "layers": None
        if data.layers is None
        else {
            "names": data.layers.names,
            "parts": data.layers.parts,
            "norms": _rounded(data.layers.norms),
            "updates": _rounded(data.layers.updates),
        },
    }


def _row(tensor: Tensor) -> list[Any]:
    """In the order of ``FIELDS`` in ``page.js``."""
    info, held, values = tensor.info, tensor.holders, tensor.values
    where = None if held is None else (held.ranks, held.first_rank, held.last_rank, held.pieces, ", ".join(held.tiers))
    row = [info.part, info.name, info.torch_name, info.shape, info.nbytes, tensor.other_names, where]
    if values is None:
        return row
    of, update = values.statistics, values.update
    numbers = (of.min, of.max, of.mean, of.norm)
    changed = None if update is None else (_rounded(update.norm), update.numel - update.zeros)
    return [*row, *map(_rounded, numbers), of.nan, of.inf, of.zeros, sorted(values.histogram.items()), changed]


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.{_SIGNIFICANT}g}") if value is not None and math.isfinite(value) else None
