"""Does the part of one process in a copy. Each process copies some of the files, and process 0 also takes the lock and
commits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from zckpt.checkpoint.copying.files import TABLE, Copied, RankFiles
from zckpt.checkpoint.listing.runs import refuse_place
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.checkpoint.writing.reuse import SameFile
from zckpt.format import names
from zckpt.plan import catalog
from zckpt.progress import PartOfProgress, reported
from zckpt.transfer.snapshot import Snapshot
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.plan.data_files import DataFilePlan
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

    Every process calls ``records``, process 0 calls ``begin``, every process calls ``write``, and process 0 calls
    ``commit``. Each call is made only after all processes have returned from the one before. At the end, and after a
    failure on any process, every process calls ``remove``.
    """

    copied: Copied
    files_of_rank: Mapping[int, Collection[int]]
    """The numbers of the files of the source that this process copies, by the ranks that they belong to, which are
    ascending. They contain ``TABLE`` if it writes the rank's digest table."""
    target: Store
    """The directory of the copy."""
    save_id: str
    verify: bool = True
    """Whether all data that are read are compared with their digests."""
    shared_with: Location | None = None
    """The directory of the source, if the copy of a whole checkpoint may share data files with it. None means that all
    bytes are written."""
    options: WriteOptions
    """The options with which the files of the copy are written."""
    latest_in: Store | None = None
    """The directory of the run whose file ``latest`` will name the copy, or None if no such file changes."""
    tries: Tries | None = None
    """What the tries of an upload share. None means that there is one try, after whose failure no file is left."""
    _first: RankWrite | None = field(default=None, init=False)
    """On process 0, after ``begin``, the write that takes the lock and commits. None on all other processes."""

    def records(self) -> list[bytes]:
        """Returns what ``begin`` needs of this process."""
        return self.copied.records((rank for rank, files in self.files_of_rank.items() if TABLE in files), self.save_id)

    def begin(self, lock: WriteLock, records: Sequence[bytes]) -> Space:
        """Checks that the copy may be made at this place, and takes the lock. ``records``: the results of ``records``
        of all processes. Returns the space that the copy needs. Raises CheckpointExistsError, and the errors of
        ``RankWrite.begin``."""
        refuse_place(self.target, self.latest_in or self.target.parent, latest=self.latest_in is not None)
        first = self._rank_write(0, (), None)
        self.copied.tell(first, records)
        if self.shared_with is not None and self.target.may_share(self.shared_with):
            first.data_bytes -= sum(self.copied.contents.manifest.files.nbytes)
        self._first = first
        return first.begin(lock)

    def write(self) -> list[tuple[int, bytes]]:
        """Writes the files of this process and makes them durable. Returns the number of each rank whose digest table
        it has written, and the digest of this table."""
        if self.tries is not None and self.tries.count > 1:
            self._remove_unfinished(self.tries)
        copied, digests = self.copied, []
        numbers = (number for of_rank in self.files_of_rank.values() for number in of_rank if number != TABLE)
        with reported(self.options.progress, "copy", sum(copied.file_bytes[number] for number in numbers)) as advance:
            options = replace(self.options, progress=PartOfProgress(advance))
            for rank, pieces in copied.contents.pieces_of_ranks(copied.rows, [*self.files_of_rank]):
                own = self.files_of_rank[rank]
                files = copied.files(rank, pieces, self.save_id, own, verify=self.verify)
                table_digest = self._write(rank, files, options)
                if TABLE in own:
                    digests.append((rank, table_digest))
        return digests

    def _write(self, rank: int, files: RankFiles, options: WriteOptions) -> bytes:
        rank_write = self._rank_write(rank, files.data_files, files.source)
        rank_write.options, rank_write.with_table = options, TABLE in self.files_of_rank[rank]
        if self.shared_with is not None:
            rank_write.same = {
                data_file.id.path: SameFile(self.shared_with.child(data_file.id.path), files.digests(data_file))
                for data_file in files.data_files
            }
        if self.tries is None:
            return rank_write.write_data_files(Snapshot())
        for data_file in files.data_files:  # one by one, so that the next try need not write again what is whole
            if data_file.id.path not in self.tries.written:
                of_file = self._rank_write(rank, [data_file], files.source)
                of_file.with_table = False
                of_file.write_data_files(self.tries.snapshot)
                self.tries.written.add(data_file.id.path)
        rank_write.data_files = ()
        return rank_write.write_data_files(self.tries.snapshot)

    def _remove_unfinished(self, tries: Tries) -> None:
        """Removes the files of this process that an earlier try has not finished. Forgets those that it has finished
        and that somebody has removed."""
        manifest = self.copied.contents.manifest
        for rank, numbers in self.files_of_rank.items():
            for file in (manifest.files[number] for number in numbers if number != TABLE):
                path = manifest.path(file)
                entry = self.target.entry(path) if path in tries.written else None
                if entry is None or entry.nbytes != file.nbytes:
                    tries.written.discard(path)
                    self.target.remove(path)
            self.target.remove(names.digests_path(self.save_id, rank))
        if self._first is not None:
            self.target.remove(names.index_path(self.save_id))

    def commit(self, digests: Sequence[tuple[int, bytes]]) -> None:
        """Commits the copy. It must be called after all files are durable. ``digests``: the results of ``write`` of all
        processes, in any order."""
        assert self._first is not None, "``begin`` was called"
        self.copied.commit(self._first, [table_digest for _, table_digest in sorted(digests)])

    def remove(self) -> None:
        """Releases the lock. Unless the copy is committed, removes its files. It may be called several times."""
        if self._first is not None:
            self._first.remove()

    def _rank_write(self, rank: int, data_files: Sequence[DataFilePlan], source: CopySource | None) -> RankWrite:
        copied, manifest = self.copied, self.copied.contents.manifest
        writer = {
            **manifest.writer, "copied": datetime.now(UTC).isoformat(timespec="seconds"),
            "copied_by": __version__, "copied_from": manifest.save_id,
        }  # fmt: skip
        metadata = catalog.SaveMetadata(
            manifest.step, manifest.block_bytes, manifest.aliases, copied.state, writer, copied.lineage
        )
        return RankWrite(
            store=self.target, latest_in=self.latest_in, save_id=self.save_id, rank=rank, data_files=data_files,
            metadata=metadata, options=self.options, source=source,
            goes_on=self.tries is not None and self.tries.count > 1,
            leaves_files=self.tries is not None and self.tries.count < TRIES,
        )  # fmt: skip
