"""The messages between a rank and its children in the tree of the ranks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLOT_BYTES = 1024
"""The size of the slots in which messages are exchanged first, because gloo gathers and scatters tensors of one size
only. If a message does not fit into its slot, all members exchange their whole messages, padded to the longest."""

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
        self._scatter([_slot(_GO_ON, longest, b"")] * len(slots), SLOT_BYTES)
        whole = self._gather(bytes(longest))[1:]
        return [message[:length] for message, length in zip(whole, lengths, strict=True)]

    def answer(self, messages: Sequence[bytes]) -> None:
        """Answers each child, on the parent."""
        longest = max(map(len, messages))
        self._scatter([_slot(len(message), longest, message) for message in messages], SLOT_BYTES)
        if longest > _FITTING_BYTES:
            self._scatter([message.ljust(longest, b"\0") for message in messages], longest)

    def ask(self, message: bytes) -> bytes:
        """Asks the parent, on a child, and returns its answer."""
        self._gather(_slot(len(message), 0, message))
        slot = self._scatter([], SLOT_BYTES)
        length, longest = _HEADER.unpack_from(slot)
        if length == _GO_ON:
            self._gather(message.ljust(longest, b"\0"))
            slot = self._scatter([], SLOT_BYTES)
            length, longest = _HEADER.unpack_from(slot)
        return (slot[_HEADER.size :] if longest <= _FITTING_BYTES else self._scatter([], longest))[:length]

    def _gather(self, message: bytes) -> list[bytes]:
        """Sends a message to the parent. Returns on the parent the messages of all, its own one first. They all have
        the same length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        number = self.gloo.size() if self.gloo.rank() == 0 else 0
        gathered = [torch.empty_like(mine) for _ in range(number)]
        self._wait(self.gloo.gather([gathered] if gathered else [], [mine], dist.GatherOptions()))
        return [tensor.numpy().tobytes() for tensor in gathered]

    def _scatter(self, messages: Sequence[bytes], nbytes: int) -> bytes:
        """Sends each child a message of ``nbytes`` bytes. Returns it on the child."""
        mine = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        sent = [mine, *(torch.frombuffer(bytearray(message), dtype=torch.uint8) for message in messages)]
        self._wait(self.gloo.scatter([mine], [sent] if messages else [], dist.ScatterOptions()))
        return mine.numpy().tobytes()


def _slot(length: int, longest: int, message: bytes) -> bytes:
    fitting = message if len(message) <= _FITTING_BYTES else b""
    return (_HEADER.pack(length, longest) + fitting).ljust(SLOT_BYTES, b"\0")
