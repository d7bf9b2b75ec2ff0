"""The messages between a rank and its children in the tree of the ranks."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLOT_BYTES = 1024
"""The size of the slots in which messages are exchanged first, because gloo gathers and scatters tensors of one size
only. If a message does not fit into its slot, all members exchange their whole messages, each of its own size."""

_HEADER = struct.Struct("<qq")
_FITTING_BYTES = SLOT_BYTES - _HEADER.size
_GO_ON = -1
"""Stands in the slots of the parent in the place of the length, if the message of any child does not fit. Then every
child sends its whole message."""


class Family:
    """A rank and its children, which are a group of gloo in which the parent has the number 0. ``wait`` waits for an
    operation of gloo, and raises RankError if a rank is lost. Each call of ``ask`` of every child meets a call of
    ``collect`` and then one of ``answer`` of the parent."""

    def __init__(self, gloo: Any, wait: Callable[[dist.Work], None]) -> None:
        self.gloo, self._wait = gloo, wait

    def collect(self) -> list[bytes]:
        """Returns, on the parent, what the children ask."""
        slots = self._gather(_slot(0, 0, b""))[1:]
        lengths = [_HEADER.unpack_from(slot)[0] for slot in slots]
        longest = max(lengths)
        if longest <= _FITTING_BYTES:
            return [slot[_HEADER.size :][:length] for slot, length in zip(slots, lengths, strict=True)]
        self._scatter([_slot(_GO_ON, longest, b"")] * len(slots))
        return self._exchange([b""] * len(slots), lengths)

    def answer(self, messages: Sequence[bytes]) -> None:
        """Answers each child, on the parent."""
        longest = max(map(len, messages))
        self._scatter([_slot(len(message), longest, message) for message in messages])
        if longest > _FITTING_BYTES:
            self._exchange(messages, [0] * len(messages))

    def ask(self, message: bytes) -> bytes:
        """Asks the parent, on a child, and returns its answer."""
        self._gather(_slot(len(message), 0, message))
        slot = self._scatter([])
        length, longest = _HEADER.unpack_from(slot)
        if length == _GO_ON:
            self._exchange([message], [0])
            slot = self._scatter([])
            length, longest = _HEADER.unpack_from(slot)
        return slot[_HEADER.size :][:length] if longest <= _FITTING_BYTES else self._exchange([b""], [length])[0]

    def _exchange(self, messages: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
        """Exchanges messages of any size between the parent and its children. All members call it. ``messages``: on the
        parent one for each child, on a child the one for the parent. Returns the messages that come from there, of
        these ``lengths``."""
        others = range(1, self.gloo.size()) if self.gloo.rank() == 0 else range(1)
        sent_bytes, received_bytes = ([0] * self.gloo.size() for _ in range(2))
        for other, message, length in zip(others, messages, lengths, strict=True):
            sent_bytes[other], received_bytes[other] = len(message), length
        sent = _tensor(b"".join(messages))
        received = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        self._wait(self.gloo.alltoall_base(received, sent, received_bytes, sent_bytes))
        raw, stops = received.numpy(), accumulate(lengths)
        return [raw[stop - length : stop].tobytes() for stop, length in zip(stops, lengths, strict=True)]

    def _gather(self, message: bytes) -> list[bytes]:
        """Sends a message to the parent. Returns on the parent the messages of all, its own one first. They all have
        the same length."""
        mine = _tensor(message)
        number = self.gloo.size() if self.gloo.rank() == 0 else 0
        gathered = [torch.empty_like(mine) for _ in range(number)]
        self._wait(self.gloo.gather([gathered] if gathered else [], [mine], dist.GatherOptions()))
        return [tensor.numpy().tobytes() for tensor in gathered]

    def _scatter(self, slots: Sequence[bytes]) -> bytes:
        """Sends each child a slot. Returns it on the child."""
        mine = torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cpu")
        sent = [mine, *map(_tensor, slots)]
        self._wait(self.gloo.scatter([mine], [sent] if slots else [], dist.ScatterOptions()))
        return mine.numpy().tobytes()


def _tensor(message: bytes) -> torch.Tensor:
    if not message:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _slot(length: int, longest: int, message: bytes) -> bytes:
    fitting = message if len(message) <= _FITTING_BYTES else b""
    return (_HEADER.pack(length, longest) + fitting).ljust(SLOT_BYTES, b"\0")
