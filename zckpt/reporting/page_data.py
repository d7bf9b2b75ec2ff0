"""Gathers what the page of zckpt.report shows, as frozen data. The functions here read no tensors."""

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
"""Matches the beginning of a name up to its first component that is a number."""
_SIGNIFICANT = 6
"""The number of digits that the page keeps of a number that is not a count."""
_DEPTH_MAX = 64
"""The largest depth of the treemap. If a name has more components, the last ones count as one."""
_Tree = dict[str, "_Tree | int"]
"""A node of the treemap while it is made: modules, whose names end with a dot, and the bytes of tensors by name."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the last checkpoint, as the page shows it."""

    info: TensorInfo
    other_names: tuple[str, ...]
    """The other names of a tied weight."""
    holders: Holders | None
    """None if the index is damaged."""
    values: Values | None
    """None if the values were not looked at, or if the tensor is damaged."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part, a module or a tensor in the treemap."""

    label: str
    parent: int
    """Its number in the treemap, which is smaller than that of its children; -1 for the root."""
    nbytes: int
    """The size of one copy of each tensor in it."""
    tensors: int


@dataclass(frozen=True, slots=True)
class Layers:
    """The norms of layers. A norm is that of all tensors of one part and one layer together. It is None if there is no
    such tensor, or if one of them is damaged."""

    names: tuple[str, ...]
    parts: tuple[str, ...]
    norms: tuple[tuple[tuple[float | None, ...], ...], ...]
    """The square roots of the sums of squares. The shape is ``[parts][layers][checkpoints]``."""
    updates: tuple[tuple[tuple[float | None, ...], ...], ...]
    """The norms of the differences to the checkpoint before. The shape is that of ``norms``."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Counts what differs in the values of those tensors that have the same shape and dtype in two neighbours."""

    equal: int
    """The number of tensors whose values are all equal."""
    changed: int
    """The number of all other tensors."""
    elements: int
    """The number of elements of all these tensors."""
    changed_elements: int
    """The number of elements that differ, or whose difference is not finite."""


@dataclass(frozen=True, slots=True)
class Change:
    """Lists what differs between two checkpoints that are next to each other on the page."""

    compared: Compared | None
    """None if values were not looked at."""
    added: tuple[str, ...]
    """The keys that only the later checkpoint has."""
    removed: tuple[str, ...]
    """The keys that only the earlier checkpoint has."""
    reshaped: tuple[str, ...]
    """The keys of tensors whose shape or dtype has changed."""
    settings: tuple[StateDifference, ...]


@dataclass(frozen=True, slots=True)
class PageData:
    """Everything that the page shows."""

    summaries: tuple[CheckpointSummary, ...]
    """One for each checkpoint. The checkpoint with the lowest step is the first."""
    reports: tuple[Report, ...]
    """One for each checkpoint: what ``zckpt.validate`` has found, and what was damaged when the page was made."""
    tensors: tuple[Tensor, ...]
    treemap: tuple[Node, ...]
    rank_bytes: dict[str, tuple[int, ...]]
    """The bytes of the files of each rank of the last checkpoint, by part. The headers of the files count too."""
    layers: Layers | None
    """None if there is a single checkpoint, or if the values were not looked at."""
    changes: tuple[Change, ...]
    """One for each checkpoint but the first: what differs from the checkpoint before."""
    with_values: bool


def gather(
    checkpoints: Sequence[Checkpoint],
    summaries: Sequence[CheckpointSummary],
    reports: Sequence[Report],
    trees: Sequence[object],
    found: Sequence[Found] | None,
) -> PageData:
    """Returns the data of a page about these checkpoints, of which the one with the lowest step is the first.
    ``trees``: the non-tensor state of each checkpoint, or None if it is damaged. ``found``: what ``values.look`` has
    found in each checkpoint, or None if the values were not looked at."""
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
    """Returns the layer that a tensor belongs to. It is the beginning of the tensor's name up to the first component
    that is a number, such as ``model.layers.3``. If no component is a number, it is the name of the module."""
    found = _LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


def in_order(names: Iterable[str]) -> list[str]:
    """Returns each name once, with numbers in ascending order: ``layers.2`` comes before ``layers.10``."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(set(names), key=key)


def treemap(sizes: Iterable[tuple[str, int]]) -> tuple[Node, ...]:
    """Returns the tree of parts, modules and tensors for these keys and their sizes in bytes. A module with only one
    child is joined with it."""
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
        """Adds a part or a module, and everything in it. Returns its node."""
        while parent > 0 and len(below) == 1:
            ((child, only),) = below.items()
            label = f"{label}.{child.removesuffix('.')}"
            if isinstance(only, int):
                nodes.append(Node(label, parent, only, 1))
                return nodes[-1]
            below = only
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
    """Returns the norms of all layers in each checkpoint. ``found``: the values of each checkpoint's tensors."""
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
    except FormatError:  # The index is damaged. The report of zckpt.validate has this error too.
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
    """Returns what the scripts of the page read. NaN and infinities become None, because JSON does not have them."""
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
    """Returns the fields of a tensor in the order of ``FIELDS`` in ``page.js``."""
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
