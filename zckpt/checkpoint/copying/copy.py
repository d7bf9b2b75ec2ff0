"""Does the part of one process in a copy. Each process copies some of the files, and process 0 also takes the lock and
commits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from zckpt.checkpoint.copying.files import TABLE, RankFiles, SelectedTensors, own_files, whole_files
from zckpt.checkpoint.listing.runs import refuse_place
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.checkpoint.writing.reuse import SameFile
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.rules import broken
from zckpt.plan import catalog
from zckpt.progress import PartOfProgress, reported
from zckpt.transfer.snapshot import Snapshot
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.reshard import FilePieces
    from zckpt.storage.contract import Store
    from zckpt.storage.location import Location
    from zckpt.storage.lock import WriteLock
    from zckpt.storage.space import Space
    from zckpt.transfer.write import CopySource


TRIES = 2
"""How often an upload is tried."""


@dataclass(slots=True, eq=False)
class Tries:
    """What the tries of one upload have in common."""

    count: int = 0
    """The number of tries so far, with the one that is under way."""
    written: set[str] = field(default_factory=set)
    """The paths of the data files that this process has written whole."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    """The object by which the upload can be given up."""


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """The part of one process in a copy.

    Every process calls ``rank_records``, process 0 calls ``begin``, every process calls ``write``, and process 0 calls
    ``commit``. Each call is made only after all processes have returned from the one before. At the end, and after a
    failure on any process, every process calls ``remove``.
    """

    contents: Contents
    """The manifest and the index of the source."""
    manifest: bytes
    """The bytes of the manifest of the source."""
    selection: SelectedTensors | None
    """The tensors that are copied. None means that the whole checkpoint is copied, byte for byte."""
    target: Store
    """The directory of the copy."""
    save_id: str
    """The save id of the copy."""
    number: int
    """The number of this process, from 0 to ``size - 1``."""
    size: int
    """The number of processes that make this copy together."""
    verify: bool
    """Whether all data that are read are compared with their digests."""
    shared_with: Location | None
    """The directory of the source, if the copy may share whole data files with it. None means that all bytes are
    written."""
    options: WriteOptions
    """The options with which the files of the copy are written."""
    latest_in: Store | None = None
    """The directory of the run whose file ``latest`` will name the copy, or None if no such file changes."""
    tries: Tries | None = None
    """What the tries of an upload share. Then each process copies the files of the rank that has its number. None means
    that the processes divide all files, and that no file is left after a failure."""
    _first: RankWrite | None = field(default=None, init=False)
    """On process 0, after ``begin``, the write that takes the lock and commits. None on all other processes."""
    _files_of_rank: Mapping[int, Collection[int]] = field(init=False)
    """The numbers of the files that this process writes, by the rank that they belong to, as ``own_files`` returns
    them."""
    _file_bytes: int = field(init=False)
    """The size in bytes of the tensors in these files."""

    def __post_init__(self) -> None:
        manifest = self.contents.manifest
        all_files = dict(enumerate(manifest.data_bytes.tolist()))
        file_bytes = all_files if self.selection is None else self.selection.file_bytes
        if self.tries is None:
            self._files_of_rank = own_files(manifest, file_bytes, self.number, self.size)
        else:
            own = (number for number in all_files if manifest.files.rank[number] == self.number)
            self._files_of_rank = {self.number: {*own, TABLE}}
        numbers = [number for numbers in self._files_of_rank.values() for number in numbers if number != TABLE]
        self._file_bytes = sum(file_bytes[number] for number in numbers)

    def rank_records(self) -> list[bytes]:
        """Returns the packed record of each rank whose digest table this process writes. A record lists the files of
        the rank and their pieces. If the whole checkpoint is copied, the list is empty, because the manifest and the
        index are copied too."""
        if self.selection is None:
            return []
        ranks = [rank for rank, numbers in self._files_of_rank.items() if TABLE in numbers]
        return [
            catalog.pack(catalog.rank_record(rank, self.selection.data_files(rank, pieces, self.save_id)))
            for rank, pieces in self.contents.pieces_of_ranks(self.selection.rows, ranks)
        ]

    def begin(self, lock: WriteLock, rank_records: Sequence[bytes]) -> Space:
        """Checks that the copy may be made at this place, takes the lock, and makes the directory of the new data.
        ``rank_records``: the results of ``rank_records`` of all processes. Returns the space that the copy needs.
        Raises CheckpointExistsError, and the errors of ``RankWrite.begin``."""
        refuse_place(self.target, self.latest_in or self.target.parent, latest=self.latest_in is not None)
        first = self._rank_write(0, (), None)
        if self.selection is not None:
            first.describe(catalog.unpack(rank_records))
        else:
            shared = self.shared_with is not None and self.target.may_share(self.shared_with)
            files = () if shared else self.contents.manifest.files.nbytes
            first.data_bytes = sum(files) + self.contents.manifest.index_bytes
        self._first = first
        return first.begin(lock)

    def write(self) -> list[tuple[int, bytes]]:
        """Writes the files of this process and makes them durable. Returns the number of each rank whose digest table
        it has written, and the digest of this table."""
        if self.tries is not None and self.tries.count > 1:
            self._remove_unfinished(self.tries)
        with reported(self.options.progress, "copy", self._file_bytes) as advance:
            options = replace(self.options, progress=PartOfProgress(advance))
            rows = self.contents.all_rows if self.selection is None else self.selection.rows
            pieces_of_ranks = self.contents.pieces_of_ranks(rows, list(self._files_of_rank))
            digests = [
                (rank, self._write(rank, self._files(rank, pieces), options)) for rank, pieces in pieces_of_ranks
            ]
        return [(rank, table_digest) for rank, table_digest in digests if TABLE in self._files_of_rank[rank]]

    def _write(self, rank: int, files: RankFiles, options: WriteOptions) -> bytes:
        rank_write = self._rank_write(rank, files.data_files, files.source)
        rank_write.options, rank_write.with_table = options, TABLE in self._files_of_rank[rank]
        if self.shared_with is not None and self.selection is None:
            rank_write.same = {
                data_file.id.path: SameFile(self.shared_with.child(data_file.id.path), files.digests(data_file))
                for data_file in files.data_files
            }
        if self.tries is None:
            return rank_write.write_data_files(Snapshot())
        self._write_each(rank, files, self.tries)
        rank_write.data_files = ()
        return rank_write.write_data_files(self.tries.snapshot)

    def _write_each(self, rank: int, files: RankFiles, tries: Tries) -> None:
        """Writes those files of a rank that no earlier try has written, one after the other. So the next try need not
        write again those that are whole."""
        for data_file in files.data_files:
            path = data_file.id.path
            if path not in tries.written:
                rank_write = self._rank_write(rank, [data_file], files.source)
                rank_write.with_table = False
                rank_write.write_data_files(tries.snapshot)
                tries.written.add(path)

    def _remove_unfinished(self, tries: Tries) -> None:
        """Removes the files of this process that an earlier try has not finished. Forgets those that it has finished
        and that somebody has removed."""
        manifest = self.contents.manifest
        own = [manifest.files[number] for number in self._files_of_rank[self.number] if number != TABLE]
        for file in own:
            path = manifest.path(file)
            entry = self.target.entry(path) if path in tries.written else None
            if entry is None or entry.nbytes != file.nbytes:
                tries.written.discard(path)
                self.target.remove(path)
        self.target.remove(names.digests_path(self.save_id, self.number))
        if self.number == 0:
            self.target.remove(names.index_path(self.save_id))

    def commit(self, digests: Sequence[tuple[int, bytes]]) -> None:
        """Commits the copy. It must be called after all files are durable. ``digests``: the results of ``write`` of all
        processes, in any order."""
        assert self._first is not None, "``begin`` was called"
        if self.selection is None:
            self._first.put_in_place(self.manifest, _index(self.contents))
        else:
            self._first.commit([table_digest for _, table_digest in sorted(digests)])

    def remove(self) -> None:
        """Releases the lock. Unless the copy is committed, removes its files. It may be called several times."""
        if self._first is not None:
            self._first.remove()

    def _files(self, rank: int, pieces: FilePieces) -> RankFiles:
        numbers = self._files_of_rank[rank]
        if self.selection is None:
            return whole_files(self.contents, rank, numbers, pieces, verify=self.verify)
        return self.selection.files(rank, pieces, self.save_id, numbers, verify=self.verify)

    def _rank_write(self, rank: int, data_files: Sequence[DataFilePlan], source: CopySource | None) -> RankWrite:
        manifest = self.contents.manifest
        writer = {
            **manifest.writer, "copied": datetime.now(UTC).isoformat(timespec="seconds"),
            "copied_by": __version__, "copied_from": manifest.save_id,
        }  # fmt: skip
        state, lineage = (
            (manifest.state, None) if self.selection is None else (self.selection.state, self.selection.lineage)
        )
        metadata = catalog.SaveMetadata(manifest.step, manifest.block_bytes, manifest.aliases, state, writer, lineage)
        return RankWrite(
            store=self.target, latest_in=self.latest_in, save_id=self.save_id, rank=rank, data_files=data_files,
            metadata=metadata, options=self.options, source=source,
            goes_on=self.tries is not None and self.tries.count > 1,
            leaves_files=self.tries is not None and self.tries.count < TRIES,
        )  # fmt: skip


def _index(contents: Contents) -> bytes:
    """Reads the bytes of the index and checks them. Raises FormatError (F001, F002, I001, I002) and StorageError."""
    contents.check_index_length()
    manifest, path = contents.manifest, names.index_path(contents.manifest.save_id)
    raw = contents.reader.read(path, 0, manifest.index_bytes)
    for chunk in manifest.chunks:
        start, stop = chunk.offset, chunk.offset + chunk.nbytes
        if digest(raw[start:stop]) != chunk.digest:
            raise broken("I002", "the chunk is damaged", file=path, start=start, stop=stop)
    return raw
