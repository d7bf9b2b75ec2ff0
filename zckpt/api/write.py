"""From a live engine to a checkpoint: what each rank holds, its files, the commit, now or in the background."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import msgpack
import numpy as np
import torch

from zckpt.api.background import PendingWrite, wait
from zckpt.engines import adapt, group_of
from zckpt.errors import (
    CheckpointExistsError,
    RankError,
    StateError,
    StorageError,
    warn,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names, tree
from zckpt.format.digest import BLOCK_BYTES, digest
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards, plan_writes
from zckpt.plan.select import several
from zckpt.progress import Progress, reported
from zckpt.ranks.collectives import Ranks, check_arguments, comparable
from zckpt.reading.deepspeed_files import deepspeed_files
from zckpt.reading.runs import latest_name, refuse_place
from zckpt.state.inventory import BUFFER, PARAM, STATE, Fragment
from zckpt.storage.location import Location
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.transfer.budget import Budget
from zckpt.transfer.devices import check_devices, devices_of, synchronize
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.staging import pool_for
from zckpt.transfer.torch_dtypes import DTYPE_NAMES
from zckpt.transfer.write import run_writes
from zckpt.version import __version__
from zckpt.writing.leftovers import clear_for_write, leftovers, run_leftovers
from zckpt.writing.plain import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from zckpt.plan.layout import ShardPlan
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

_ANY_TIME = frozenset({PARAM, BUFFER, STATE})
"""The parts that may change without a step of the optimizer: a model's own forward updates what it does not train."""
_NUMPY_DTYPES = frozenset(map(np.dtype, ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]))


@overload
def write(
    engine: object,
    path: StrPath | None = None,
    *,
    parts: Collection[str] | None = None,
    exclude: Collection[str] = (),
    client_state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    pending_gradients: Literal["refuse", "drop"] = "refuse",
    background: Literal[False] = False,
) -> str: ...


@overload
def write(
    engine: object,
    path: StrPath | None = None,
    *,
    parts: Collection[str] | None = None,
    exclude: Collection[str] = (),
    client_state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    pending_gradients: Literal["refuse", "drop"] = "refuse",
    background: Literal[True],
    snapshot: Literal["copy", "lazy"] = "copy",
    snapshot_bytes: int | None = None,
) -> PendingWrite: ...


def write(
    engine: object,
    path: StrPath | None = None,
    *,
    parts: Collection[str] | None = None,
    exclude: Collection[str] = (),
    client_state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    pending_gradients: Literal["refuse", "drop"] = "refuse",
    background: bool = False,
    snapshot: Literal["copy", "lazy"] = "copy",
    snapshot_bytes: int | None = None,
) -> str | PendingWrite:
    """Writes the state of a training engine as one checkpoint; durable when it returns. Every rank calls it.

    ``path`` is the checkpoint's directory, on a file system that all ranks share; None: ``checkpoints/global_step<N>``.
    ``parts``: which parts of the state; None: all that a bit-exact resume needs. ``exclude``: parts to leave out, such
    as the ``param`` of frozen weights. Both take one name or several. Further names of a tied tensor that is left out
    are left out too. ``client_state``: the caller's own plain values, tensors on any device and arrays, taken from rank
    0; a warning says so where another rank gives other ones. Some values come back as plain ones: a numpy scalar as
    Python's number or string, ``torch.Size`` as a tuple, a path as a string, a date or time as a string in ISO 8601, a
    set as a sorted list, a ``defaultdict`` as a dict. ``overwrite``: replace the checkpoint at ``path``, which stays
    whole until the new one is committed; after that, files of a checkpoint in DeepSpeed's own format go too.
    ``latest``: have the file ``latest`` beside the checkpoint name it. ``budget``: memory, threads and kind of I/O;
    None: ``Budget.from_environment()``. ``progress``: such as ``zckpt.ProgressBar()``. ``pending_gradients``: what is
    done where gradients wait for an optimizer step, which no checkpoint holds: "refuse" the write, or "drop" them.

    ``background``: return a PendingWrite as soon as training may go on; the checkpoint is of the state at this call.
    With ``snapshot="copy"`` that is once the state has been copied. With "lazy" it is once that has been copied which
    the optimizer does not own, such as buffers and frozen weights. Masters and moments are read while the next forward
    and backward passes run, and the next optimizer step waits until that is done; change them in no other way before.
    ``snapshot_bytes`` bounds the memory for copies on this rank: where the state is larger, the rest is on disk before
    training goes on. None: half of what is available, shared by the ranks of a machine. One write is under way at a
    time: the next write or restore and the end of the process wait for it and raise or print its error, which stderr
    shows as soon as it happens.

    Returns the checkpoint's absolute path. Raises on every rank, and leaves nothing behind, if any rank fails:
    UnsupportedError (also for more than the format can hold), StateError, DeviceError (a device that gives no bytes),
    ValueError for a part that the engine does not have and for a path that ``latest`` cannot name,
    CheckpointExistsError (also where ``path`` is the directory of a run or lies in a checkpoint: whoever opens the
    outer of two gets that), LockedError (somebody else is writing there), RankError, StorageError, NoSpaceError. All
    that can be known from the state is checked before a byte is written. KeyboardInterrupt on one rank makes the others
    raise RankError, unless it comes when all have agreed to commit: then the write has happened.
    """
    return write_engine(
        engine,
        path,
        parts=parts,
        exclude=exclude,
        client_state=client_state,
        overwrite=overwrite,
        latest=latest,
        budget=budget,
        progress=progress,
        pending_gradients=pending_gradients,
        background=background,
        snapshot=snapshot,
        snapshot_bytes=snapshot_bytes,
        replace_foreign=overwrite,
    )


def write_engine(
    engine: object,
    path: StrPath | None = None,
    *,
    parts: Collection[str] | None = None,
    exclude: Collection[str] = (),
    client_state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    pending_gradients: Literal["refuse", "drop"] = "refuse",
    background: bool = False,
    snapshot: Literal["copy", "lazy"] = "copy",
    snapshot_bytes: int | None = None,
    run: StrPath | None = None,
    each_client_state: bool = False,
    replace_foreign: bool,
) -> str | PendingWrite:
    """What ``zckpt.write`` and an attached engine have in common; the arguments of ``zckpt.write``, and these:

    ``run``: the directory in which the file ``latest`` is put; None: the parent of ``path``. ``latest`` names the
    checkpoint by its path relative to it. ``each_client_state``: where the ranks' client_state differ, each rank's own
    is kept in the tree of that rank, under the key ``client_state``; else rank 0's is written alone, and a warning says
    so. ``replace_foreign``: remove the files of DeepSpeed's own checkpoint in the target after the commit; otherwise
    they are a CheckpointExistsError before a byte is written.
    """
    # Every step of a chain of `share` runs on all ranks, with nothing that can fail between two of them.
    wait()
    group = group_of(engine)
    ranks = Ranks(group, call="zckpt.write")
    options = _Options(
        parts=parts, exclude=exclude, client_state=client_state, overwrite=overwrite, latest=latest, budget=budget,
        progress=progress, pending_gradients=pending_gradients, background=background, snapshot=snapshot,
        snapshot_bytes=snapshot_bytes, run=run, each_client_state=each_client_state, replace_foreign=replace_foreign,
    )  # fmt: skip
    write = _Write(engine, path, options, ranks.rank, ranks.size)
    with ranks.undivided():
        facts = ranks.share(write.prepare, "prepare the write")
        plans = ranks.share(lambda: write.plan(facts), "plan the write")
        # The ranks have agreed that all of them write in the background, or none.
        others = Ranks(group, background=True, call="zckpt.write") if background else ranks
        try:
            ranks.share(lambda: write.begin(plans), "begin the write")
            if background:
                ranks.together(lambda: write.stand_by(others), "begin the write")
                write.start()
                ranks.together(lambda: write.copy(ranks), "copy the state", interruptible=False)
            else:
                write.finish(ranks, Snapshot())
        except BaseException:
            write.give_up()
            raise
        return write.after()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of ``write_engine``."""

    parts: Collection[str] | None
    exclude: Collection[str]
    client_state: Mapping[str, Any] | None
    overwrite: bool
    latest: bool
    budget: Budget | None
    progress: Progress | None
    pending_gradients: str
    background: bool
    snapshot: str
    snapshot_bytes: int | None
    run: StrPath | None
    each_client_state: bool
    replace_foreign: bool

    @property
    def lazy(self) -> bool:
        return self.background and self.snapshot == "lazy"

    def shared(self, path: str) -> dict[str, object]:
        """The arguments that have to be the same on every rank."""
        return comparable(
            path=path, parts=self.parts, exclude=self.exclude, overwrite=self.overwrite, latest=self.latest,
            pending_gradients=self.pending_gradients, background=self.background, snapshot=self.snapshot,
        )  # fmt: skip


class _Write:
    """One rank's part in a write, step by step: ``prepare``, ``plan``, ``begin``, then ``finish``, which has steps of
    its own, here or in the background. A step gives all ranks a value, and the next one is given those of all."""

    def __init__(self, engine: object, path: StrPath | None, options: _Options, rank: int, size: int) -> None:
        self._engine, self._path, self._options = engine, path, options
        self._rank, self._size = rank, size
        self._pending: PendingWrite | None = None
        self._begun = False

    def prepare(self) -> _Facts:
        """All that this rank has to write, and what the ranks have to agree about."""
        given = self._options
        options = self._options = replace(given, parts=several(given.parts), exclude=several(given.exclude))
        if options.snapshot not in ("copy", "lazy"):
            raise ValueError(f"snapshot must be 'copy' or 'lazy', got {options.snapshot!r}")
        if not options.background and (options.snapshot, options.snapshot_bytes) != ("copy", None):
            raise ValueError("snapshot and snapshot_bytes are about a write in the background: pass background=True")
        client_state: object = options.client_state
        if not isinstance(client_state, Mapping | None):
            kind = type(client_state).__name__
            raise TypeError(f"client_state must be a dict, of the caller's own values by name, got a {kind}")
        if options.pending_gradients not in ("refuse", "drop"):
            raise ValueError(f"pending_gradients must be 'refuse' or 'drop', got {options.pending_gradients!r}")
        self._adapter = adapter = adapt(self._engine)
        adapter.refuse_unsupported(drop_gradients=options.pending_gradients == "drop")
        if options.lazy:
            adapter.refuse_lazy()
        path = f"checkpoints/global_step{adapter.step}" if self._path is None else self._path
        self._store = open_store(Location.of(path).absolute())
        self._run = self._store.parent if options.run is None else open_store(Location.of(options.run).absolute())
        self.target = str(self._store.location)
        if options.latest:
            latest_name(self._store.location, self._run.location)
        self._budget = options.budget or Budget.from_environment()
        unknown = sorted(set(options.exclude) - set(adapter.parts))
        if unknown:
            raise ValueError(f"exclude: the engine has no part {', '.join(unknown)}; it has {', '.join(adapter.parts)}")
        synchronize(adapter.devices)
        inventory = adapter.inventory(options.parts)
        self._fragments = [fragment for fragment in inventory.fragments if fragment.part not in options.exclude]
        for fragment in self._fragments:  # a part's name is a file's name
            names.check_part_name(fragment.part)
            names.check_tensor_name(fragment.name)
            if isinstance(fragment.data, torch.Tensor):
                _check_has_values(fragment.data, fragment.key)
        check_devices(_tensors(self._fragments))
        state = adapter.state()
        self._rank_state = adapter.rank_state()
        self._scalars = dict(sorted(_leaves(state.get("optimizer"), "optimizer")))
        self._buffers = _digests(self._fragments)
        first = self._rank == 0
        packed = b""
        if first:
            root = {"engine": state, names.CLIENT_STATE: dict(options.client_state or {})}
            packed = _pack_tree(root, "", self._fragments, 0)
            self._lock = WriteLock(self._store)
        writer = {
            "zckpt": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **adapter.description,
        }
        self._about = catalog.About(adapter.step, BLOCK_BYTES, inventory.aliases, packed, writer)
        return _Facts(
            options.shared(self.target), digest(msgpack.packb(self._scalars)), self._client_digest(),
            linux.boot_id() or platform.node(), self._buffers if first else {}, self._lock.save_id if first else "",
        )  # fmt: skip

    def _client_digest(self) -> bytes | None:
        """Of this rank's own client_state; None if it has none."""
        value = self._options.client_state
        if value is None:
            return None
        try:
            packed = tree.pack(dict(value), names.CLIENT_STATE, _fingerprint)
        except StateError:
            if self._rank and not self._options.each_client_state:
                return b""  # it is not written, and differs from rank 0's, which is
            raise
        return digest(packed)

    def plan(self, told: Sequence[_Facts]) -> bytes | dict[str, str]:
        """The receipt of this rank's files, once the ranks agree; else the optimizer's values that differ."""
        options, rank = self._options, self._rank
        facts = [_Facts(*one) for one in told]
        check_arguments([one.arguments for one in facts])
        if any(one.scalars != facts[0].scalars for one in facts):
            return self._scalars
        rank_state = self._rank_state
        if any(one.client_state not in (None, facts[0].client_state) for one in facts):
            if options.each_client_state:  # a rank that has passed none has an empty one of its own
                rank_state = {**rank_state, names.CLIENT_STATE: dict(options.client_state or {})}
            elif not options.each_client_state and rank == 0:
                warn("the ranks have different client_state: that of rank 0 is written, and all others are not")
        packed_tree = _pack_tree(rank_state, f"rank_state[{rank}]", self._fragments, rank)
        tensor = torch.frombuffer(bytearray(packed_tree), dtype=torch.uint8)
        self._fragments.append(_state_fragment(f"rank/{rank}", tensor))
        first = facts[0].buffers  # a replicated buffer is stored once
        fragments = [f for f in self._fragments if f.copy == 0 or self._buffers[f.key] != first.get(f.key)]
        self._save_id = facts[0].save_id
        self._plans = plan_shards(fragments, self._save_id, rank, self._size, block_bytes=BLOCK_BYTES)
        machines = [one.machine for one in facts]
        self._snapshot_bytes = options.snapshot_bytes or 0
        if options.background and options.snapshot_bytes is None:
            self._snapshot_bytes = available_bytes() // 2 // machines.count(machines[rank])
        return catalog.pack(catalog.receipt(rank, self._plans))

    def begin(self, told: Sequence[bytes | dict[str, str]]) -> None:
        """On rank 0, the manifest and the index, checked; then the lock and the place for the data."""
        packed = [one for one in told if isinstance(one, bytes)]
        if not packed:
            raise _differing([one for one in told if isinstance(one, dict)])
        if self._rank == 0:
            receipts = [catalog.unpack(one) for one in packed]
            self._manifest, self._index = catalog.catalog(receipts, self._save_id, self._about)
            refuse_place(self._store, self._run, latest=self._options.latest)
            self._begun = True
            self._lock.acquire()
            self._replaced = begin_write(
                self._store, self._save_id, overwrite=self._options.overwrite,
                replace_foreign=self._options.replace_foreign, dead=self._lock.dead,
            )  # fmt: skip

    def finish(self, ranks: Ranks, snapshot: Snapshot) -> None:
        """Every rank's files, then the commit; or, after a failure on any of them, none of it. Collective."""
        try:
            digests = ranks.share(lambda: self._write(snapshot), "write")
            ranks.together(snapshot.check, "write")  # what has come to a rank while it waited for the others
            ranks.first(lambda: self._commit(digests), "commit")
        except BaseException:
            self._remove()
            raise
        if self._rank == 0:
            self._lock.release()

    def _write(self, snapshot: Snapshot) -> bytes:
        later = {plan.shard.part for plan in self._plans} - _ANY_TIME if self._options.lazy else ()
        return write_rank(
            self._store, self._save_id, self._plans, self._rank, self._budget, self._options.progress,
            snapshot=snapshot, snapshot_bytes=self._snapshot_bytes, later=later,
        )  # fmt: skip

    def _commit(self, digests: Sequence[bytes]) -> None:
        commit_write(
            self._store, self._save_id, catalog.with_digests(self._manifest, digests), self._index,
            replaced=self._replaced, latest_in=self._run if self._options.latest else None, confirm=self._lock.confirm,
        )  # fmt: skip

    def stand_by(self, ranks: Ranks) -> None:
        """Has a thread ready that finishes the write, and the engine wait for it where it has to."""
        self._pending = PendingWrite(self.target, lambda snapshot: self.finish(ranks, snapshot), ranks)
        self._pending.stand_by()
        if self._options.lazy:
            self._adapter.before_change(self._pending.wait_until_taken)

    def start(self) -> None:
        """Has the thread begin that finishes the write; on every rank, once all have one. Raises nothing."""
        assert self._pending is not None
        self._pending.start()

    def copy(self, ranks: Ranks) -> None:
        """Waits until the thread has copied what may change at any time. An interrupt after that ends nothing."""
        assert self._pending is not None
        self._pending.wait_until_copied(ranks)

    def after(self) -> str | PendingWrite:
        """Leaves the engine as its own way to save does; returns what the caller gets. Collective; no rank comes here
        unless all do."""
        self._adapter.after_write()
        return self._pending or self.target

    def give_up(self) -> None:
        """After a failure: removes what this write has made, unless it is committed. Where the thread that finishes it
        has been started, that does so itself if it fails, and is only told. As often as one likes."""
        if self._pending is None or self._pending.cancel():
            self._remove()

    def _remove(self) -> None:
        if self._begun:
            self._begun = False
            if names.data_dir(self._save_id) in leftovers(self._store):
                self._store.remove(names.data_dir(self._save_id))
            self._lock.release()
            self._store.remove_if_empty("")


class _Facts(NamedTuple):
    """What a rank tells the others before they plan."""

    arguments: Mapping[str, object]
    """Those that have to be the same on every rank."""
    scalars: bytes
    """The digest of what the optimizer keeps once for all ranks."""
    client_state: bytes | None
    machine: str
    buffers: Mapping[str, bytes]
    """Of rank 0: the digests of its buffers."""
    save_id: str
    """Of rank 0."""


def _differing(scalars: Sequence[Mapping[str, str]]) -> StateError:
    """An optimizer's scalars, which are kept once, differ from rank to rank, as do those that are computed from a
    rank's own part of the weights."""
    first = scalars[0]
    differs, other = next((rank, one) for rank, one in enumerate(scalars) if one != first)
    path = next(path for path in {**first, **other} if first.get(path) != other.get(path))
    return StateError(
        f"{path} is {first.get(path)} on rank 0, {other.get(path)} on rank {differs}", key=path,
        hint="zckpt keeps one value for all ranks: have the optimizer compute it over all of them",
    )  # fmt: skip


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """What a tree holds, by path, to be compared and shown."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    elif isinstance(value, torch.Tensor):
        _check_has_values(value, path)
        exact = value.item() if value.numel() == 1 else digest(host_bytes(value.detach().cpu().contiguous())).hex()
        yield path, f"{exact} ({value.dtype})"
    else:
        yield path, repr(value)


def _pack_tree(value: object, path: str, fragments: list[Fragment], rank: int) -> bytes:
    """The packed tree; what it holds of tensors and arrays is added to ``fragments``. In the caller's client_state,
    some values are kept as ``plain`` ones; what an engine keeps has to come back as it is."""
    client_state = f"{path}.{names.CLIENT_STATE}" if path else names.CLIENT_STATE

    def put(where: str, leaf: object) -> tuple[int, str] | tree.Plain | None:
        name = f"tree/{rank}/{len(fragments)}"
        # By exact type: a subclass, such as a masked array, holds more than its elements
        if type(leaf) is np.ndarray and leaf.dtype in _NUMPY_DTYPES:
            fragments.append(_state_fragment(name, torch.from_numpy(np.array(leaf))))
            return tree.NDARRAY, name
        if isinstance(leaf, torch.Tensor) and _is_plain(leaf):
            _check_has_values(leaf, where)
            synchronize(check_devices([leaf]))
            fragments.append(_state_fragment(name, leaf.detach().resolve_conj().resolve_neg().contiguous()))
            return tree.TENSOR, name
        return _plain(leaf) if where.startswith(client_state) else None

    return tree.pack(value, path, put)


def _plain(leaf: object) -> tree.Plain | None:
    value = plain(leaf)
    return None if value is None else tree.Plain(value)


def _fingerprint(path: str, leaf: object) -> tuple[int, str] | tree.Plain | None:
    """As ``put`` in ``_pack_tree``, with a digest in the place of the name of what is stored."""
    stored: list[Fragment] = []
    if not isinstance(leaf, (np.ndarray, torch.Tensor)):
        return _plain(leaf)
    _pack_tree(leaf, path, stored, 0)
    if not stored:
        return None
    (one,) = stored
    assert isinstance(one.data, torch.Tensor)
    return tree.TENSOR, f"{type(leaf).__name__} {one.dtype} {one.shape} {digest(host_bytes(one.data.cpu())).hex()}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and elements are all that there is to it."""
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return usual and tensor.dtype in DTYPE_NAMES


def _check_has_values(tensor: torch.Tensor, path: str) -> None:
    if tensor.is_meta:
        raise StateError(
            f"{path} is on the device meta, which keeps no values", key=path,
            hint="give it memory (torch.empty_like(tensor, device=...)) and values before the write, or leave it out",
        )  # fmt: skip


def _tensors(fragments: Iterable[Fragment]) -> Iterator[torch.Tensor]:
    """The data of those that are in memory."""
    return (fragment.data for fragment in fragments if isinstance(fragment.data, torch.Tensor))


def _state_fragment(name: str, tensor: torch.Tensor) -> Fragment:
    shape = tuple(tensor.shape)
    return Fragment(STATE, name, shape, DTYPE_NAMES[tensor.dtype], 0, tensor.numel(), "host", 0, tensor.reshape(-1))


def _digests(fragments: Iterable[Fragment]) -> dict[str, bytes]:
    """Of the buffers, by key."""
    buffers = [(f.key, f.data) for f in fragments if f.part == BUFFER]
    return {key: digest(host_bytes(data.cpu())) for key, data in buffers if isinstance(data, torch.Tensor)}


def write_fragments(
    path: StrPath,
    ranks: Sequence[Sequence[Fragment]],
    about: catalog.About,
    save_id: str | None = None,
    *,
    overwrite: bool = False,
    latest: bool = False,
) -> str:
    """A checkpoint of what all ranks hold, written by this process alone and without a lock; returns its save id. For
    examples and tests."""
    save_id = save_id or secrets.token_hex(8)
    size, block_bytes = len(ranks), about.block_bytes
    plans = [plan_shards(own, save_id, rank, size, block_bytes=block_bytes) for rank, own in enumerate(ranks)]
    manifest, index = catalog.catalog([catalog.receipt(rank, own) for rank, own in enumerate(plans)], save_id, about)
    target = open_store(path)
    replaced = begin_write(target, save_id, overwrite=overwrite)
    digests = [write_rank(target, save_id, own, rank, block_bytes=block_bytes) for rank, own in enumerate(plans)]
    manifest = catalog.with_digests(manifest, digests)
    latest_in = target.parent if latest else None
    commit_write(target, save_id, manifest, index, replaced=replaced, latest_in=latest_in)
    return save_id


def begin_write(
    store: Store, save_id: str, *, overwrite: bool = False, replace_foreign: bool = False, dead: Collection[str] = ()
) -> list[str]:
    """Makes the directory that the new data goes to, beside that of an older checkpoint. What writers that died have
    left there goes first, for the space that it takes. The caller holds the checkpoint's lock; ``dead`` are the save
    ids of those from whom it has taken the lock over.

    Returns the names of what is there now and is to go after the commit: that of the older checkpoint, and files of
    DeepSpeed's own. Raises CheckpointExistsError for what may not be replaced.
    """
    foreign = deepspeed_files(store.entries() or ())
    if foreign and not replace_foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise CheckpointExistsError(
            f"there is a checkpoint in DeepSpeed's own format here ({shown}): DeepSpeed would go on loading that one",
            file=str(store.location),
            hint="write elsewhere, remove these files, or have them replaced: write(..., overwrite=True), "
            "attach(engine, replace_deepspeed=True), zckpt run --replace-deepspeed",
        )
    if store.exists(names.MANIFEST) and not overwrite:
        raise CheckpointExistsError(
            "there is already a checkpoint here", file=str(store.location),
            hint="write elsewhere, or pass overwrite=True",
        )  # fmt: skip
    clear_for_write(store, overwrite=overwrite, dead=dead)
    run = store.parent
    for name in run_leftovers(run):
        run.remove(name)
    for dead_save in dead:
        prepared = names.temporary(names.LATEST, names.prepared_digits(dead_save))
        if names.is_temporary(prepared, names.LATEST):  # the save id comes from a file that anybody may have made
            run.remove(prepared)
    replaced = [name for name in store.entries() or () if names.is_data_dir(name)]
    store.make_directories(names.data_dir(save_id))
    return [*replaced, *foreign]


def write_rank(
    store: Store,
    save_id: str,
    shards: Sequence[ShardPlan],
    rank: int,
    budget: Budget | None = None,
    progress: Progress | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    snapshot: Snapshot | None = None,
    snapshot_bytes: int = 0,
    later: Collection[str] = (),
) -> bytes:
    """One rank's files of a write that rank 0 has begun, durable. Parts in ``later`` may change only once ``snapshot``
    has been told that all has been read; copies of up to ``snapshot_bytes``, or of the budget if that is more, are not
    on disk yet then. Returns the digest of the rank's digest table. Raises StorageError, RankError, and ZckptError
    where the write is given up.
    """
    if not store.exists(names.data_dir(save_id)):
        raise RankError(
            "rank 0 has made a directory that this rank does not see",
            file=str(store.location.child(names.data_dir(save_id))), rank=rank,
            hint="write to a file system that all ranks share",
        )  # fmt: skip
    store.make_directories(names.rank_dir(save_id, rank))
    # Tensors that were not contiguous were copied while the write was planned, on another thread's stream.
    devices = devices_of(_tensors(fragment for shard in shards for fragment in shard.fragments))
    synchronize(devices)
    budget = budget or Budget.from_environment()
    staging = pool_for(devices, budget, block_bytes, snapshot_bytes)
    buffers = staging.buffers or max(snapshot_bytes // staging.nbytes, budget.threads)
    plan = plan_writes(shards, later, batch_bytes=staging.batch_bytes, block_bytes=block_bytes)
    with reported(progress, "write", plan.tensor_bytes) as advance:
        table = run_writes(store, plan, budget, staging, buffers, snapshot or Snapshot(), advance)
    store.put(names.digests_path(save_id, rank), table)
    store.sync_names(names.rank_dir(save_id, rank))
    return digest(table)


def commit_write(
    store: Store,
    save_id: str,
    manifest: bytes,
    index: bytes,
    *,
    replaced: Iterable[str] = (),
    latest_in: Store | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """On rank 0, when every rank's files are durable: the index, then the manifest, then the file ``latest`` in the
    directory ``latest_in``, if one is given. At last ``replaced`` is removed, what was there when the write began.

    Both files are written under temporary names first, so that a full disk shows before the commit. ``confirm`` raises
    if this write has lost the right to commit. Whoever has taken that right over has removed the temporary manifest, or
    reads the committed one before it removes anything.
    """
    written = manifest_format.decode(manifest)
    with closing(store.reader()) as reader:
        for file in written.files:
            path = written.path(file)
            size = reader.size(path)
            if size != file.nbytes:
                raise RankError(f"rank {file.rank} wrote {file.nbytes} bytes, rank 0 sees {size}", file=path)
    store.put(names.index_path(save_id), index)
    store.sync_names(names.data_dir(save_id))
    with ExitStack() as temporary:

        def prepare(where: Store, path: str, data: bytes, digits: str = "") -> str:
            prepared = where.prepare(path, data, digits)
            temporary.callback(where.remove, prepared)  # after its commit there is nothing left to remove
            return prepared

        prepared = prepare(store, names.MANIFEST, manifest, names.prepared_digits(save_id))
        if latest_in is not None:
            named = names.encode_latest(latest_name(store.location, latest_in.location))
            prepared_latest = prepare(latest_in, names.LATEST, named, names.prepared_digits(save_id))
        confirm()
        try:
            store.commit(names.MANIFEST, prepared)
        except BaseException:
            confirm()  # the reason why it is gone
            raise
        confirm()  # whoever has taken over since may need what this write would remove
        if latest_in is not None:
            try:
                latest_in.commit(names.LATEST, prepared_latest)
            except StorageError as error:
                error.hint = f"{store.location} is committed and whole; the file `latest` does not name it yet"
                raise
    for name in replaced:
        store.remove(name)
