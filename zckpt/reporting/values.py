"""Looks at the values of tensors in each checkpoint of a run, and at how they differ from the checkpoint before.

All checkpoints are read side by side: each stretch of a tensor is read from the oldest checkpoint, then from the next
one. So no byte is read twice, and the memory in use does not grow with the number of checkpoints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zckpt.comparing.tensors import Pair, unequal
from zckpt.errors import FormatError
from zckpt.plan.reshard import Span
from zckpt.progress import Progress, reported
from zckpt.reading.checkpoint import HOST, Want
from zckpt.reading.statistics import (
    AT_ONCE,
    BATCH_STRETCHES_MAX,
    STRETCH_BYTES,
    Statistics,
    elements,
    statistics_of,
    stretches,
)
from zckpt.transfer.memory import fresh_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.listing.contents import TensorInfo
    from zckpt.reading.checkpoint import Checkpoint

T = TypeVar("T")

_ALIGNMENT_BYTES = 64
EXPONENT_BIAS = 1024
"""What is added to the exponent of a number to get its bin in a histogram, so that all bins are above 0."""


@dataclass(frozen=True, slots=True)
class Values:
    """Describes the values of one tensor in one checkpoint."""

    statistics: Statistics = field(default_factory=Statistics)
    histogram: Mapping[int, int] = field(default_factory=dict)
    """The number of finite elements in each bin. Bin ``k`` has the numbers from ``2 ** (k - EXPONENT_BIAS)`` up to
    twice as much, and bin ``-k`` has their negatives. Zeros are in no bin, because ``statistics`` counts them."""
    update: Statistics | None = None
    """The statistics of the differences to the checkpoint before, element by element. It is None if that checkpoint has
    no such tensor, or if the tensor is damaged there."""

    def plus(self, other: Values) -> Values:
        """Returns the values of the elements of both."""
        return Values(
            self.statistics.plus(other.statistics),
            Counter(self.histogram) + Counter(other.histogram),
            self.update.plus(other.update) if self.update is not None and other.update is not None else None,
        )

    @property
    def row(self) -> list[Any]:
        """The fields as plain values, which ranks can send to each other."""
        update = None if self.update is None else list(astuple(self.update))
        return [list(astuple(self.statistics)), list(self.histogram.items()), update]

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Values:
        """Returns the Values whose ``row`` this is."""
        numbers, histogram, update = row
        return cls(Statistics(*numbers), dict(histogram), None if update is None else Statistics(*update))


Found = dict[str, Values | None]
"""The values of a checkpoint's tensors by key. A tensor that is damaged or missing has None."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A tensor that has the same shape and dtype in several checkpoints, one after the other."""

    first: int
    """The number of the first of these checkpoints, counted from 0."""
    infos: tuple[TensorInfo, ...]
    equal: frozenset[int]
    """The numbers of the checkpoints in which its digests are those of the checkpoint before."""

    @property
    def key(self) -> str:
        return self.infos[0].key

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.infos))


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """The elements ``[start, stop)`` of a chain, which begin at byte ``offset`` of the buffers."""

    chain: Chain
    start: int
    stop: int
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.chain.infos[0].item_bytes

    def of(self, room: torch.Tensor) -> torch.Tensor:
        return room[self.offset : self.offset + self.nbytes].view(self.chain.infos[0].dtype)

    def want(self, number: int, room: torch.Tensor) -> Want:
        info = self.chain.infos[number - self.chain.first]
        return Want(info, [Span(self.start, self.stop, 0)], self.of(room))


def look(
    checkpoints: Sequence[Checkpoint], number: int = 0, size: int = 1, progress: Progress | None = None
) -> tuple[list[Found], list[list[FormatError]]]:
    """Looks at the values of all tensors of these checkpoints, the oldest checkpoint first. Returns for each checkpoint
    the values of its tensors, and the errors of tensors that are damaged or missing.

    If a tensor has several copies, the first one is looked at. A tensor whose digests are those of the checkpoint
    before is not read again. This process does share ``number`` of ``size`` shares of the work, and ``joined`` puts the
    shares together. Raises StorageError.
    """
    errors: list[list[FormatError]] = [[] for _ in checkpoints]
    sound = [_sound(checkpoint, note.append) for checkpoint, note in zip(checkpoints, errors, strict=True)]
    found: list[Found] = [dict.fromkeys(checkpoint) for checkpoint in checkpoints]
    chains = _chains(checkpoints, sound)
    for chain in chains:
        for n in chain.numbers:
            found[n][chain.key] = Values(update=None if n == chain.first else Statistics())
    batches = list(_batches(checkpoints, chains))[number::size]
    nbytes = max((batch[-1].offset + batch[-1].nbytes for batch in batches), default=0)
    before, now = fresh_tensor((nbytes,), torch.uint8, HOST), fresh_tensor((nbytes,), torch.uint8, HOST)
    total = sum(one.nbytes * (len(one.chain.infos) - len(one.chain.equal)) for batch in batches for one in batch)
    with reported(progress, "report", total) as advance:
        for batch in batches:
            last: dict[_Portion, Values] = {}
            for n, checkpoint in enumerate(checkpoints):
                own = [one for one in batch if n in one.chain.numbers]
                unread = [one for one in own if n in one.chain.equal and one in last]
                wanted = [one for one in own if one not in unread]
                read = _read(checkpoint, n, wanted, now, errors[n].append, advance)
                last = {one: _unchanged(last[one]) for one in unread} | {
                    one: _values(one.of(now), one.of(before) if one in last else None) for one in read
                }
                for one in read:
                    one.of(before).copy_(one.of(now))
                for one in own:
                    known, new = found[n][one.chain.key], last.get(one)
                    found[n][one.chain.key] = known.plus(new) if known is not None and new is not None else None
    return found, errors


def joined(shares: Sequence[Found]) -> Found:
    """Returns what several processes together have found of one checkpoint."""
    total = dict(shares[0])
    for share in shares[1:]:
        for key, new in share.items():
            known = total[key]
            total[key] = known.plus(new) if known is not None and new is not None else None
    return total


def _each(action: Callable[[list[T]], object], things: list[T], note: Callable[[FormatError], object]) -> list[T]:
    """Calls ``action`` with all things at once, or, if that fails, with one thing at a time. Returns the things with
    which it succeeds. ``note`` is called with the errors of the others."""
    try:
        action(things)
        return things
    except FormatError:  # The loop below finds the things that raise it.
        pass
    done = []
    for one in things:
        try:
            action([one])
            done.append(one)
        except FormatError as error:
            note(error)
    return done


def _sound(checkpoint: Checkpoint, note: Callable[[FormatError], object]) -> dict[str, TensorInfo]:
    """Returns the tensors whose files are there and have their recorded lengths. ``note`` is called with the errors of
    the others."""
    return {info.key: info for info in _each(checkpoint.contents.check_sizes, list(checkpoint.values()), note)}


def _chains(checkpoints: Sequence[Checkpoint], sound: Sequence[Mapping[str, TensorInfo]]) -> list[Chain]:
    """Returns all chains of the tensors that are ``sound`` in each checkpoint."""
    equal: list[set[str]] = [set(), *(_equal(checkpoints, sound, n) for n in range(1, len(checkpoints)))]
    found = []
    for key in dict.fromkeys(key for infos in sound for key in infos):
        of_all = [(n, infos.get(key)) for n, infos in enumerate(sound)]
        for kind, group in groupby(of_all, lambda one: one[1] and _kind(one[1])):
            if kind is not None:
                numbers, infos = zip(*group, strict=True)
                found.append(Chain(numbers[0], infos, frozenset(n for n in numbers[1:] if key in equal[n])))
    return found


def _kind(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    return info.dtype_name, info.shape


def _equal(checkpoints: Sequence[Checkpoint], sound: Sequence[Mapping[str, TensorInfo]], n: int) -> set[str]:
    """Returns the keys of the tensors of checkpoint ``n`` whose digests are those of the checkpoint before."""
    before, infos = sound[n - 1], sound[n]
    both = [key for key in infos if key in before and _kind(infos[key]) == _kind(before[key])]
    compared = [(Pair(key, before[key], infos[key]), 0, 0) for key in both]
    try:
        ranges = [found for _, found in unequal(checkpoints[n - 1], checkpoints[n], compared)]
    except FormatError:  # A digest table is damaged. The error is noted when a tensor is read that needs the table.
        return set()
    return {key for key, found in zip(both, ranges, strict=True) if not found}


def _batches(checkpoints: Sequence[Checkpoint], chains: Sequence[Chain]) -> Iterator[list[_Portion]]:
    """Yields all portions of all chains. A batch has at most ``BATCH_STRETCHES_MAX`` portions, and they take at most
    ``STRETCH_BYTES`` of a buffer, unless it is a single one. They are cut where blocks of the last checkpoint of the
    chain end."""
    batch: list[_Portion] = []
    stop = 0
    for n, checkpoint in enumerate(checkpoints):
        ending = [chain for chain in chains if chain.numbers[-1] == n]
        for stretch in stretches(checkpoint, [chain.infos[-1] for chain in ending]):
            portion = _Portion(ending[stretch.number], stretch.start, stretch.stop, stop)
            if batch and (len(batch) == BATCH_STRETCHES_MAX or stop + portion.nbytes > STRETCH_BYTES):
                yield batch
                batch, portion = [], replace(portion, offset=0)
            batch.append(portion)
            stop = portion.offset + -(-portion.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if batch:
        yield batch


def _read(
    checkpoint: Checkpoint,
    n: int,
    portions: list[_Portion],
    room: torch.Tensor,
    note: Callable[[FormatError], object],
    advance: Callable[[int], None],
) -> list[_Portion]:
    """Reads these portions of checkpoint ``n`` into ``room`` and verifies them. Returns those that are not damaged."""
    found = _each(lambda some: checkpoint.read([one.want(n, room) for one in some], verify=True), portions, note)
    advance(sum(one.nbytes for one in portions))
    return found


def _unchanged(values: Values) -> Values:
    """Returns the values of the same elements in the next checkpoint, where they are equal."""
    numel = values.statistics.numel
    return replace(values, update=Statistics(numel, zeros=numel, min=0.0, max=0.0))


def _values(values: torch.Tensor, before: torch.Tensor | None) -> Values:
    """Returns the Values of these elements, which were ``before`` in the checkpoint before."""
    statistics, update = Statistics(), None if before is None else Statistics()
    histogram: Counter[int] = Counter()
    for first in range(0, len(values), AT_ONCE):
        wide = elements(values[first : first + AT_ONCE])
        statistics = statistics.plus(statistics_of(wide))
        histogram.update(_histogram(wide))
        if before is not None and update is not None:
            update = update.plus(statistics_of(wide - elements(before[first : first + AT_ONCE])))
    return Values(statistics, histogram, update)


def _histogram(wide: torch.Tensor) -> dict[int, int]:
    """Returns the histogram of numbers in double precision. Their first 12 bits are the sign and the exponent."""
    counts = torch.bincount((wide[wide != 0].view(torch.int64) >> 52) & 0xFFF, minlength=4096)
    found = {}
    for code in counts.nonzero().flatten().tolist():
        exponent = code & 0x7FF
        if exponent != 0x7FF:  # which infinities and NaN have
            found[(exponent + 1) * (-1 if code >> 11 else 1)] = int(counts[code])
    return found
