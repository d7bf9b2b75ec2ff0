"""Wrappers that keep weights whole on every rank, and tensors of which every rank has a replica.

Each rank speaks for one share of a replica's elements, so that each byte is written and read once. The shares are
equal, rounded up; the last ones may be short or empty.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.deepspeed.flats import Slot
from zckpt.engines.deepspeed.kind import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zckpt.engines.deepspeed.group import RankGroup

GATHER_BYTES = 32 << 20
"""What one all-gather returns at most: the memory that ``gather`` needs."""


class Replicated(Kind):
    """What the wrappers have in common that keep weights whole on every rank. It is all that is needed without an
    optimizer. ``wrapper.Wrapper`` says what each member is for."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        super().__init__(wrapper, parameters, group)
        self._gather: Callable[[], None] = lambda: None
        """Makes the replicas whole. ``after_fill`` sets this function, and ``after_restore`` calls it."""

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        yield from unsupported(parameters)

    def tier(self, part: str) -> str:
        return "device"

    def weight(self, name: str) -> tuple[Slot, torch.Tensor]:
        parameter = self._parameters[name]
        start, stop = share(parameter.numel(), self._group)
        return Slot(name, tuple(parameter.shape), start, stop, 0), parameter.detach().view(-1)[start:stop]

    def before_restore(self) -> None:
        pass

    def weight_in_memory(self, name: str) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self.weight(name)[1])

    def after_fill(self, weights: Collection[str]) -> None:
        self._gather = gathering(self._weights(weights), self._group)

    def after_restore(self) -> None:
        self._gather()

    def _weights(self, names: Collection[str]) -> list[torch.Tensor]:
        return [parameter for name, parameter in self._parameters.items() if name in names]


def share(numel: int, group: RankGroup) -> tuple[int, int]:
    """The elements [start, stop) for which this rank speaks."""
    length = -(-numel // group.size)
    start = min(group.rank * length, numel)
    return start, min(start + length, numel)


def unsupported(parameters: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The parameters that cannot be dealt out to the ranks."""
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            yield f"a parameter that is not contiguous: {name}"
            return


def gathering(tensors: Sequence[torch.Tensor], group: RankGroup) -> Callable[[], None]:
    """A function that fills every rank's copy of contiguous ``tensors``, the same on each rank, with the shares of all.
    The function that is returned is collective. The memory that it needs is taken here, before, so that it does not
    fail on one rank alone. ``gathering`` itself is not collective."""
    ranks, rank = group.size, group.rank
    if ranks == 1 or not tensors:
        return lambda: None
    device = tensors[0].device
    # The old name is deprecated where the new one exists.
    all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    room = max(GATHER_BYTES // ranks, 1)
    sent = torch.empty(room, dtype=torch.uint8, device=device)
    received = torch.empty(room * ranks, dtype=torch.uint8, device=device)

    def gather() -> None:
        for used, pieces in _filled(tensors, ranks, room):
            for at, shares in pieces:
                mine = shares[rank]
                sent.narrow(0, at, mine.numel()).copy_(mine)
            all_gather(received[: ranks * used], sent[:used], group=group.handle)
            for at, shares in pieces:
                for source, target in enumerate(shares):
                    target.copy_(received.narrow(0, source * used + at, target.numel()))

    return gather


def _filled(
    tensors: Sequence[torch.Tensor], ranks: int, room: int
) -> Iterator[tuple[int, list[tuple[int, Sequence[torch.Tensor]]]]]:
    """Buffers' worth of pieces: the bytes used, then where each piece lies in a rank's buffer and all ranks' views."""
    pieces: list[tuple[int, Sequence[torch.Tensor]]] = []
    used = 0
    for tensor in tensors:
        flat = tensor.detach().view(-1).view(torch.uint8)
        length = -(-tensor.numel() // ranks) * tensor.element_size()
        done = 0
        while done < length:
            count = min(length - done, room - used)
            starts = [min(source * length + done, flat.numel()) for source in range(ranks)]
            stops = [
                min(source * length + done + count, (source + 1) * length, flat.numel()) for source in range(ranks)
            ]
            shares = [flat.narrow(0, start, stop - start) for start, stop in zip(starts, stops, strict=True)]
            pieces.append((used, shares))
            used, done = used + count, done + count
            if used == room:
                yield used, pieces
                pieces, used = [], 0
    if pieces:
        yield used, pieces
