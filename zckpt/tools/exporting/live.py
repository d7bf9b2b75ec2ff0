"""Writes the files of an export from the tensors of a live engine, of which each rank holds parts.

Each file is written by one rank, because network file systems lose bytes if several ranks write parts of one page. In
each round, every writer receives the next slice of its file from all ranks. So no rank has more than a few slices in
memory.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from zckpt.geometry import joined
from zckpt.plan.reshard import RequestedSpan
from zckpt.progress import reported
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.files import read_from
from zckpt.system.threads import Worker, stop
from zckpt.tools.exporting.exchange import Exchange, SlicedFiles, plan_exchange
from zckpt.tools.exporting.write import NewFile, put_whole
from zckpt.tools.share import shared_out
from zckpt.transfer.devices import byte_tensor, rows_of
from zckpt.transfer.memory import fresh_tensor
from zckpt.transfer.staging import host_pool
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.geometry import Ints
    from zckpt.plan.inventory import Fragment
    from zckpt.progress import Progress
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Store
    from zckpt.tools.exporting.engine_source import EngineSource
    from zckpt.tools.exporting.plan import Conversion, Extent, OutputFile, SourceTensor

SLICE_BYTES_MIN, SLICE_BYTES_MAX = 2 << 20, 16 << 20
Sizes = TypeVar("Sizes", int, "Ints")
_MESSAGE_ALIGNMENT_BYTES = 8
"""Each message begins at a multiple of this many bytes, so that elements of every dtype are aligned in it."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The distribution of the files over the ranks. It is equal on every rank.

    A room is memory of the rank that does a conversion. The elements that the conversion takes are sent to it, one
    extent after the other, as if the room were one more file that the rank writes.
    """

    slices: SlicedFiles
    """The slices of the files and, after them, of the rooms."""
    rooms: Mapping[int, Conversion]
    """The conversion of each room, by the number of the room. Rooms are numbered after the files."""
    wanted: Sequence[RequestedSpan]
    """The elements of each source that are written, as ``plan_exchange`` takes them."""
    item_bytes: Sequence[int]
    """The size of an element of each source in bytes."""


def share_files(
    files: Sequence[OutputFile],
    sources: Mapping[str, SourceTensor],
    ranks: int,
    budget_bytes: int,
) -> Shares:
    """Distributes the files over ``ranks`` ranks so that no rank needs more than half of ``budget_bytes`` in memory,
    not counting the rooms. A rank has in memory the bytes that it sends to all writers in a round, a slice that it
    receives, and a slice that it writes. If the outputs of a conversion are in the files of several writers, each of
    them does the conversion."""
    half = budget_bytes // 2
    writers = max(min(len(files), ranks, half // SLICE_BYTES_MIN - 2), 1)
    file_bytes = [file.nbytes for file in files]
    # The numbers of the writers are far apart, so that the writers are on different machines if there are several.
    writer = [number * ranks // writers for number in shared_out(file_bytes, writers)]
    item_bytes = {name: TORCH_DTYPES[source.dtype].itemsize for name, source in sources.items()}
    places: list[tuple[int, int, Extent]] = []
    """The number of a file, the byte of the file at which an extent begins, and the extent."""
    for number, file in enumerate(files):
        for offset, tensor in file.tensors.items():
            for extent in tensor.extents or ():
                places.append((number, offset, extent))
                offset += extent.span.numel * item_bytes[extent.source]
    converting_ranks: dict[Conversion, set[int]] = {}
    for number, file in enumerate(files):
        for conversion in file.conversions:
            converting_ranks.setdefault(conversion, set()).add(writer[number])
    rooms = {}
    for conversion, of_conversion in converting_ranks.items():
        for rank in sorted(of_conversion):
            room_bytes = 0
            for extent, offset in room_places(conversion, sources):
                places.append((len(writer), offset, extent))
                room_bytes = offset + extent.span.numel * item_bytes[extent.source]
            rooms[len(writer)] = conversion
            writer.append(rank)
            file_bytes.append(room_bytes)
    slice_bytes = min(SLICE_BYTES_MAX, half // (writers + 2)) // PAGE_BYTES * PAGE_BYTES
    slices = SlicedFiles(slice_bytes, tuple(file_bytes), tuple(writer))
    starts = slices.starts
    number_of = {name: number for number, name in enumerate(sources)}
    wanted = [
        RequestedSpan(number_of[name], span, (starts[number] + offset) // item_bytes[name])
        for number, offset, (name, span) in places
    ]
    return Shares(slices, rooms, wanted, list(item_bytes.values()))


def room_places(conversion: Conversion, sources: Mapping[str, SourceTensor]) -> list[tuple[Extent, int]]:
    """Returns the extents that a conversion takes, and the byte of the room at which each begins."""
    places, offset = [], 0
    for extent in conversion.sources:
        places.append((extent, offset))
        nbytes = extent.span.numel * TORCH_DTYPES[sources[extent.source].dtype].itemsize
        offset += -(-nbytes // _MESSAGE_ALIGNMENT_BYTES) * _MESSAGE_ALIGNMENT_BYTES
    return places


def write_from_ranks(
    store: Store,
    files: Sequence[OutputFile],
    sources: Mapping[str, SourceTensor],
    engine: EngineSource,
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """Writes ``files`` to ``store``, which is a directory that all ranks share. This is collective, and ``files`` and
    ``sources`` have to be equal on all ranks. ``sources``: all tensors of ``engine``, in the same order, with the
    dtypes to which they are converted. Afterwards the content of the files is durable, but their names are not yet.
    Raises StorageError, and RankError if another rank has failed."""

    def smallest(budgets: list[int]) -> int:
        return min(budgets)

    smallest_budget = ranks.decide(lambda: engine.budget.serving(store).nbytes, smallest, "compare the budgets")

    def prepare() -> _RankExport:
        shares = share_files(files, sources, ranks.size, smallest_budget)
        exchange = plan_exchange(engine.held, engine.grids, shares.wanted, shares.item_bytes, shares.slices)
        return _RankExport(store, files, sources, engine, shares, exchange, ranks)

    export = ranks.together(prepare, "plan the export")
    # ``progress`` may fail on one rank alone, so it is called only in actions of ``together``.
    progress_context = ExitStack()

    def begin() -> None:
        export.advance = progress_context.enter_context(reported(progress, "export", export.nbytes))
        export.begin()

    def finish() -> None:
        export.finish()
        progress_context.close()

    try:
        with progress_context:
            ranks.together(begin, "create the files")
            for turn in range(export.rounds):
                ranks.together(lambda turn=turn: export.pack(turn), "export")  # type: ignore[misc]
                export.exchange()
            ranks.together(finish, "export")
    finally:
        export.close()


class _RankExport:
    """The part of one rank in an export. In each round, the rank packs the bytes that it sends, and receives a slice of
    its own file. It writes this slice during the next round."""

    def __init__(
        self,
        store: Store,
        files: Sequence[OutputFile],
        sources: Mapping[str, SourceTensor],
        engine: EngineSource,
        shares: Shares,
        exchange: Exchange,
        ranks: Ranks,
    ) -> None:
        self._store, self._files, self._sources, self._fragments = store, files, sources, engine.fragments
        self._shares, self._exchange, self._ranks = shares, exchange, ranks
        self._budget = engine.budget
        self.advance: Callable[[int], None] = lambda nbytes: None
        """A function that is called with the number of bytes that this rank has written since its last call."""
        self._dtypes = {name: TORCH_DTYPES[tensor.dtype] for name, tensor in sources.items()}
        self._slices = shares.slices.own(ranks.rank)
        """The slices that this rank receives, one in each round."""
        self.rounds = shares.slices.rounds
        writer = shares.slices.writer
        self.nbytes = sum(file.nbytes for number, file in enumerate(files) if writer[number] == ranks.rank)
        """The number of bytes that this rank writes."""
        self._new_files: dict[int, NewFile] = {}
        self._places: dict[Conversion, list[tuple[NewFile, int, str]]] = {}
        """The tensors of this rank that each conversion makes: the file, the offset in it, and the name."""
        self._arriving = [_arriving(file) for file in files]
        """For each file, the ranges of bytes ``[start, stop)`` that no conversion makes, in ascending order."""
        self._sent, self._received = _buffer(0), _buffer(0)
        """The bytes of the messages of a round, from one rank after the other. They grow when a round needs more."""
        self._room: torch.Tensor | None = None
        self._received_turn = -1
        self._writing: _Writing | None = None

    def begin(self) -> None:
        """Creates the files that this rank writes, and allocates its memory. Raises StorageError."""
        slices = Counter(number for number, _, _ in self._slices)
        for number, file in enumerate(self._files):
            if self._shares.slices.writer[number] == self._ranks.rank:
                new_file = NewFile(self._store.create(file.name, file.nbytes, direct=self._budget.direct))
                self._new_files[number] = new_file
                new_file.expect(slices[number])
                for conversion, made in file.conversions.items():
                    new_file.expect(len(made))
                    self._places.setdefault(conversion, []).extend((new_file, *place) for place in made)
        self._stage = fresh_tensor((self._shares.slices.slice_bytes + PAGE_BYTES,), torch.uint8, "cpu")

    def pack(self, turn: int) -> None:
        """Begins to write the slice that this rank received in the last round, and packs the bytes that it sends in
        this round."""
        self._put()
        messages = self._exchange.messages(turn, self._ranks.rank)
        sent = messages.take(np.flatnonzero(messages.source == self._ranks.rank))
        received = messages.take(np.flatnonzero(messages.target == self._ranks.rank))
        self._sent_bytes = self._per_rank(sent.target, sent.nbytes)
        self._received_bytes = self._per_rank(received.source, received.nbytes)
        if len(self._sent) < sum(self._sent_bytes):
            del self._sent
            self._sent = _buffer(sum(self._sent_bytes))
        if len(self._received) < sum(self._received_bytes):
            del self._received
            self._received = _buffer(sum(self._received_bytes))
        offset = 0
        columns = (sent.fragment, sent.nbytes, sent.start, sent.runs, sent.run_numel, sent.source_stride)
        for number, nbytes, *runs in zip(*(column.tolist() for column in columns), strict=True):
            fragment = self._fragments[number]
            message = self._sent[offset : offset + nbytes].view(self._dtypes[fragment.name])
            elements = _elements(fragment, *runs)
            message.view(elements.shape).copy_(elements)
            offset += _padded(nbytes)
        self._incoming, self._received_turn = received, turn

    def exchange(self) -> None:
        """Sends the bytes that were packed, and receives the bytes that the other ranks have packed for this one."""
        sent, received = sum(self._sent_bytes), sum(self._received_bytes)
        self._ranks.exchange(self._sent[:sent], self._sent_bytes, self._received[:received], self._received_bytes)

    def _per_rank(self, rank: Ints, nbytes: Ints) -> list[int]:
        """Returns the number of bytes of the messages from or to each rank. ``rank`` and ``nbytes``: the other rank and
        the size of each message."""
        sums: list[int] = np.bincount(rank, _padded(nbytes), self._ranks.size).astype(np.int64).tolist()
        return sums

    def _put(self) -> None:
        """Copies the slice that this rank has received to its place in a room, or to a buffer from which a thread
        writes it."""
        if not 0 <= self._received_turn < len(self._slices):
            return
        self._wait()
        file, first, nbytes = self._slices[self._received_turn]
        self._received_turn = -1
        if file in self._shares.rooms:
            if first == 0:
                self._room = torch.empty(self._shares.slices.file_bytes[file], dtype=torch.uint8, device="cpu")
            assert self._room is not None
            self._unpack(self._room[first : first + nbytes])
            if first + nbytes == len(self._room):
                self._convert(self._shares.rooms[file], self._room)
                self._room = None
            return
        stage = self._stage[-self._stage.data_ptr() % PAGE_BYTES :][:nbytes]
        self._unpack(stage)
        for begin, known in self._files[file].known.items():
            start, stop = max(begin, first), min(begin + len(known), first + nbytes)
            if start < stop:
                values = np.frombuffer(known, np.uint8)[start - begin : stop - begin]
                stage.numpy()[start - first : stop - first] = values
        clipped = ((max(start - first, 0), min(stop - first, nbytes)) for start, stop in self._arriving[file])
        parts = [(start, stop) for start, stop in clipped if start < stop]
        self._writing = _Writing(self._new_files[file], stage.numpy(), first, parts, self.advance)

    def _unpack(self, slice_: torch.Tensor) -> None:
        """Copies each message that this rank has received to its places in the slice."""
        incoming, offset = self._incoming, 0
        columns = (incoming.position, incoming.target_stride, incoming.runs, incoming.nbytes)
        for position, stride, runs, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            places = rows_of(slice_[position:], runs, nbytes // runs, stride)
            places.copy_(self._received[offset : offset + nbytes].view(places.shape))
            offset += _padded(nbytes)

    def _convert(self, conversion: Conversion, room: torch.Tensor) -> None:
        elements = []
        for extent, first in room_places(conversion, self._sources):
            dtype = self._dtypes[extent.source]
            elements.append(room[first : first + extent.span.numel * dtype.itemsize].view(dtype))
        converted = conversion.convert(elements)
        staging = host_pool(SLICE_BYTES_MIN)
        with staging.work():
            for new_file, offset, name in self._places[conversion]:
                put_whole(new_file.writer, offset, converted[name], self._budget, staging)
                new_file.done()
                self.advance(converted[name].nbytes)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def finish(self) -> None:
        """Writes the slice that this rank received in the last round. Then the content of all its files is durable."""
        self._put()
        self._wait()

    def close(self) -> None:
        """Ends the thread that writes, and closes the files. It may be called at any time."""
        if self._writing is not None:
            stop([self._writing.worker])
        for new_file in self._new_files.values():
            new_file.close()


class _Writing:
    """Writes parts of a slice in a thread of its own."""

    def __init__(
        self, file: NewFile, data: Bytes, offset: int, parts: Sequence[tuple[int, int]], advance: Callable[[int], None]
    ) -> None:
        """``data``: the bytes of the slice. ``offset``: the byte of the file at which the slice begins. ``parts``: the
        ranges of bytes ``[start, stop)`` of the slice that are written. ``advance``: a function that is called with the
        number of bytes of each part."""
        self._error: BaseException | None = None

        def write() -> None:
            try:
                for start, stop in parts:
                    file.writer.write(data[start:stop], offset + start)
                    advance(stop - start)
                file.done()
            except BaseException as error:  # ``wait`` raises it again.
                self._error = error

        self.worker = Worker(write, "zckpt-export")
        self.worker.start()

    def wait(self) -> None:
        """Waits until all parts are written. Raises the error of the thread if it has failed."""
        self.worker.wait()
        if self._error is not None:
            raise self._error


def _elements(fragment: Fragment, start: int, runs: int, run_numel: int, stride: int) -> torch.Tensor:
    """Returns equally spaced runs of elements of a fragment, as ``rows_of`` does. The first run begins with element
    ``start``. If the fragment is in a file, the elements are read."""
    data = fragment.data
    assert data is not None, "the fragments of an inventory have data"
    if isinstance(data, torch.Tensor):
        return rows_of(data.detach().view(-1)[start:], runs, run_numel, stride)
    dtype = TORCH_DTYPES[fragment.dtype]
    elements = torch.empty(runs * run_numel, dtype=dtype, device="cpu")
    # If there are no gaps between the runs, they are read at once.
    for number, part in enumerate([elements] if stride == run_numel else elements.view(runs, run_numel)):
        file_range = data.narrow((start + number * stride) * dtype.itemsize, part.nbytes)
        read_from(file_range.path, file_range.offset, byte_tensor(part).numpy())
    return rows_of(elements, runs, run_numel, run_numel)


def _buffer(nbytes: int) -> torch.Tensor:
    """Returns a buffer for messages in host memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _arriving(file: OutputFile) -> list[tuple[int, int]]:
    """Returns the ranges of bytes of a file that no conversion makes, in ascending order, with adjacent ones joined."""
    parts = [(offset, offset + len(known)) for offset, known in file.known.items()]
    parts += [(offset, offset + each.nbytes) for offset, each in file.tensors.items() if each.extents is not None]
    start, stop = joined(*np.array(sorted(parts), np.int64).reshape(-1, 2).T)
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def _padded(nbytes: Sizes) -> Sizes:
    """Returns the size in bytes of a message with its padding, or of each of several messages."""
    return -(-nbytes // _MESSAGE_ALIGNMENT_BYTES) * _MESSAGE_ALIGNMENT_BYTES
