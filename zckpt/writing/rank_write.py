"""One rank's part in writing a checkpoint: its own files, and on rank 0 what is around them, and the commit."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointExistsError, RankError, StorageError, first_few
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import digest
from zckpt.listing.other_formats import deepspeed_files
from zckpt.listing.runs import latest_name, leftovers, run_leftovers
from zckpt.plan import catalog
from zckpt.plan.layout import plan_writes
from zckpt.progress import reported
from zckpt.state.inventory import ANY_TIME
from zckpt.storage.space import Space
from zckpt.transfer.budget import Budget
from zckpt.transfer.devices import devices_of, synchronize
from zckpt.transfer.staging import pool_for
from zckpt.transfer.write import run_writes
from zckpt.writing.collect import tensors_of
from zckpt.writing.leftovers import clear_for_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.plan.layout import ShardPlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import Location
    from zckpt.storage.lock import WriteLock
    from zckpt.transfer.snapshot import Snapshot
    from zckpt.transfer.write import Source
    from zckpt.writing.options import WriteOptions


@dataclass(frozen=True, slots=True)
class SameFile:
    """A data file of another checkpoint with the very bytes that a planned file is to have."""

    location: Location
    digests: bytes
    """Of its blocks."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankWrite:
    """``describe`` and ``begin`` on rank 0, ``write_own`` on every rank, ``commit`` on rank 0; each once all ranks have
    done what comes before. At last the lock is released; after a failure on any rank, each one calls ``remove``."""

    store: Store
    """The checkpoint."""
    latest_in: Store | None
    """The run whose file ``latest`` is to name the checkpoint."""
    save_id: str
    """The save id of rank 0's lock, or, for the copy of a whole checkpoint, the save id of that checkpoint."""
    rank: int
    shards: Sequence[ShardPlan]
    """This rank's files."""
    about: catalog.About
    """What the manifest says beside tensors and files."""
    options: WriteOptions
    source: Source | None = None
    """The checkpoint that is copied. None means that the state of an engine is written."""
    with_table: bool = True
    """Whether ``write_own`` writes the digest table of the rank too. Where several processes copy files of one rank,
    one of them does."""
    same: Mapping[str, SameFile] = field(default_factory=dict)
    """By path, those of this rank's files that another checkpoint has already. The store is asked to share them. Where
    it cannot, they are written."""
    needed_bytes: int = field(default=0, init=False)
    """On rank 0 from ``describe`` on, how many bytes all ranks write. A copy of a whole checkpoint, which is not
    described, sets it itself."""
    lock: WriteLock | None = field(default=None, init=False)
    """From ``begin`` to ``remove``; None on all ranks but rank 0."""
    _manifest: bytes = field(default=b"", init=False)
    _index: bytes = field(default=b"", init=False)
    _begun: bool = field(default=False, init=False)
    """Whether this write has made the directory of the new data, and so may remove it."""
    _replaced: list[str] = field(default_factory=list, init=False)
    """The names of what goes after the commit: of an older checkpoint, and files of DeepSpeed's own."""

    def describe(self, receipts: Sequence[catalog.Receipt]) -> None:
        """Makes the manifest and the index from the receipts of all ranks; raises what ``catalog`` raises."""
        self._manifest, self._index = catalog.catalog(receipts, self.save_id, self.about)
        # What lies in a swap file or in an earlier checkpoint may be shared, and then it needs no space.
        shards = [shard for one in receipts for shard in one.shards]
        files = [shard.nbytes for shard in shards if shard.tier != "nvme" and not shard.origin]
        self.needed_bytes = sum(files) + len(self._index) + len(self._manifest)

    def begin(self, lock: WriteLock) -> Space:
        """Takes the lock, and makes the directory that the new data goes to, beside that of an older checkpoint. What
        writers that died have left there goes first, for the space that it takes. Returns what all ranks pass to
        ``Space.refuse_lack`` before they write. Raises CheckpointExistsError for what may not be replaced, LockedError,
        StorageError."""
        self.lock = lock
        lock.acquire()
        store, overwrite = self.store, self.options.overwrite
        foreign = deepspeed_files(store.entries() or ())
        if foreign and not self.options.replace_foreign:
            raise CheckpointExistsError(
                f"there is a checkpoint in DeepSpeed's own format here ({first_few(foreign, 3)}): DeepSpeed would go "
                "on loading that one",
                file=str(store.location),
                hint="write elsewhere, remove these files, or have them replaced: write(..., overwrite=True), "
                "attach(engine, replace_deepspeed=True), zckpt run --replace-deepspeed",
            )
        if store.exists(names.MANIFEST) and not overwrite:
            raise CheckpointExistsError(
                "there is already a checkpoint here", file=str(store.location),
                hint="write elsewhere, or replace it with overwrite=True (--overwrite)",
            )  # fmt: skip
        clear_for_write(store, overwrite=overwrite, dead=lock.dead)
        run = store.parent
        for name in run_leftovers(run):
            run.remove(name)
        for dead_save in lock.dead:
            prepared = names.temporary(names.LATEST, names.prepared_digits(dead_save))
            if names.is_temporary(prepared, names.LATEST):  # the save id comes from a file that anybody may have made
                run.remove(prepared)
        data_dir = names.data_dir(self.save_id)
        if store.exists(data_dir):  # a copy has the save id of its source
            raise CheckpointExistsError(
                "the data of the same save are here already", file=str(store.location.child(data_dir)),
                hint="`zckpt validate` says whether they are whole; to copy them again, remove this directory first",
            )  # fmt: skip
        self._replaced = [*(name for name in store.entries() or () if names.is_data_dir(name)), *foreign]
        self._begun = True
        store.make_directories(data_dir)
        return Space.of(store, self.needed_bytes)

    def write_own(self, snapshot: Snapshot) -> bytes:
        """Writes this rank's files, durable; returns the digest of its digest table. ``snapshot`` is told when the
        parts have been read that may change at any time (all, unless the write is lazy), and again when all have been.
        Then up to max(``snapshot_bytes``, budget) bytes may still be in buffers. Raises StorageError, RankError, and
        ZckptError where the write is given up."""
        store, options, block_bytes = self.store, self.options, self.about.block_bytes
        data_dir, rank_dir = names.data_dir(self.save_id), names.rank_dir(self.save_id, self.rank)
        if not store.exists(data_dir):
            raise RankError(
                "rank 0 has made a directory that this rank does not see",
                file=str(store.location.child(data_dir)), rank=self.rank,
                hint="write to a file system that all ranks share",
            )  # fmt: skip
        store.make_directories(rank_dir)
        # Tensors that were not contiguous were copied while the write was planned, on another thread's stream.
        devices = devices_of(tensors_of(fragment for shard in self.shards for fragment in shard.fragments))
        synchronize(devices)
        budget, snapshot_bytes = options.budget or Budget.from_environment(), options.snapshot_bytes or 0
        staging = pool_for(devices, budget, block_bytes, snapshot_bytes)
        buffers = staging.buffers or max(snapshot_bytes // staging.nbytes, budget.threads)
        lasting = {shard.shard.part for shard in self.shards} - ANY_TIME
        plan = plan_writes(
            self.shards, lasting if options.lazy else (), batch_bytes=staging.batch_bytes, block_bytes=block_bytes,
            straight=() if options.background else lasting,
        )  # fmt: skip
        there = {path: one.digests for path, one in self.same.items() if store.share(path, one.location)}
        with reported(options.progress, "write", plan.tensor_bytes) as advance:
            table = run_writes(store, plan, budget, staging, buffers, snapshot, advance, self.source, there)
        if self.with_table:
            store.put(names.digests_path(self.save_id, self.rank), table)
        store.sync_names(rank_dir)
        return digest(table)

    def commit(self, digests: Sequence[bytes]) -> None:
        """Commits the checkpoint. This is called when every rank's files are durable. ``digests``: for each rank the
        digest of its digest table."""
        self.put_in_place(catalog.with_digests(self._manifest, digests), self._index)

    def put_in_place(self, manifest: bytes, index: bytes) -> None:
        """Writes the index, then the manifest, then the file ``latest``. This is called when every rank's files are
        durable. At last, what was there when the write began is removed.

        Both files are written under temporary names first, so that a full disk shows before the commit. Raises
        LockedError if this write has lost the right to commit. Whoever has taken that right over has removed the
        temporary manifest, or reads the committed one before it removes anything.
        """
        assert self.lock is not None, "the write has begun"
        store, run, confirm = self.store, self.latest_in, self.lock.confirm
        digits = names.prepared_digits(self.lock.save_id)
        written = manifest_format.decode(manifest)
        with closing(store.reader()) as reader:
            for file in written.files:
                path = written.path(file)
                size = reader.size(path)
                if size != file.nbytes:
                    raise RankError(f"rank {file.rank} wrote {file.nbytes} bytes, rank 0 sees {size}", file=path)
        store.put(names.index_path(self.save_id), index)
        store.sync_names(names.data_dir(self.save_id))
        with ExitStack() as temporary:

            def prepare(where: Store, path: str, data: bytes) -> str:
                prepared = where.prepare(path, data, digits)
                temporary.callback(where.remove, prepared)  # after its commit there is nothing left to remove
                return prepared

            prepared = prepare(store, names.MANIFEST, manifest)
            if run is not None:
                named = names.encode_latest(latest_name(store.location, run.location))
                prepared_latest = prepare(run, names.LATEST, named)
            confirm()
            try:
                store.commit(names.MANIFEST, prepared)
            except BaseException:
                confirm()  # the reason why it is gone
                raise
            confirm()  # whoever has taken over since may need what this write would remove
            if run is not None:
                try:
                    run.commit(names.LATEST, prepared_latest)
                except StorageError as error:
                    error.hint = f"{store.location} is committed and whole; the file `latest` does not name it yet"
                    raise
        for name in self._replaced:
            store.remove(name)

    def remove(self) -> None:
        """After a failure: removes what this write has made, unless it is committed. As often as one likes."""
        if self.lock is not None:
            lock, self.lock = self.lock, None
            data_dir = names.data_dir(self.save_id)
            if self._begun and data_dir in leftovers(self.store):
                self.store.remove(data_dir)
            lock.release()
            self.store.remove_if_empty("")
