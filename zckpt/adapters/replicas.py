"""Engines that keep local tensors whole, and tensors of which several ranks have a replica.

Each of the owners of a replica reads one share of its elements, so a group of owners reads each byte only once, and the
owners exchange what they have read. ``plan.replicas`` describes the shares, and how a write chooses them.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.flats import ParameterRange, view_of
from zckpt.adapters.kind import Kind
from zckpt.engines.tensors import local_of
from zckpt.format.names import Tier
from zckpt.plan.replicas import Share
from zckpt.transfer.memory import lies_in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from zckpt.adapters.local_tensors import LocalTensors
    from zckpt.engines.group import RankGroup
    from zckpt.geometry import Span

GATHER_BYTES = 32 << 20
"""The largest number of bytes that one all-gather returns. It needs memory for these bytes, and for the bytes that this
rank sends."""


class Replicated(Kind):
    """The base class for wrappers that keep whole local tensors. An engine without an optimizer needs no more than this
    class. ``Kind`` documents the members."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> None:
        super().__init__(wrapper, parameters, local_tensors)
        self._gather: Callable[[], None] = lambda: None
        """Makes the replicas complete from the shares of all ranks. ``after_fill`` sets this function, and
        ``after_restore`` calls it."""

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        # Elements that do not lie in order cannot be divided between the ranks.
        for name, parameter in parameters.items():
            if not lies_in_order(parameter):
                yield f"a parameter that is not contiguous: {name}"
                return

    def tier(self, part: str) -> Tier:
        return Tier.DEVICE

    def weight(self, name: str) -> tuple[ParameterRange, torch.Tensor]:
        return self._elements(name, self._local_tensors[name].span)

    def read_share(self, name: str) -> tuple[ParameterRange, torch.Tensor]:
        return self._elements(name, self._share(name))

    def after_fill(self, weights: Collection[str]) -> None:
        named = self._parameters.items() if weights else ()
        restored = ((name, parameter) for name, parameter in named if self.stored_name(name) in weights)
        # Weights that were not restored are already equal on all owners.
        self._gather = self._gathering(chain(restored, self._replicas()))

    def after_restore(self) -> None:
        self._gather()

    def _replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the other replicas of which each owner has read a share, each with the name of its parameter, in the
        same order on all owners."""
        return iter(())

    def _share(self, name: str) -> Span:
        """Returns the elements of the local tensor of a parameter that this rank reads."""
        local = self._local_tensors[name]
        owners = local.owners
        return local.span if owners.size == 1 else Share(owners.rank, owners.size).of(local.span)

    def _elements(self, name: str, span: Span) -> tuple[ParameterRange, torch.Tensor]:
        local = self._local_tensors[name]
        data = view_of(local_of(self._parameters[name]), span.start - local.span.start, span.numel)
        return ParameterRange(name, span, 0, local.replicated, stored_as=local.stored_as), data

    def _gathering(self, replicas: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], None]:
        """Returns a function that fills these replicas as ``gathering`` does, for one group of owners after the other.
        ``replicas``: whole replicas, each with the name of a parameter that has the same owners. The owners have to
        pass the same replicas."""
        by_ranks: dict[tuple[int, ...], tuple[RankGroup, list[torch.Tensor]]] = {}
        for name, replica in replicas:
            owners = self._local_tensors[name].owners
            by_ranks.setdefault(owners.ranks, (owners, []))[1].append(replica)
        # With one order of all groups, no two ranks that are in several of them can wait for each other.
        gathers = [gathering(tensors, owners) for _, (owners, tensors) in sorted(by_ranks.items(), key=itemgetter(0))]

        def gather() -> None:
            for each in gathers:
                each()

        return gather


def gathering(tensors: Sequence[torch.Tensor], group: RankGroup) -> Callable[[], None]:
    """Returns a function that fills every rank's replicas with the shares of all ranks. ``tensors`` are contiguous and
    are the same on each rank. The function that is returned is collective. ``gathering`` itself is not collective: it
    allocates the memory for the function beforehand, so that the function does not fail on one rank alone."""
    ranks, rank = group.size, group.rank
    if ranks == 1 or not tensors:
        return lambda: None
    device = tensors[0].device
    # torch versions that have the first name deprecate the second one.
    all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    bytes_per_rank = max(GATHER_BYTES // ranks, 1)
    sent = torch.empty(bytes_per_rank, dtype=torch.uint8, device=device)
    received = torch.empty(bytes_per_rank * ranks, dtype=torch.uint8, device=device)

    def gather() -> None:
        for used, slices in _batches(tensors, ranks, bytes_per_rank):
            for offset, shares in slices:
                own_share = shares[rank]
                sent.narrow(0, offset, own_share.numel()).copy_(own_share)
            all_gather(received[: ranks * used], sent[:used], group=group.handle)
            for offset, shares in slices:
                for source, target in enumerate(shares):
                    target.copy_(received.narrow(0, source * used + offset, target.numel()))

    return gather


def _batches(
    tensors: Sequence[torch.Tensor], ranks: int, bytes_per_rank: int
) -> Iterator[tuple[int, list[tuple[int, Sequence[torch.Tensor]]]]]:
    """Yields batches of slices. The slices of a rank in one batch fit into ``bytes_per_rank`` bytes. Each batch has the
    number of bytes that it uses in the buffer of a rank and, for each slice, its offset in that buffer and a view of
    the share of each rank."""
    slices: list[tuple[int, Sequence[torch.Tensor]]] = []
    used = 0
    for tensor in tensors:
        flat = tensor.detach().view(-1).view(torch.uint8)
        length = -(-tensor.numel() // ranks) * tensor.element_size()
        done = 0
        while done < length:
            count = min(length - done, bytes_per_rank - used)
            starts = [min(source * length + done, flat.numel()) for source in range(ranks)]
            stops = [
                min(source * length + done + count, (source + 1) * length, flat.numel()) for source in range(ranks)
            ]
            shares = [flat.narrow(0, start, stop - start) for start, stop in zip(starts, stops, strict=True)]
            slices.append((used, shares))
            used, done = used + count, done + count
            if used == bytes_per_rank:
                yield used, slices
                slices, used = [], 0
    if slices:
        yield used, slices
