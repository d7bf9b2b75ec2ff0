"""Tensors that every rank holds whole: each rank speaks for one share of their elements, so that each byte is written
and read once. The shares are equal, rounded up; the last ones may be short or empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zckpt.engines.deepspeed.flats import Slot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

GATHER_BYTES = 32 << 20
"""What one all-gather returns at most: the memory that ``gather`` needs."""


def share(numel: int) -> tuple[int, int]:
    """The elements [start, stop) for which this rank speaks."""
    length = -(-numel // torch.distributed.get_world_size())
    start = min(torch.distributed.get_rank() * length, numel)
    return start, min(start + length, numel)


def weight(name: str, parameter: torch.Tensor) -> tuple[Slot, torch.Tensor]:
    """This rank's share of a contiguous parameter: where it belongs, and the 1-D elements, a view."""
    start, stop = share(parameter.numel())
    return Slot(name, tuple(parameter.shape), start, stop, 0), parameter.detach().view(-1)[start:stop]


def unsupported(parameters: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What cannot be dealt out."""
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            yield f"a parameter that is not contiguous: {name}"
            return


def gather(tensors: Sequence[torch.Tensor]) -> None:
    """Fills every rank's copy of contiguous ``tensors``, the same on each rank, with the shares of all. Collective."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if ranks == 1 or not tensors:
        return
    device = tensors[0].device
    room = max(GATHER_BYTES // ranks, 1)
    sent = torch.empty(room, dtype=torch.uint8, device=device)
    received = torch.empty(room * ranks, dtype=torch.uint8, device=device)
    for used, pieces in _filled(tensors, ranks, room):
        for at, shares in pieces:
            mine = shares[rank]
            sent.narrow(0, at, mine.numel()).copy_(mine)
        torch.distributed.all_gather_into_tensor(received[: ranks * used], sent[:used])
        for at, shares in pieces:
            for source, target in enumerate(shares):
                target.copy_(received.narrow(0, source * used + at, target.numel()))


def agreed(names: Collection[str], everything: Iterable[str], device: torch.device) -> frozenset[str]:
    """Those of ``everything``, the same on each rank, that any rank has in ``names``. Collective."""
    ordered = list(everything)
    mask = torch.tensor([name in names for name in ordered], dtype=torch.uint8, device=device)
    torch.distributed.all_reduce(mask, torch.distributed.ReduceOp.MAX)
    return frozenset(name for name, found in zip(ordered, mask.tolist(), strict=True) if found)


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
