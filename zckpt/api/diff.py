"""Compares two checkpoints: their structure, their non-tensor state, and the values of their tensors."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING

from zckpt.api.open import open_checkpoint
from zckpt.comparing.report import Difference, StateDifference, TensorDifference
from zckpt.comparing.tensors import Comparison, budget_of_a_read, compared_copies, paired
from zckpt.comparing.trees import settings, tree_differences
from zckpt.comparing.values import Tally
from zckpt.errors import KeyNotFoundError
from zckpt.listing.find import advised, find
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.transfer.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.comparing.tensors import Pair
    from zckpt.plan.select import Keys
    from zckpt.progress import Progress
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.storage.location import StrPath


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
    """Compares two checkpoints. They may have been written with different world sizes, stages and kinds of offload. It
    finds the tensors that only one of them has, tensors with different shapes, dtypes or values, and differences in the
    trees of non-tensor state: the step, the names of tied weights, param groups, counters and ``client_state``.

    ``a`` and ``b``: checkpoints, or directories of runs, whose ``latest`` names the checkpoint. ``keys``: None compares
    everything. A key, a glob, several of either, or a predicate over keys compares these tensors only, and no trees.

    Without a tolerance, values are compared bit for bit: NaN equals the same NaN, and -0.0 differs from 0.0. With
    ``rtol`` or ``atol``, finite values of tensors are equal too if ``|a - b| <= atol + rtol * max(|a|, |b|)``. Trees of
    non-tensor state are always compared exactly. If both checkpoints have the same number of ranks, the trees of each
    rank, such as its random number generators, are compared, and of a buffer whose values differ from rank to rank the
    value of each rank. Otherwise the trees of the ranks are not compared, and of such a buffer only the value that
    every load reads.

    Both checkpoints are read slice by slice in the memory of ``budget`` (None means ``Budget.from_environment()``),
    past the page cache, and what is read is verified. Where both cut a tensor into the same pieces, only the blocks
    whose digests differ are read. Damage to other blocks is therefore not noticed: ``zckpt.validate`` finds it.
    ``progress``: an object that is told how far the comparison is, such as ``zckpt.ProgressBar()``.

    Where torch.distributed is initialised, every rank has to call this. The ranks share the work, and each of them gets
    the whole result.

    Raises what ``zckpt.open`` and ``Checkpoint.load`` raise, for either checkpoint; KeyNotFoundError where ``keys``
    matches nothing in both; ValueError for a tolerance that is negative or not finite; and RankError.
    """
    ranks = Ranks(call="zckpt.diff")
    opened: list[_Opened] = []

    def arguments() -> list[object]:
        for name, value in (("rtol", rtol), ("atol", atol)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number of 0 or more, got {value!r}")
        return [*(str(Location.of(path).absolute()) for path in (a, b)), rtol, atol]

    def prepare(places: Sequence[str]) -> list[object]:
        opened.append(_Opened(places, keys, budget))
        return opened[0].about

    with ranks.undivided():
        check_equal(ranks.share(arguments, "compare"), "arguments")
        places = ranks.first(lambda: [str(find(path).location) for path in (a, b)], "find the checkpoints")
        check_equal(ranks.share(lambda: prepare(places), "open the checkpoints"), "checkpoints, or keys")
        (both,) = opened
        shares = ranks.share(lambda: both.compare(ranks.rank, ranks.size, rtol, atol, progress), "compare")
    return both.joined(shares)


_Share = tuple[dict[str, tuple[int, int, float, float]], list[tuple[str, str | None, str | None]], int]
"""What one process has found: for the key of each tensor that differs the row of its Tally, the fields of each
difference in the trees, and the number of bytes that the process has read."""


class _Opened:
    """Both checkpoints after they were opened, and the tensors of them that are compared."""

    def __init__(self, places: Sequence[str], keys: Keys, budget: Budget | None) -> None:
        self._budget = budget or Budget.from_environment()
        self.checkpoints = a, b = self._open(places[0]), self._open(places[1])
        chosen = _selected(a, b, keys)
        self.pairs, self.only_in_a, self.only_in_b = paired(a, b, *chosen)
        self._with_state = keys is None
        self.about: list[object] = [a.manifest.save_id, b.manifest.save_id, *chosen]

    def _open(self, place: str) -> Checkpoint:
        store = open_store(place)
        with advised(store):
            return open_checkpoint(store, budget_of_a_read(self._budget), partial(advised, store))

    def compare(self, number: int, size: int, rtol: float, atol: float, progress: Progress | None) -> _Share:
        a, b = self.checkpoints
        before = a.io.bytes_read + b.io.bytes_read
        comparison = Comparison(a, b, self._budget, rtol, atol, number, size)
        found = comparison.run([pair for pair in self.pairs if pair.is_comparable], progress)
        state = list(self._state(number, size)) if self._with_state else []
        read = a.io.bytes_read + b.io.bytes_read - before
        return {key: tally.row for key, tally in found.items()}, [astuple(one) for one in state], read

    def _state(self, number: int, size: int) -> Iterator[StateDifference]:
        a, b = self.checkpoints
        if number == 0:
            yield from tree_differences(settings(a), settings(b), "")
        if a.world_size == b.world_size:
            for rank in range(number, a.world_size, size):
                yield from tree_differences(a.rank_state(rank) or {}, b.rank_state(rank) or {}, f"rank {rank}")

    def joined(self, shares: list[_Share]) -> Difference:
        tallies: dict[str, Tally] = {}
        for rows, _, _ in shares:
            for key, row in rows.items():
                tallies.setdefault(key, Tally()).add(row)
        a, b = self.checkpoints
        state = [StateDifference(*fields) for _, differences, _ in shares for fields in differences]
        return Difference(
            a.path, b.path,
            tuple(found for pair in self.pairs if (found := self._difference(pair, tallies.get(pair.key)))),
            tuple(state), tuple(self.only_in_a), tuple(self.only_in_b),
            len(self.pairs), sum(read for *_, read in shares),
        )  # fmt: skip

    def _difference(self, pair: Pair, tally: Tally | None) -> TensorDifference | None:
        if not pair.is_comparable:
            return pair.difference
        if tally is None:
            return None
        compared = math.prod(pair.a.shape) * len(compared_copies(*self.checkpoints, pair))
        return replace(
            pair.difference, compared=compared, changed=tally.changed, nonfinite=tally.nonfinite,
            max_abs=tally.max_abs, max_rel=tally.max_rel,
        )  # fmt: skip


def _selected(a: Checkpoint, b: Checkpoint, keys: Keys) -> tuple[list[str], list[str]]:
    """Returns the keys of each checkpoint that ``keys`` asks for. Raises KeyNotFoundError for one that matches nothing
    in either checkpoint."""
    if keys is None:
        return list(a), list(b)
    chosen: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for wanted in [keys] if isinstance(keys, str) or callable(keys) else list(keys):
        errors = []
        for checkpoint, found in zip((a, b), chosen, strict=True):
            try:
                found.update(dict.fromkeys(checkpoint.contents.select(wanted)))
            except KeyNotFoundError as error:
                errors.append(error)
        if len(errors) == 2:
            raise errors[0]
    return list(chosen[0]), list(chosen[1])
