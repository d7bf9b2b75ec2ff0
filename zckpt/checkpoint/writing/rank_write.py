"""One rank's part in the write of a checkpoint. Each rank writes its own files. Rank 0 also takes the lock, writes the
index and the manifest, and commits."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.listing.doubt import refuse_doubt
from zckpt.checkpoint.listing.files import lengths
from zckpt.checkpoint.listing.leftovers import is_file, may_be_named, run_leftovers
from zckpt.checkpoint.listing.other_formats import deepspeed_files
from zckpt.checkpoint.listing.runs import latest_name, manifest_bytes, names_in
from zckpt.checkpoint.writing.collect import tensors_of
from zckpt.checkpoint.writing.removal import clear_for_write, remove
from zckpt.checkpoint.writing.reuse import SameFile, read_back
from zckpt.errors import CheckpointExistsError, FormatError, MissingFileError, RankError, StorageError, first_few
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import DIGEST_BYTES, digest
from zckpt.format.limits import MANIFEST_BYTES_MAX
from zckpt.format.names import Tier
from zckpt.plan import catalog
from zckpt.plan.inventory import ANY_TIME, FileRange
from zckpt.plan.together import joined_digests
from zckpt.plan.writes import plan_writes
from zckpt.progress import logged, reported
from zckpt.storage.contract import ANYTHING
from zckpt.storage.location import Location
from zckpt.storage.lock import is_held, refuse_other_holder
from zckpt.storage.space import Space
from zckpt.transfer.budget import budget_or_default
from zckpt.transfer.devices import devices_of, synchronize
from zckpt.transfer.staging import pool_for
from zckpt.transfer.write import run_writes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.together import CommonFile
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Condition, Prepared, Store
    from zckpt.storage.lock import WriteLock
    from zckpt.transfer.snapshot import Snapshot
    from zckpt.transfer.write import CopySource


LATE_SECONDS = 5.0
"""For how many seconds a rank looks for the lock that the leader of its machine holds. The client of a network file
system may remember for a while that a file does not exist."""


@dataclass(slots=True, kw_only=True, eq=False)
class RankWrite:
    """One rank's part in a write. ``begin`` is called on rank 0, then ``write_data_files`` on every rank. Then the
    ranks call ``check_files`` for each other's files, and rank 0 commits in three steps: ``prepare_commit``,
    ``commit_prepared`` and ``finish``. Each step begins after all ranks have done the step before. A conversion, and a
    copy of some tensors, first call ``make_manifest``, and in the end ``commit``, which checks all files and does the
    three steps. After the commit, the lock is released. After a failure on any rank, every rank calls ``remove``. If
    each machine writes to a disk of its own, the leader of every machine does all that rank 0 does, so they commit
    together."""

    store: Store
    """The directory of the checkpoint."""
    latest_in: Store | None = None
    """The directory of the run whose file ``latest`` will name the checkpoint, or None if ``latest`` stays as it is."""
    save_id: str
    """The save id of the lock of rank 0. In a copy of a whole checkpoint, it is the save id of that checkpoint."""
    rank: int
    data_files: Sequence[DataFilePlan]
    """The data files of this rank, and the ranges of common files that it writes."""
    metadata: catalog.SaveMetadata
    """The fields of the manifest that do not describe tensors or files."""
    options: WriteOptions
    source: CopySource | None = None
    """The checkpoint that is copied. None means that the state of an engine is written."""
    with_table: bool = True
    """Whether ``write_data_files`` also writes the digest table of the rank. If several processes copy files of one
    rank, only one of them writes it."""
    same: Mapping[str, SameFile] = field(default_factory=dict)
    """The files of this rank that another checkpoint has already, by their path. The store is asked to share them. If
    it cannot, they are written."""
    machine: Collection[int] | None = None
    """The ranks whose files are in this directory, if each machine writes to a disk of its own. None means all
    ranks."""
    common_files: Sequence[CommonFile] = ()
    """The files that several ranks write, and that this rank makes before they do."""
    writers: Ranks | None = None
    """The ranks that write to the same files, among them this one. None if this rank has its files to itself."""
    goes_on: bool = False
    """Whether an earlier try of the same copy may have left files, with which this one goes on."""
    leaves_files: bool = False
    """Whether the files of the copy stay after a failure, so that another try can go on with them."""
    described: tuple[bytes, bytes] = (b"", b"")
    """The manifest without digests, and the index, on the leader: those that are given, or those that ``make_manifest``
    makes."""
    data_bytes: int = 0
    """How many bytes the ranks write to this directory, beside what ``described`` has, on the leader."""
    lock: WriteLock | None = field(default=None, init=False)
    """The lock of the checkpoint, from ``begin`` to ``remove``. It is None on all ranks but the leader."""
    _begun: bool = field(default=False, init=False)
    """Whether the directory of the new data belongs to this write. Only then may it remove the directory."""
    _replaced: Mapping[str, Collection[str] | None] = field(default_factory=dict, init=False)
    """The names of the files and directories that are removed after the commit: those of an older checkpoint, and those
    of DeepSpeed's own checkpoint. The value of each is the argument ``named`` of ``look``."""
    _prepared: list[Prepared] = field(default_factory=list, init=False)
    """The prepared manifest, and after it the prepared file ``latest``, if there is one."""
    _in_doubt: bool = field(default=False, init=False)
    """Whether another leader may have committed, so that what this one has prepared must stay."""
    _over: Condition = field(default=None, init=False)
    """What the commit replaces: the manifest that was there when the write began, or nothing. It is ``ANYTHING`` if the
    file is too long for a manifest."""

    def shared_bytes(self) -> int:
        """Returns how many bytes of this rank's files the store may share with existing files, which are those of an
        earlier checkpoint, or swap files."""

        def source(data_file: DataFilePlan) -> Location | None:
            if data_file.id.path in self.same:
                return self.same[data_file.id.path].location
            swapped = (f.data.path for f in data_file.fragments if isinstance(f.data, FileRange))
            return next(map(Location.of, swapped), None)

        sources = [(data_file.nbytes, source(data_file)) for data_file in self.data_files]
        return sum(nbytes for nbytes, location in sources if location and self.store.may_share(location.parent))

    def make_manifest(self, rank_records: Sequence[catalog.RankRecord]) -> None:
        """Makes the manifest and the index from the records of all ranks. Raises the errors of ``catalog``."""
        self.described = catalog.catalog(rank_records, self.save_id, self.metadata)
        self.data_bytes = sum(file.nbytes for record in rank_records for file in record.files)

    def begin(self, lock: WriteLock) -> Space:
        """Takes the lock. Then removes the leftovers of writers that died, because they take space, and notes what the
        commit will replace. The first data file makes the directory of the new data.

        Returns the space that the write needs and has. All ranks pass it to ``Space.refuse_lack`` before they write.
        Raises CheckpointExistsError if there is something that may not be replaced, LockedError, and StorageError.
        """
        store, overwrite = self.store, self.options.overwrite
        if not overwrite:
            refuse_doubt(store)
        self.lock = lock
        lock.acquire()
        foreign = deepspeed_files(names_in(store))
        if foreign and not self.options.replace_foreign:
            raise CheckpointExistsError(
                f"there is a checkpoint in DeepSpeed's own format here ({first_few(foreign, 3)}): DeepSpeed would go "
                "on loading that one",
                file=str(store.location),
                hint="write elsewhere, remove these files, or have them replaced: write(..., overwrite=True), "
                "attach(engine, replace_deepspeed=True), zckpt run --replace-deepspeed",
            )
        self._over = _manifest_in(store)
        if self._over is not None and not overwrite:
            raise CheckpointExistsError(
                "there is already a checkpoint here", file=str(store.location),
                hint="write elsewhere, or replace it with overwrite=True (--overwrite)",
            )  # fmt: skip
        data_dir = names.data_dir(self.save_id)
        left = clear_for_write(store, overwrite=overwrite, dead=lock.dead, own=data_dir if self.goes_on else "")
        run = store.parent
        run.remove(*run_leftovers(run))
        for dead_save in lock.dead:
            prepared = names.temporary(names.LATEST, names.prepared_digits(dead_save))
            # The save id is from a file that anybody may have made.
            if names.is_temporary(prepared, names.LATEST) and is_file(run, prepared):
                run.remove(prepared)
        if not self.goes_on and store.entry(data_dir) is not None:  # a copy has the save id of its source
            raise CheckpointExistsError(
                "the data of the same save are here already", file=str(store.location.child(data_dir)),
                hint="`zckpt validate` says whether they are whole; to copy them again, remove this directory first",
            )  # fmt: skip
        data = [name for name in names_in(store) if names.is_data_dir(name) and name not in (data_dir, *left.foreign)]
        named = {} if left.manifest is None else {names.data_dir(left.manifest.save_id): lengths(left.manifest)}
        self._replaced = {name: named.get(name) for name in [*data, *foreign]}
        self._begun = True
        return Space.of(store, self.data_bytes + sum(map(len, self.described)))

    def write_data_files(self, snapshot: Snapshot) -> bytes:
        """Writes this rank's files so that they survive a loss of power. Returns the digest of its digest table. If it
        has ``writers``, all of them call this at the same time.

        ``snapshot`` is told when all parts have been read that may change at any time (in a write that is not lazy, all
        parts), and again when all parts have been read. At these moments, up to max(``snapshot_bytes``, budget) bytes
        may still be in buffers. Raises StorageError, RankError, and ZckptError if the write is given up.
        """
        table = self._write_data(snapshot) if self.writers is None else self._write_together(self.writers, snapshot)
        if self.with_table:
            self.store.put_new(names.digests_path(self.save_id, self.rank), table)
        self.store.sync_names(names.rank_dir(self.save_id, self.rank))
        return digest(table)

    def _write_together(self, ranks: Ranks, snapshot: Snapshot) -> bytes:
        """Does what ``_write_data`` does, if some of the data are in files that the first of ``ranks`` makes. Returns
        the digest table of this rank."""
        own = b""

        def make() -> None:
            # They need not be durable yet: each rank makes a file durable when it has written to it.
            for file in self.common_files:
                self.store.make(file.id.path, file.nbytes, reserve=file.id.tier is not Tier.NVME)

        def write() -> tuple[int, bytes]:
            nonlocal own
            table = self._write_data(snapshot)
            own_bytes = DIGEST_BYTES * sum(data_file.blocks for data_file in self.data_files if not data_file.is_range)
            own = table[:own_bytes]
            return self.rank, table[own_bytes:]

        def join(digests: list[tuple[int, bytes]]) -> tuple[None, dict[int, bytes]]:
            return None, {0: joined_digests(self.common_files, dict(digests))}

        ranks.together(make, "write")
        _, common = ranks.decide_each(write, join, "write")
        return own + (common or b"")

    def _write_data(self, snapshot: Snapshot) -> bytes:
        """Writes the data of this rank's files, and makes them durable. Returns their digests."""
        store, options, block_bytes = self.store, self.options, self.metadata.block_bytes
        # Tensors that were not contiguous were copied while the write was planned. In the background, that was another
        # thread, whose stream of the device this thread has to wait for.
        devices = devices_of(tensors_of(fragment for data_file in self.data_files for fragment in data_file.on_devices))
        synchronize(devices)
        stores = [store] if self.source is None else [store, self.source.store]
        budget = budget_or_default(options.budget).serving(*stores)
        background = options.in_background
        snapshot_bytes = 0 if background is None else background.snapshot_bytes or 0
        staging = pool_for(devices, budget, block_bytes, snapshot_bytes)
        lasting = {data_file.id.part for data_file in self.data_files} - ANY_TIME
        plan = plan_writes(
            self.data_files, lasting if options.lazy else (), batch_bytes=staging.batch_bytes, block_bytes=block_bytes,
            straight=() if background is not None else lasting,
        )  # fmt: skip
        same = self.same
        if self.source is None:
            same = read_back(self.data_files, same, budget, block_bytes)
        shared = {path: file.digests for path, file in same.items() if store.share(path, file.location)}
        with (
            logged("wrote", str(store.location), plan.tensor_bytes),
            reported(options.progress, "write", plan.tensor_bytes) as advance,
        ):
            return run_writes(store, plan, budget, staging, snapshot, advance, self.source, shared, snapshot_bytes)

    def commit(self, digests: Sequence[bytes]) -> None:
        """Commits the checkpoint. The caller calls it when the files of every rank are durable. ``digests`` has the
        digest of each rank's digest table."""
        self.put_in_place(*self.with_digests(digests))

    def with_digests(self, digests: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Returns the manifest with the digest of each rank's digest table, and the index."""
        manifest, index = self.described
        return catalog.with_digests(manifest, digests), index

    def check_files(self, files: Mapping[str, range]) -> None:
        """Checks that this rank sees files with the lengths in bytes that they may have, by their paths. The caller
        calls it when the files are durable. Raises FormatError (F001) and RankError."""
        for (path, may_have), size in zip(files.items(), self.store.sizes([*files]), strict=True):
            if size not in may_have:
                message = f"{may_have.start} bytes were written, rank {self.rank} sees {size}"
                raise RankError(message, file=path, rank=self.rank)

    def put_in_place(self, manifest: bytes, index: bytes) -> None:
        """Checks the files of all ranks, and does the three steps of a commit one after the other, for a write with one
        leader."""
        files = lengths(manifest_format.decode(manifest))
        del files[names.index_path(self.save_id)]  # It is written in the first step.
        self.check_files(files)
        try:
            self.prepare_commit(manifest, index)
            self.commit_prepared()
        except BaseException:
            self._discard()
            raise
        self.finish()

    def prepare_commit(self, manifest: bytes, index: bytes) -> None:
        """The first step of a commit, on a leader: writes the index, and prepares the manifest and the file ``latest``,
        so that a full disk is noticed before the commit. The caller calls it when the files of every rank are durable
        and checked."""
        assert self.lock is not None, "the write has begun"
        store, digits = self.store, names.prepared_digits(self.lock.save_id)
        store.put_new(names.index_path(self.save_id), index)
        store.sync_names(names.data_dir(self.save_id))
        self._prepared.append(store.prepare(names.MANIFEST, manifest, digits))
        if self.latest_in is not None:
            named = names.encode_latest(latest_name(store.location, self.latest_in.location))
            self._prepared.append(self.latest_in.prepare(names.LATEST, named, digits))

    def leave_in_doubt(self) -> None:
        """Is called if this leader has not heard whether all others have prepared, because a rank was lost. If they
        have, one of them may commit. So what is prepared here stays, as after ``commit_prepared``."""
        self._in_doubt = self.machine is not None and bool(self._prepared)

    def commit_prepared(self) -> None:
        """The second step, on a leader: commits. Raises LockedError if another writer has taken over the lock. That
        writer has removed the prepared manifest, or it reads the committed manifest before it removes anything. If
        there are several leaders, the commit of another one may have succeeded when that of this one fails. So what is
        prepared stays from here on, and ``zckpt.checkpoint.listing.doubt`` settles what becomes of it."""
        assert self.lock is not None, "the write has begun"
        self._in_doubt = self.machine is not None
        confirm = self.lock.confirm
        confirm()
        try:
            self._prepared[0].commit(self._over)
        except BaseException:
            confirm()  # raises the reason, if another writer has removed the prepared manifest
            raise
        confirm()  # a writer that has taken over since may need the files that are removed below

    def finish(self) -> None:
        """The third step, on a leader, when all have committed: makes ``latest`` name the checkpoint, and removes what
        was there when the write began."""
        try:
            for latest in self._prepared[1:]:
                latest.commit()
        except StorageError as error:
            error.hint = f"{self.store.location} is committed and whole; the file `latest` does not name it yet"
            raise
        finally:
            self._discard()
        remove(self.store, self._replaced)

    def _discard(self, from_number: int = 0) -> None:
        """Removes what was prepared and not committed. ``from_number`` is 1 if the prepared manifest stays."""
        while len(self._prepared) > from_number:
            self._prepared.pop().discard()

    def remove(self) -> None:
        """Removes what this write has made, unless the checkpoint is committed. It is called after a failure, and may
        be called several times."""
        if self.lock is not None:
            lock, self.lock = self.lock, None
            try:
                self._discard(from_number=int(self._in_doubt))
                stays = self._in_doubt or self.leaves_files
                if self._begun and not stays and not may_be_named(self.store, self.save_id):
                    remove(self.store, {names.data_dir(self.save_id): ()})
            finally:
                lock.release()


def join(store: Store, save_id: str, rank: int, leader: int, space: Sequence[Any]) -> None:
    """Checks on one rank that it can take part in the write of this save, which the rank ``leader`` has begun.
    ``space`` has the fields of the ``Space`` that ``RankWrite.begin`` has returned there. Raises RankError if this rank
    does not see the lock of the leader, LockedError if another writer has taken it over, NoSpaceError and
    StorageError."""
    give_up = time.monotonic() + LATE_SECONDS
    while not is_held(store, save_id):
        if time.monotonic() > give_up:
            refuse_other_holder(store)
            raise RankError(
                f"rank {leader} has taken a lock that this rank does not see",
                file=str(store.location.child(names.LOCK)), rank=rank,
                hint="write to a place that all ranks share, or let each machine write to a disk of its own: "
                "write(..., node_local=True)",
            )  # fmt: skip
        time.sleep(0.1)
    Space(*space).refuse_lack()


def _manifest_in(store: Store) -> Condition:
    """Returns the bytes of the manifest, or None if there is none. Returns ``ANYTHING`` if what is there is too long
    for a manifest, or is no file. Raises StorageError."""
    with closing(store.reader()) as reader:
        try:
            manifest = manifest_bytes(reader)
        except MissingFileError:
            return None
        except FormatError:
            return ANYTHING
    return manifest if len(manifest) <= MANIFEST_BYTES_MAX else ANYTHING
