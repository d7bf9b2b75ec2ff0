"""Files that ranks send each other, because each machine has the files of its own ranks only.

On each rank, one thread exchanges messages with those of the other ranks, in rounds. In each round, all ranks tell what
they want to read. Every rank then sends the bytes that are wanted of it. The memory that a round takes is bounded.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from zckpt.errors import RankError, StorageError, ZckptError
from zckpt.format.rules import broken
from zckpt.ranks.collectives import FILES, Ranks
from zckpt.storage.contract import IOCount, Reader
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from zckpt.storage.buffers import Bytes

REQUEST_BYTES = 4 << 20
"""The most bytes of one request. Longer reads are cut."""
ROUND_BYTES = 16 << 20
"""The most bytes that one rank sends in one round, and the most that one rank receives."""
PAUSE_SECONDS = 0.02
"""How long all ranks wait before the next round if no rank wants anything, in seconds."""


class WantedRange(NamedTuple):
    """A range of a file that one rank wants from another one."""

    rank: int
    """The rank that wants it."""
    number: int
    """The number of the request among those of this rank."""
    holder: int
    """The rank that has the file."""
    path: str
    offset: int
    nbytes: int


@dataclass(eq=False)
class _Request:
    """A request that a thread of this rank waits for."""

    holder: int
    path: str
    offset: int
    target: Bytes
    done: threading.Event = field(default_factory=threading.Event)
    nbytes: int = 0
    """How many bytes there were: fewer than asked for if the file ends before."""
    error: str = ""


def accepted(wanted: Sequence[WantedRange], round_bytes: int) -> list[WantedRange]:
    """Returns those of the requests that are served in this round: as many, in their order, as fit into ``round_bytes``
    for each rank that sends and for each rank that receives, and at least one."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    served = []
    for request in wanted:
        loads = sent.get(request.holder, 0), received.get(request.rank, 0)
        if max(loads) + request.nbytes <= round_bytes or not any(loads):
            sent[request.holder], received[request.rank] = (load + request.nbytes for load in loads)
            served.append(request)
    return served


def _dealt_out(told: Sequence[Any]) -> tuple[tuple[bool, bool], dict[int, tuple[list[WantedRange], list[WantedRange]]]]:
    """Decides, on rank 0, which requests are served in this round. Returns whether there are any, and whether all ranks
    have ended, and for each rank what it sends and what it receives. ``told``: for each rank, whether it has ended, and
    its requests."""
    wanted = [
        WantedRange(rank, number, *request)
        for rank, (_, requests) in enumerate(told)
        for number, request in enumerate(requests)
    ]
    of_ranks: dict[int, tuple[list[WantedRange], list[WantedRange]]] = {}
    for one in accepted(wanted, ROUND_BYTES):
        of_ranks.setdefault(one.holder, ([], []))[0].append(one)
        of_ranks.setdefault(one.rank, ([], []))[1].append(one)
    return (bool(wanted), all(ended for ended, _ in told)), of_ranks


def _for_those_who_asked(outcomes: Sequence[Any]) -> tuple[None, dict[int, list[Any]]]:
    """Returns for each rank that has asked the outcomes of its requests. ``outcomes``: what ``Peers._read`` has
    returned on each rank."""
    of_ranks: dict[int, list[Any]] = {}
    for rank, *outcome in chain(*outcomes):
        of_ranks.setdefault(rank, []).append(outcome)
    return None, of_ranks


class Peers:
    """The exchange of files between the ranks of ``group``. All ranks make one, and all of them end it, which waits for
    the others. In between, each rank may read what the others have. Use it as a context manager."""

    def __init__(self, group: dist.ProcessGroup | None, reader: Reader, call: str) -> None:
        """``reader`` reads this rank's files, and is closed at the end. ``call``: the function that all ranks call."""
        self._ranks = Ranks(group, channel=FILES, call=call)
        self._reader = reader
        self._waiting: list[_Request] = []
        self._lock = threading.Lock()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = Worker(self._exchange, "zckpt-files", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._ended = True
        self._thread.wait()
        self._reader.close()

    def read(self, holder: int, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views`` from byte ``offset`` of a file that the rank ``holder`` has. Returns the number of bytes
        read, which is smaller only if the file ends before. Raises StorageError, and RankError if a rank is lost."""
        requests = []
        for view in map(np.asarray, views):
            for start in range(0, len(view), REQUEST_BYTES):
                requests.append(_Request(holder, path, offset, view[start : start + REQUEST_BYTES]))
                offset += len(requests[-1].target)
        with self._lock:
            if self._ended:
                raise StorageError("the ranks do not exchange files any more", file=path)
            self._waiting.extend(requests)
        for request in requests:
            while not request.done.wait(0.1):
                if self._failure is not None:
                    raise RankError(f"the ranks cannot exchange files any more: {self._failure}", file=path)
            if request.error:
                raise StorageError(f"rank {holder} cannot read it: {request.error}", file=path)
        filled = 0
        for request in requests:
            filled += request.nbytes
            if request.nbytes < len(request.target):
                break
        return filled

    def _exchange(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # ``read`` raises it
            self._failure = error

    def _round(self) -> bool:
        """Does one round with all other ranks. Returns whether there will be another one."""
        with self._lock:
            ended, own = self._ended, list(self._waiting)
        asked = [[request.holder, request.path, request.offset, len(request.target)] for request in own]
        (any_wanted, all_ended), of_this_rank = self._ranks.decide_each(
            lambda: [ended, asked], _dealt_out, "ask for files"
        )
        if not any_wanted:
            if all_ended:
                return False
            time.sleep(PAUSE_SECONDS)
            return True
        import torch  # imported late, because a validation of the structure in one process does not need it

        size = self._ranks.size
        to_send, to_receive = ([WantedRange(*fields) for fields in side] for side in of_this_rank or ([], []))
        to_send.sort()  # by the rank that receives
        to_receive.sort(key=lambda one: (one.holder, one.number))
        sent = torch.zeros(sum(one.nbytes for one in to_send), dtype=torch.uint8, device="cpu")
        _, told = self._ranks.decide_each(
            lambda: self._read(to_send, sent.numpy()), _for_those_who_asked, "read files for other ranks"
        )
        outcomes = {number: (nbytes, error) for number, nbytes, error in told or ()}
        received = torch.empty(sum(one.nbytes for one in to_receive), dtype=torch.uint8, device="cpu")
        sent_bytes, received_bytes = [0] * size, [0] * size
        for one in to_send:
            sent_bytes[one.rank] += one.nbytes
        for one in to_receive:
            received_bytes[one.holder] += one.nbytes
        self._ranks.exchange(sent, sent_bytes, received, received_bytes)
        start = 0
        for one in to_receive:
            request = own[one.number]
            request.nbytes, request.error = outcomes[one.number]
            request.target[: request.nbytes] = received.numpy()[start : start + request.nbytes]
            start += one.nbytes
            with self._lock:
                self._waiting.remove(request)
            request.done.set()
        return True

    def _read(self, to_send: Sequence[WantedRange], room: Bytes) -> list[list[Any]]:
        """Reads what other ranks want. Returns for each request the rank, the number of the request, the number of
        bytes read, and the text of an error."""
        outcomes: list[list[Any]] = []
        start = 0
        for one in to_send:
            nbytes, error = 0, ""
            try:
                nbytes = self._reader.read_into(one.path, [room[start : start + one.nbytes]], one.offset)
            except ZckptError as caught:  # the rank that has asked raises it
                error = str(caught)
            outcomes.append([one.rank, one.number, nbytes, error])
            start += one.nbytes
        return outcomes


class PeerReader:
    """Reads files that are not on this machine from the ranks that have them."""

    direct = None

    def __init__(self, peers: Peers, elsewhere: Mapping[str, tuple[int, int]], lost: Mapping[str, str]) -> None:
        """``elsewhere``: for each file, a rank that has it, and its size in bytes. ``lost``: for each file that no rank
        has, the machine that had it."""
        self.count = IOCount()
        self._peers, self._elsewhere, self._lost = peers, elsewhere, lost

    def _holder(self, path: str) -> tuple[int, int]:
        if path in self._lost:
            raise broken("F001", f"the file is missing; it was on a disk of {self._lost[path]}", file=path)
        return self._elsewhere[path]

    def size(self, path: str) -> int:
        return self._holder(path)[1]

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        room = np.empty(max(min(nbytes, self.size(path) - offset), 0), np.uint8)
        filled = self._from_peer(path, [room], offset)
        self.count.add(metadata_bytes=filled)
        return room[:filled].tobytes()

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        filled = self._from_peer(path, views, offset)
        self.count.add(data_bytes=filled)
        return filled

    def _from_peer(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        self.count.add(reads=1)
        return self._peers.read(self._holder(path)[0], path, views, offset)

    def close(self) -> None: ...
