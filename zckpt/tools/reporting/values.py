"""Computes statistics of the values of tensors in several checkpoints, and of their differences to the checkpoint
before.

All checkpoints are read side by side: each stretch of a tensor is read from the oldest checkpoint, then from the next
one. So no byte is read twice, and the memory in use does not grow with the number of checkpoints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from zckpt.checkpoint.reading.loader import ReadRequest
from zckpt.errors import FormatError
from zckpt.progress import Progress, reported
from zckpt.tools.comparing.tensors import Pair, unequal
from zckpt.tools.share import batches
from zckpt.tools.statistics import (
    AT_ONCE,
    BATCH_STRETCHES_MAX,
    STRETCH_BYTES,
    Statistics,
    elements,
    statistics_of,
    stretches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.geometry import Span

T = TypeVar("T")

EXPONENT_BIAS = 1024
"""The number that is added to the exponent of a value to get its bin in a histogram. It makes all bins of positive
values greater than 0."""


class TensorStatistics(NamedTuple):
    """The statistics of the values of one tensor in one checkpoint."""

    statistics: Statistics = Statistics()
    """The statistics of all elements."""
    histogram: Mapping[int, int] = {}
    """The number of finite elements in each bin. Bin ``k`` counts the values from ``2 ** (k - EXPONENT_BIAS)`` up to
    twice as much, and bin ``-k`` counts their negatives. Zeros are in no bin, because ``statistics`` counts them."""
    update: Statistics | None = None
    """The statistics of the differences to the checkpoint before, element by element. It is None if that checkpoint has
    no such tensor, or if the tensor is damaged there."""

    def plus(self, other: TensorStatistics) -> TensorStatistics:
        """Returns the statistics of the elements of both together."""
        return TensorStatistics(
            self.statistics.plus(other.statistics),
            Counter(self.histogram) + Counter(other.histogram),
            self.update.plus(other.update) if self.update is not None and other.update is not None else None,
        )

    @classmethod
    def of(cls, fields: Sequence[Any]) -> TensorStatistics:
        """Returns the object from its fields, as another rank has sent them."""
        statistics, histogram, update = fields
        return cls(Statistics(*statistics), histogram, None if update is None else Statistics(*update))


ValuesByKey = dict[str, TensorStatistics | None]
"""The statistics of the tensors of one checkpoint, by key. They are None for a tensor that is damaged or missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A tensor that has the same shape and dtype in several checkpoints, one after the other."""

    first: int
    """The number of the first of these checkpoints, counted from 0."""
    infos: tuple[TensorInfo, ...]
    """The tensor in each of these checkpoints."""
    equal: frozenset[int]
    """The numbers of the checkpoints in which the tensor has the same digests as in the checkpoint before."""

    @property
    def key(self) -> str:
        """The key of the tensor."""
        return self.infos[0].key

    @property
    def numbers(self) -> range:
        """The numbers of the checkpoints."""
        return range(self.first, self.first + len(self.infos))


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """Elements of a chain."""

    chain: Chain
    span: Span

    @property
    def nbytes(self) -> int:
        return self.span.numel * self.chain.infos[0].item_bytes

    def request(self, number: int) -> ReadRequest:
        """Returns a request that reads the portion from checkpoint ``number`` into new memory."""
        return ReadRequest.fresh(self.chain.infos[number - self.chain.first], self.span)


def look(
    checkpoints: Sequence[Loader], number: int = 0, size: int = 1, progress: Progress | None = None
) -> tuple[list[ValuesByKey], list[list[FormatError]]]:
    """Reads the values of all tensors of these checkpoints, the oldest checkpoint first. Returns for each checkpoint
    the statistics of its tensors, and the errors of tensors that are damaged or missing.

    If a tensor has several copies, the first one is read. A tensor that has the same digests as in the checkpoint
    before is not read again. The work is divided into ``size`` shares. This call does the share ``number``, counted
    from 0, and ``joined`` joins the results of all shares. Raises StorageError.
    """
    errors: list[list[FormatError]] = [[] for _ in checkpoints]
    sound = [_sound(checkpoint, note.append) for checkpoint, note in zip(checkpoints, errors, strict=True)]
    values_of_each: list[ValuesByKey] = [dict.fromkeys(checkpoint.contents) for checkpoint in checkpoints]
    chains = _chains(checkpoints, sound)
    for chain in chains:
        for n in chain.numbers:
            values_of_each[n][chain.key] = TensorStatistics(update=None if n == chain.first else Statistics())
    all_batches = batches(_portions(checkpoints, chains), lambda item: item.nbytes, STRETCH_BYTES, BATCH_STRETCHES_MAX)
    own_batches = list(islice(all_batches, number, None, size))
    portions = [portion for batch in own_batches for portion in batch]
    total = sum(portion.nbytes * (len(portion.chain.infos) - len(portion.chain.equal)) for portion in portions)
    with reported(progress, "report", total) as advance:
        for batch in own_batches:
            last: dict[_Portion, tuple[torch.Tensor, TensorStatistics]] = {}
            for n, checkpoint in enumerate(checkpoints):
                in_checkpoint = [portion for portion in batch if n in portion.chain.numbers]
                unchanged = [portion for portion in in_checkpoint if n in portion.chain.equal and portion in last]
                to_read = [portion for portion in in_checkpoint if portion not in unchanged]
                read = _read(checkpoint, n, to_read, errors[n].append, advance)
                last = {portion: (last[portion][0], _unchanged(last[portion][1])) for portion in unchanged} | {
                    portion: (elements_now, _values(elements_now, last[portion][0] if portion in last else None))
                    for portion, elements_now in read.items()
                }
                for portion in in_checkpoint:
                    _, new = last.get(portion, (None, None))
                    values_of_each[n][portion.chain.key] = _plus(values_of_each[n][portion.chain.key], new)
    return values_of_each, errors


def joined(shares: Sequence[Mapping[str, Sequence[Any] | None]]) -> ValuesByKey:
    """Returns the statistics of one checkpoint. ``shares``: what ``look`` has returned for it in several processes,
    which may have sent it."""
    all_values = ({key: None if row is None else TensorStatistics.of(row) for key, row in s.items()} for s in shares)
    return reduce(lambda one, other: {key: _plus(values, other[key]) for key, values in one.items()}, all_values)


def _plus(known: TensorStatistics | None, new: TensorStatistics | None) -> TensorStatistics | None:
    return known.plus(new) if known is not None and new is not None else None


def _each(action: Callable[[list[T]], object], items: list[T], note: Callable[[FormatError], object]) -> list[T]:
    """Calls ``action`` with all items at once. If this raises FormatError, calls it with one item at a time. Returns
    the items for which it succeeds. ``note`` is called with the errors of the others."""
    try:
        action(items)
        return items
    except FormatError:  # The loop below finds the items that raise it.
        pass
    succeeded = []
    for item in items:
        try:
            action([item])
            succeeded.append(item)
        except FormatError as error:
            note(error)
    return succeeded


def _sound(checkpoint: Loader, note: Callable[[FormatError], object]) -> dict[str, TensorInfo]:
    """Returns the tensors whose files exist and have the right lengths, by key. ``note`` is called with the errors of
    the others."""
    return {info.key: info for info in _each(checkpoint.contents.check_sizes, list(checkpoint.contents.values()), note)}


def _chains(checkpoints: Sequence[Loader], sound: Sequence[Mapping[str, TensorInfo]]) -> list[Chain]:
    """Returns all chains of the tensors that are ``sound`` in each checkpoint."""
    equal: list[set[str]] = [set(), *(_equal(checkpoints, sound, n) for n in range(1, len(checkpoints)))]
    chains = []
    for key in dict.fromkeys(key for infos in sound for key in infos):
        in_checkpoints = [(n, infos.get(key)) for n, infos in enumerate(sound)]
        for kind, group in groupby(in_checkpoints, lambda pair: pair[1] and _kind(pair[1])):
            if kind is not None:
                numbers, infos = zip(*group, strict=True)
                chains.append(Chain(numbers[0], infos, frozenset(n for n in numbers[1:] if key in equal[n])))
    return chains


def _kind(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    return info.dtype_name, info.shape


def _equal(checkpoints: Sequence[Loader], sound: Sequence[Mapping[str, TensorInfo]], n: int) -> set[str]:
    """Returns the keys of the tensors of checkpoint ``n`` that have the same digests in the checkpoint before."""
    before, infos = sound[n - 1], sound[n]
    both = [key for key in infos if key in before and _kind(infos[key]) == _kind(before[key])]
    compared = [(Pair(key, before[key], infos[key]), 0, 0) for key in both]
    try:
        spans_of_each = [spans for _, spans in unequal(checkpoints[n - 1], checkpoints[n], compared)]
    except FormatError:  # A digest table is damaged. The error is noted when a tensor is read that needs the table.
        return set()
    return {key for key, spans in zip(both, spans_of_each, strict=True) if not spans}


def _portions(checkpoints: Sequence[Loader], chains: Sequence[Chain]) -> Iterator[_Portion]:
    """Yields all portions of all chains. Portions end where blocks of the last checkpoint of the chain end."""
    for n, checkpoint in enumerate(checkpoints):
        ending = [chain for chain in chains if chain.numbers[-1] == n]
        for stretch in stretches(checkpoint, [chain.infos[-1] for chain in ending]):
            yield _Portion(ending[stretch.number], stretch.span)


def _read(
    checkpoint: Loader,
    n: int,
    portions: list[_Portion],
    note: Callable[[FormatError], object],
    advance: Callable[[int], None],
) -> dict[_Portion, torch.Tensor]:
    """Reads these portions of checkpoint ``n`` and verifies them. Returns the elements of those that are not damaged.
    ``note`` is called with the errors of the others."""
    elements_of: dict[_Portion, torch.Tensor] = {}

    def read(some: list[_Portion]) -> None:
        requests = [portion.request(n) for portion in some]
        checkpoint.read(requests, verify=True)
        elements_of.update(zip(some, (request.target for request in requests), strict=True))

    _each(read, portions, note)
    advance(sum(portion.nbytes for portion in portions))
    return elements_of


def _unchanged(values: TensorStatistics) -> TensorStatistics:
    """Returns the statistics for a checkpoint in which the elements are the same as in the checkpoint before."""
    numel = values.statistics.numel
    return values._replace(update=Statistics(numel, zeros=numel, min=0.0, max=0.0))


def _values(values: torch.Tensor, before: torch.Tensor | None) -> TensorStatistics:
    """Returns the statistics of ``values``, a 1-D tensor. ``before``: the same elements in the checkpoint before, if it
    has them."""
    statistics, update = Statistics(), None if before is None else Statistics()
    histogram: Counter[int] = Counter()
    for first in range(0, len(values), AT_ONCE):
        wide = elements(values[first : first + AT_ONCE])
        statistics = statistics.plus(statistics_of(wide))
        histogram.update(_histogram(wide))
        if before is not None and update is not None:
            update = update.plus(statistics_of(wide - elements(before[first : first + AT_ONCE])))
    return TensorStatistics(statistics, histogram, update)


def _histogram(wide: torch.Tensor) -> dict[int, int]:
    """Returns the histogram of float64 numbers. Their first 12 bits are the sign and the exponent."""
    counts = torch.bincount((wide[wide != 0].view(torch.int64) >> 52) & 0xFFF, minlength=4096)
    histogram = {}
    for code in counts.nonzero().flatten().tolist():
        exponent = code & 0x7FF
        if exponent != 0x7FF:  # Infinities and NaN have this exponent.
            histogram[(exponent + 1) * (-1 if code >> 11 else 1)] = int(counts[code])
    return histogram
