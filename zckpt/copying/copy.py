"""What one process does in a copy: each copies some of the files; process 0 also takes the lock and commits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from zckpt.copying.files import TABLE, RankFiles, Selection, shared_files, whole_files
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.format.rules import broken
from zckpt.listing.runs import refuse_place
from zckpt.plan import catalog
from zckpt.progress import PartOfProgress, reported
from zckpt.transfer.snapshot import Snapshot
from zckpt.version import __version__
from zckpt.writing.rank_write import RankWrite, SameFile

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.listing.contents import Contents
    from zckpt.plan.layout import ShardPlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import Location
    from zckpt.storage.lock import WriteLock
    from zckpt.storage.space import Space
    from zckpt.transfer.write import Source
    from zckpt.writing.options import WriteOptions


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """One process's share of a copy.

    Every process calls ``receipts``, process 0 calls ``begin``, every process calls ``write``, and process 0 calls
    ``commit``. Each of these calls is made once all processes have returned from the one before. At the end, and after
    a failure on any process, every process calls ``remove``.
    """

    contents: Contents
    """What the source holds."""
    manifest: bytes
    """The manifest of the source, as it is in the file."""
    selection: Selection | None
    """The pieces that are copied. None means that the whole checkpoint is copied, byte for byte."""
    target: Store
    """The directory of the copy."""
    save_id: str
    """The save id of the copy."""
    number: int
    """The number of this process, from 0 to ``size - 1``."""
    size: int
    """The number of processes that make this copy together."""
    verify: bool
    """Whether everything that is read is compared with its digest."""
    shared_with: Location | None
    """Where the source is, if the copy may share whole data files with it. None means that all bytes are written."""
    options: WriteOptions
    """How the files of the copy are written."""
    _first: RankWrite | None = field(default=None, init=False)
    """On process 0, from ``begin`` on, the write that takes the lock and commits. None on all other processes."""
    _own: Mapping[int, Collection[int]] = field(init=False)
    """The files that this process writes, as ``shared_files`` returns them."""
    _own_bytes: int = field(init=False)
    """The size in bytes of the tensors in these files."""

    def __post_init__(self) -> None:
        manifest = self.contents.manifest
        whole = dict(enumerate(manifest.data_bytes.tolist()))
        file_bytes = whole if self.selection is None else self.selection.file_bytes
        self._own = shared_files(manifest, file_bytes, self.number, self.size)
        self._own_bytes = sum(file_bytes[file] for own in self._own.values() for file in own if file != TABLE)

    def receipts(self) -> list[bytes]:
        """Returns what the files will hold of those ranks whose digest tables this process writes. The list is empty
        where the whole checkpoint is copied, because its manifest says that already."""
        if self.selection is None:
            return []
        shards = {rank: self.selection.shards(rank, self.save_id) for rank, own in self._own.items() if TABLE in own}
        return [catalog.pack(catalog.receipt(*one)) for one in shards.items()]

    def begin(self, lock: WriteLock, receipts: Sequence[bytes]) -> Space:
        """Refuses to replace what may not be replaced, takes the lock, and makes the directory of the new data. Returns
        and raises what ``RankWrite.begin`` does."""
        refuse_place(self.target, self.target.parent, latest=False)
        first = self._rank_write(0, (), None)
        if self.selection is not None:
            unpacked = sorted((catalog.unpack(one) for one in receipts), key=lambda one: one.rank)
            first.describe(unpacked)
        else:
            files = self.contents.manifest.files.nbytes if self.shared_with is None else ()
            first.needed_bytes = sum(files) + self.contents.manifest.index_bytes
        self._first = first
        return first.begin(lock)

    def write(self) -> list[tuple[int, bytes]]:
        """Writes the files of this process and makes them durable. Returns each rank whose digest table it has written,
        with the digest of that table."""
        with reported(self.options.progress, "copy", self._own_bytes) as advance:
            told = replace(self.options, progress=PartOfProgress(advance))
            digests = {rank: self._write(rank, own, told) for rank, own in self._own.items()}
        return [(rank, one) for rank, one in digests.items() if TABLE in self._own[rank]]

    def _write(self, rank: int, own: Collection[int], options: WriteOptions) -> bytes:
        files = self._files(rank, own)
        one = self._rank_write(rank, files.shards, files.source)
        one.options, one.with_table = options, TABLE in own
        if self.shared_with is not None and self.selection is None:
            one.same = {
                shard.shard.path: SameFile(self.shared_with.child(shard.shard.path), files.digests(shard))
                for shard in files.shards
            }
        return one.write_own(Snapshot())

    def commit(self, digests: Sequence[tuple[int, bytes]]) -> None:
        """Commits the copy. This is called when all files are durable. ``digests``: what all processes have returned
        from ``write``, in any order."""
        assert self._first is not None, "the copy has begun"
        if self.selection is None:
            self._first.put_in_place(self.manifest, _index(self.contents))
        else:
            self._first.commit([one for _, one in sorted(digests)])

    def remove(self) -> None:
        """Gives the lock back, and removes what this copy has made unless it is committed. It may be called several
        times."""
        if self._first is not None:
            self._first.remove()

    def _files(self, rank: int, own: Collection[int]) -> RankFiles:
        if self.selection is None:
            return whole_files(self.contents, rank, own, verify=self.verify)
        return self.selection.files(rank, self.save_id, own, verify=self.verify)

    def _rank_write(self, rank: int, shards: Sequence[ShardPlan], source: Source | None) -> RankWrite:
        manifest = self.contents.manifest
        writer = {
            **manifest.writer, "copied": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "copied_by": __version__, "copied_from": manifest.save_id,
        }  # fmt: skip
        about = catalog.About(manifest.step, manifest.block_bytes, manifest.aliases, manifest.state, writer)
        return RankWrite(
            store=self.target, latest_in=None, save_id=self.save_id, rank=rank, shards=shards, about=about,
            options=self.options, source=source,
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
