"""Compares two checkpoints: their structure, their non-tensor state, and the values of their tensors."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.find import advised, find
from zckpt.checkpoint.open import open_store_loader
from zckpt.errors import KeyNotFoundError
from zckpt.format.digest import digest
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.tools.comparing.report import Difference, StateDifference, TensorDifference
from zckpt.tools.comparing.tensors import Comparison, budget_of_a_read, compared_copies, paired
from zckpt.tools.comparing.trees import settings, tree_differences
from zckpt.tools.comparing.values import Tally
from zckpt.transfer.budget import Budget, budget_or_default

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.plan.select import Keys
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.tools.comparing.tensors import Pair


def diff(
    a: StrPath,
    b: StrPath,
    keys: Keys = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compares two checkpoints, which may differ in world size, stage and offload.

    The result lists the tensors that only one checkpoint has, the tensors with different shapes, dtypes or values, and
    differences in the trees of non-tensor state: the step, the names of tied weights, param groups, counters and
    ``client_state``.

    Without a tolerance, values are compared bit for bit: NaN equals the same NaN, and -0.0 differs from 0.0. Trees of
    non-tensor state are always compared exactly. If both checkpoints have the same number of ranks, the trees of each
    rank are compared too, such as the states of its random number generators. If a buffer has different values on
    different ranks, the values of each rank are compared. If the numbers of ranks differ, the trees of the ranks are
    not compared, and of such a buffer only the values that ``zckpt.Checkpoint.load`` returns.

    Both checkpoints are read in slices within the memory of ``budget``, without filling the page cache, and all data
    that are read are verified. If both checkpoints cut a tensor into the same pieces, only the blocks whose digests
    differ are read. Damage to other blocks is therefore not noticed; ``zckpt.validate`` finds it.

    If torch.distributed is initialised, every rank has to call this. The ranks share the work.

    Args:
        a: the directory of a checkpoint, or that of a run, whose file ``latest`` names the checkpoint.
        b: the directory of the other checkpoint, or that of a run.
        keys: the tensors that are compared. None compares all tensors and the trees. A key, a glob, several keys or
            globs, or a predicate over keys compares only these tensors, and no trees.
        rtol: the relative tolerance. If ``rtol`` or ``atol`` is given, finite values also count as equal if ``|a - b|
            <= atol + rtol * max(|a|, |b|)``.
        atol: the absolute tolerance.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The differences. Every rank gets all of them.

    Raises:
        KeyNotFoundError: a key, glob or predicate of ``keys`` matches nothing in either checkpoint.
        ValueError: a tolerance is negative or not finite.
        RankError: another rank has failed or is lost, or the ranks have different arguments.
        ZckptError: one of the checkpoints cannot be read. ``zckpt.open`` and ``Checkpoint.load`` list these errors.
    """
    ranks = Ranks(call="zckpt.diff")
    opened: list[_BothCheckpoints] = []

    def arguments() -> list[object]:
        for name, value in (("rtol", rtol), ("atol", atol)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number of 0 or more, got {value!r}")
        return [*(str(Location.of(path).absolute()) for path in (a, b)), rtol, atol]

    def prepare(paths: Sequence[str]) -> list[object]:
        opened.append(_BothCheckpoints(paths, keys, budget))
        return opened[0].identity

    with ranks.undivided():
        ranks.decide(arguments, partial(check_equal, what="arguments"), "compare")
        paths = ranks.first(lambda: [str(find(path).location) for path in (a, b)], "find the checkpoints")
        ranks.decide(lambda: prepare(paths), partial(check_equal, what="checkpoints, or keys"), "open the checkpoints")
        (both,) = opened
        found = ranks.decide(lambda: both.compare(ranks.rank, ranks.size, rtol, atol, progress), _joined, "compare")
    return both.difference(found)


_Found = tuple[dict[str, Tally], list[tuple[str, str | None, str | None]], int]
"""What one process or all of them have found: the tally of each tensor that differs, by its key; the fields of each
difference in the trees; and the number of bytes that were read."""


class _BothCheckpoints:
    """The two checkpoints that are compared, both open, and the tensors of them that are compared."""

    def __init__(self, paths: Sequence[str], keys: Keys, budget: Budget | None) -> None:
        self._budget = budget_or_default(budget)
        self.checkpoints = a, b = self._open(paths[0]), self._open(paths[1])
        selected_keys = _selected(a, b, keys)
        self.pairs, self.only_in_a, self.only_in_b = paired(a.contents, b.contents, *selected_keys)
        self._with_state = keys is None
        keys_digest = digest(repr(selected_keys).encode(errors="backslashreplace"))
        self.identity: list[object] = [a.manifest.save_id, b.manifest.save_id, keys_digest]
        """The save ids of the checkpoints and a digest of the keys. They have to be equal on all ranks."""

    def _open(self, path: str) -> Loader:
        store = open_store(path)
        with advised(store):
            return open_store_loader(store, budget_of_a_read(self._budget))

    def compare(self, number: int, size: int, rtol: float, atol: float, progress: Progress | None) -> _Found:
        a, b = self.checkpoints
        bytes_read_before = a.reader.count.bytes_read + b.reader.count.bytes_read
        comparison = Comparison(a, b, self._budget, rtol, atol, number, size)
        tallies = comparison.run([pair for pair in self.pairs if pair.is_comparable], progress)
        differences = list(self._state(number, size)) if self._with_state else []
        bytes_read = a.reader.count.bytes_read + b.reader.count.bytes_read - bytes_read_before
        return tallies, [astuple(difference) for difference in differences], bytes_read

    def _state(self, number: int, size: int) -> Iterator[StateDifference]:
        a, b = self.checkpoints
        if number == 0:
            yield from tree_differences(settings(a), settings(b), "")
        if a.manifest.world_size == b.manifest.world_size:
            for rank in range(number, a.manifest.world_size, size):
                yield from tree_differences(a.rank_state(rank) or {}, b.rank_state(rank) or {}, f"rank {rank}")

    def difference(self, found: _Found) -> Difference:
        """Returns the result from what all processes have found."""
        a, b = self.checkpoints
        tallies, differences, bytes_read = found
        return Difference(
            a.path, b.path,
            tuple(difference for pair in self.pairs if (difference := self._difference(pair, tallies.get(pair.key)))),
            tuple(StateDifference(*fields) for fields in differences), tuple(self.only_in_a), tuple(self.only_in_b),
            len(self.pairs), bytes_read,
        )  # fmt: skip

    def _difference(self, pair: Pair, tally: Tally | None) -> TensorDifference | None:
        if not pair.is_comparable:
            return pair.difference
        if tally is None:
            return None
        changed, nonfinite, max_abs, max_rel = tally
        compared = math.prod(pair.a.shape) * len(compared_copies(*self.checkpoints, pair))
        return replace(
            pair.difference, compared=compared, changed=changed, nonfinite=nonfinite, max_abs=max_abs, max_rel=max_rel
        )


def _joined(found: Sequence[_Found]) -> _Found:
    """Returns what all processes have found."""
    tallies: dict[str, Tally] = {}
    for of_process, _, _ in found:
        for key, tally in of_process.items():
            tallies[key] = tallies.get(key, Tally()).plus(tally)
    differences = [fields for _, of_process, _ in found for fields in of_process]
    return tallies, differences, sum(bytes_read for *_, bytes_read in found)


def _selected(a: Loader, b: Loader, keys: Keys) -> tuple[list[str], list[str]]:
    """Returns the keys of each checkpoint that ``keys`` selects. Raises KeyNotFoundError if a key, a glob or a
    predicate matches nothing in either checkpoint."""
    if keys is None:
        return list(a.contents), list(b.contents)
    selected: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for pattern in [keys] if isinstance(keys, str) or callable(keys) else list(keys):
        errors = []
        for checkpoint, selected_keys in zip((a, b), selected, strict=True):
            try:
                selected_keys.update(dict.fromkeys(checkpoint.contents.select(pattern)))
            except KeyNotFoundError as error:
                errors.append(error)
        if len(errors) == 2:
            raise errors[0]
    return list(selected[0]), list(selected[1])
