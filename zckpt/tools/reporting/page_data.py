"""Gathers what the page of zckpt.report shows, as frozen data. The functions here read no tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from zckpt.errors import FormatError
from zckpt.tools.comparing.tensors import paired
from zckpt.tools.comparing.trees import tree_differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zckpt.checkpoint.listing.tensors import Holders, TensorInfo
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.tools.comparing.report import StateDifference
    from zckpt.tools.reporting.values import TensorStatistics, ValuesByKey
    from zckpt.tools.summary import CheckpointSummary
    from zckpt.tools.validating.report import Report

_LAYER = re.compile(r".*?\.\d+(?=\.)|\d+(?=\.)")
"""Matches the beginning of a name up to its first component that is a number."""
_SIGNIFICANT = 6
"""The number of significant digits of a number that is not a count."""
_DEPTH_MAX = 64
"""The largest depth of the treemap. If a name has more components, the last ones count as one."""
_Tree = dict[str, "_Tree | int"]
"""The content of a part or module while the treemap is made. It maps the names of modules, which end with a dot, to
their contents, and the names of tensors to their sizes in bytes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the last checkpoint, as the page shows it."""

    info: TensorInfo
    """The key, the dtype, the shape and the size of the tensor."""
    other_names: tuple[str, ...]
    """The other names of a tied weight."""
    holders: Holders | None
    """The ranks that hold the tensor. None if the index is damaged."""
    values: TensorStatistics | None
    """The statistics of the values. None if the values were not read, or if the tensor is damaged."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part, a module or a tensor in the treemap."""

    label: str
    """The text that the treemap shows for the node."""
    parent: int
    """The number of the node's parent in the treemap. Nodes are numbered from 0, and a parent comes before its
    children. It is -1 for the root."""
    nbytes: int
    """The size in bytes of all tensors in the node. One copy of each tensor is counted."""
    tensors: int
    """The number of tensors in the node."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The norms of layers in several checkpoints. A norm is that of all tensors of one part and one layer together. It
    is None if there is no such tensor, or if one of them is damaged."""

    names: tuple[str, ...]
    """The names of the layers."""
    parts: tuple[str, ...]
    """The names of the parts."""
    norms: tuple[tuple[tuple[float | None, ...], ...], ...]
    """The square roots of the sums of squares. The shape is ``[parts][layers][checkpoints]``."""
    updates: tuple[tuple[tuple[float | None, ...], ...], ...]
    """The norms of the differences to the checkpoint before. The shape is that of ``norms``."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Counts of equal and changed values between two checkpoints that are next to each other on the page. Only tensors
    that have the same shape and dtype in both are counted."""

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
    """The differences between two checkpoints that are next to each other on the page."""

    compared: Compared | None
    """The differences in values. None if the values were not read."""
    added: tuple[str, ...]
    """The keys that only the later checkpoint has."""
    removed: tuple[str, ...]
    """The keys that only the earlier checkpoint has."""
    reshaped: tuple[str, ...]
    """The keys of tensors whose shape or dtype has changed."""
    settings: tuple[StateDifference, ...]
    """The differences in the tree of non-tensor state."""


@dataclass(frozen=True, slots=True)
class PageData:
    """Everything that the page shows. The last checkpoint is the one with the highest step."""

    summaries: tuple[CheckpointSummary, ...]
    """The summaries of all checkpoints, in ascending order of their steps."""
    reports: tuple[Report, ...]
    """The reports of ``zckpt.validate`` for all checkpoints. They also have a finding for all data that were found to
    be damaged when the page was made."""
    tensors: tuple[Tensor, ...]
    """The tensors of the last checkpoint."""
    treemap: tuple[Node, ...]
    """The nodes of the treemap of the last checkpoint."""
    rank_bytes: dict[str, tuple[int, ...]]
    """The sizes in bytes of the data files of each rank of the last checkpoint, by part. The headers of the files are
    counted too."""
    layers: Layers | None
    """The norms of the layers. None if there is a single checkpoint, or if the values were not read."""
    changes: tuple[Change, ...]
    """The differences between each checkpoint and the one before, for all checkpoints but the first."""
    with_values: bool
    """Whether the values of the tensors were read."""


def gather(
    checkpoints: Sequence[Loader],
    summaries: Sequence[CheckpointSummary],
    reports: Sequence[Report],
    trees: Sequence[object],
    values_of_each: Sequence[ValuesByKey] | None,
) -> PageData:
    """Returns the data of a page about these checkpoints, which are in ascending order of their steps. ``trees``: the
    non-tensor state of each checkpoint, or None if it is damaged. ``values_of_each``: the values of the tensors of each
    checkpoint, as ``look`` of ``zckpt.tools.reporting.values`` returns them, or None if they were not read."""
    last = checkpoints[-1]
    tensors = _tensors(last, {} if values_of_each is None else values_of_each[-1])
    several = len(checkpoints) > 1
    return PageData(
        tuple(summaries),
        tuple(reports),
        tensors,
        treemap((tensor.info.key, tensor.info.nbytes) for tensor in tensors),
        _rank_bytes(last),
        layers(last.parts, values_of_each) if several and values_of_each is not None else None,
        tuple(
            _change(*pair, trees[number - 1], trees[number], None if values_of_each is None else values_of_each[number])
            for number, pair in enumerate(pairwise(checkpoints), 1)
        ),
        values_of_each is not None,
    )


def layer_of(name: str) -> str:
    """Returns the layer that a tensor belongs to. It is the beginning of the tensor's name up to the first component
    that is a number, such as ``model.layers.3``. If no component is a number, it is the name of the module."""
    match = _LAYER.match(name)
    return match[0] if match else name.rpartition(".")[0] or name


def in_order(names: Iterable[str]) -> list[str]:
    """Returns each name once. Names are sorted so that ``layers.2`` comes before ``layers.10``."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(set(names), key=key)


def treemap(sizes: Iterable[tuple[str, int]]) -> tuple[Node, ...]:
    """Returns the tree of parts, modules and tensors. A module with only one child is joined with this child.
    ``sizes``: the key and the size in bytes of each tensor."""
    root: _Tree = {}
    for key, nbytes in sizes:
        part, _, name = key.partition("/")
        *modules, leaf = [part, *name.split(".", _DEPTH_MAX)]
        inner = root
        for module in modules:
            child = inner.setdefault(f"{module}.", {})  # With the dot, a module never has the name of a tensor.
            assert isinstance(child, dict)
            inner = child
        inner[leaf] = nbytes
    nodes: list[Node] = []

    def add(label: str, parent: int, content: _Tree) -> Node:
        """Adds a part or a module, and everything in it. Returns its node."""
        while parent > 0 and len(content) == 1:
            ((child_name, only_child),) = content.items()
            label = f"{label}.{child_name.removesuffix('.')}"
            if isinstance(only_child, int):
                nodes.append(Node(label, parent, only_child, 1))
                return nodes[-1]
            content = only_child
        number = len(nodes)
        nodes.append(Node(label, parent, 0, 0))
        children = []
        for name, child in content.items():
            if isinstance(child, int):
                children.append(Node(name, number, child, 1))
                nodes.append(children[-1])
            else:
                children.append(add(name.removesuffix("."), number, child))
        nbytes, tensors = sum(child.nbytes for child in children), sum(child.tensors for child in children)
        nodes[number] = Node(label, parent, nbytes, tensors)
        return nodes[number]

    add("all parts", -1, root)
    return tuple(nodes)


def layers(parts: Sequence[str], values_of_each: Sequence[ValuesByKey]) -> Layers:
    """Returns the norms of all layers in each checkpoint. ``values_of_each``: the values of the tensors of each
    checkpoint."""
    names = tuple(
        in_order(layer_of(key.partition("/")[2]) for of_checkpoint in values_of_each for key in of_checkpoint)
    )
    sums: dict[tuple[str, str, int], list[float]] = {}
    """The sums of squares of the values, and of their differences to the checkpoint before, by part, layer and number
    of the checkpoint."""
    for number, of_checkpoint in enumerate(values_of_each):
        for key, values in of_checkpoint.items():
            part, _, name = key.partition("/")
            layer_sums = sums.setdefault((part, layer_of(name), number), [0.0, 0.0])
            layer_sums[0] += math.nan if values is None else values.statistics.sum_of_squares
            layer_sums[1] += math.nan if values is None or values.update is None else values.update.sum_of_squares

    def norms(which: int) -> tuple[tuple[tuple[float | None, ...], ...], ...]:
        def norm(part: str, layer: str, number: int) -> float | None:
            total = sums.get((part, layer, number), [math.nan] * 2)[which]
            return math.sqrt(total) if math.isfinite(total) else None

        checkpoint_numbers = range(len(values_of_each))
        return tuple(tuple(tuple(norm(part, name, n) for n in checkpoint_numbers) for name in names) for part in parts)

    return Layers(names, tuple(parts), norms(0), norms(1))


def _tensors(checkpoint: Loader, values_by_key: ValuesByKey) -> tuple[Tensor, ...]:
    infos = list(checkpoint.contents.values())
    holders: Sequence[Holders | None]
    try:
        holders = checkpoint.contents.holders(infos)
    except FormatError:  # The index is damaged. The report of zckpt.validate has this error too.
        holders = [None] * len(infos)
    names: dict[str, list[str]] = {}
    for alias, name in checkpoint.manifest.aliases.items():
        names.setdefault(name, []).append(alias)
    rows = zip(infos, holders, strict=True)
    return tuple(
        Tensor(info, tuple(names.get(info.name, ())), held, values_by_key.get(info.key)) for info, held in rows
    )


def _rank_bytes(checkpoint: Loader) -> dict[str, tuple[int, ...]]:
    manifest = checkpoint.manifest
    sums = {part.name: [0] * manifest.world_size for part in manifest.parts}
    files = manifest.files
    for rank, part, nbytes in zip(files.rank, files.part_id, files.nbytes, strict=True):
        sums[manifest.parts[part].name][rank] += nbytes
    return {part: tuple(of_ranks) for part, of_ranks in sums.items() if any(of_ranks)}


def _change(
    before: Loader, after: Loader, tree_before: object, tree: object, values_by_key: ValuesByKey | None
) -> Change:
    pairs, removed, added = paired(before.contents, after.contents, list(before.contents), list(after.contents))
    trees_are_known = tree_before is not None and tree is not None
    return Change(
        None if values_by_key is None else _compared(values_by_key),
        tuple(added),
        tuple(removed),
        tuple(pair.key for pair in pairs if not pair.is_comparable),
        tuple(tree_differences(tree_before, tree, "")) if trees_are_known else (),
    )


def _compared(values_by_key: ValuesByKey) -> Compared:
    updates = [values.update for values in values_by_key.values() if values is not None and values.update is not None]
    equal = sum(update.zeros == update.numel for update in updates)
    elements = sum(update.numel for update in updates)
    return Compared(equal, len(updates) - equal, elements, elements - sum(update.zeros for update in updates))


def to_json(data: PageData) -> dict[str, Any]:
    """Returns the data that the scripts of the page read. NaN and infinities become None, because JSON does not have
    them."""
    return {
        "steps": [summary.step for summary in data.summaries],
        "withValues": data.with_values,
        "treemap": {
            "labels": [node.label for node in data.treemap],
            "parents": [node.parent for node in data.treemap],
            "nbytes": [node.nbytes for node in data.treemap],
            "tensors": [node.tensors for node in data.treemap],
        },
        "rankBytes": data.rank_bytes,
        "tensors": [_row(tensor) for tensor in data.tensors],
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
    statistics, update = values.statistics, values.update
    numbers = (statistics.min, statistics.max, statistics.mean, statistics.norm)
    counts = (statistics.nan, statistics.inf, statistics.zeros)
    changed = None if update is None else (_rounded(update.norm), update.numel - update.zeros)
    return [*row, *map(_rounded, numbers), *counts, sorted(values.histogram.items()), changed]


def _rounded(value: Any) -> Any:
    """Returns a number with ``_SIGNIFICANT`` digits, or None if it is not finite. Tuples of numbers become lists."""
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_SIGNIFICANT}g}") if value is not None and math.isfinite(value) else None
