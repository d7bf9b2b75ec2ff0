"""The data of files, block by block: rules D003, and S008 for the bytes of fillers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.names import split_piece_name
from zckpt.format.rules import broken
from zckpt.plan.coalesce import plan_reads
from zckpt.plan.reshard import file_extents
from zckpt.transfer.read import check_block, read_op
from zckpt.validation.report import failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zckpt.errors import FormatError
    from zckpt.format.shard import Entry, Header
    from zckpt.plan.coalesce import ReadOp
    from zckpt.reading.checkpoint import Checkpoint
    from zckpt.storage.buffers import Bytes
    from zckpt.transfer.read import ReadFile
    from zckpt.transfer.staging import StagingPool
    from zckpt.validation.values import Values


@dataclass(frozen=True, slots=True)
class DataChecks:
    """Reads data, checks it, and lets ``values``, if there are any, look at it. ``note`` is told what is wrong, and
    ``advance`` the bytes of each read, by several threads."""

    checkpoint: Checkpoint
    staging: StagingPool
    values: Values | None
    note: Callable[[Iterable[FormatError]], None]
    advance: Callable[[int], None]

    def reads(self, headers: Mapping[int, Header]) -> Iterator[Callable[[], None]]:
        """One task for each read of the data of these files. To be called inside of ``staging.work``."""
        block_bytes = self.checkpoint.manifest.block_bytes
        files = {number: self.checkpoint.contents.read_file(number, verify=True) for number in headers}
        entries = [(header, entry) for header in headers.values() for entry in header.entries]
        ops = plan_reads(
            file_extents(headers, block_bytes),
            data_starts=self.checkpoint.manifest.files.data_start,
            block_bytes=block_bytes,
            verify=True,
            batch_bytes=self.staging.batch_bytes,
        )
        return (partial(self._read, op, files[op.file], entries) for op in ops)

    def _read(self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, Entry]]) -> None:
        def look(data: Bytes) -> None:
            self.note(failures(*self._checks(op, file, entries, data)))

        reader, direct = self.checkpoint.reader, self.checkpoint.budget.direct
        self.note(failures(partial(read_op, reader, op, file, self.staging, direct, look)))
        self.advance(op.nbytes)

    def _checks(
        self, op: ReadOp, file: ReadFile, entries: Sequence[tuple[Header, Entry]], data: Bytes
    ) -> Iterator[Callable[[], None]]:
        """The checks of the bytes of one read."""
        segments = op.segments
        start = 0
        columns = (segments.nbytes, segments.block, segments.sink, segments.target)
        for nbytes, block, which, target in zip(*(column.tolist() for column in columns), strict=True):
            header, entry = entries[which]
            view = data[start : start + nbytes]
            part, name = header.shard.part, entry.name
            span = split_piece_name(name)
            first = target // ITEM_BYTES[entry.dtype]
            if span is not None:
                name, first = span[0], first + span[1]
            key = name if entry.is_filler else f"{part}/{name}"
            yield partial(check_block, view, block, file, op.offset + start, key)
            if entry.is_filler:
                yield partial(_check_filler, view, file, op.offset + start, name)
            elif self.values is not None:
                self.values.look(part, name, entry.dtype, first, view)
            start += nbytes


def _check_filler(view: Bytes, file: ReadFile, start: int, name: str) -> None:
    if view.any():
        raise broken("S008", f"filler {name!r} is not zero", file=file.path, start=start, stop=start + view.nbytes)
