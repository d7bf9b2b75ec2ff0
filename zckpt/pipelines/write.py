"""From a live engine to a checkpoint: what each rank holds, its files, the commit, now or in the background."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import msgpack
import numpy as np
import torch

from zckpt.background import PendingWrite, finish_current, start_write
from zckpt.engines import adapt
from zckpt.errors import (
    CheckpointExistsError,
    RankError,
    StateError,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names, tree
from zckpt.format.digest import digest
from zckpt.io.available import available_bytes, boot_id
from zckpt.io.budget import Budget
from zckpt.io.lock import WriteLock
from zckpt.io.memory import host_bytes, wait_for_caller
from zckpt.io.ranks import Ranks
from zckpt.io.store import open_store
from zckpt.io.write import cuda_device_of, write_shards
from zckpt.pipelines.gc import leftovers, remove_leftovers
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.progress import Progress, reported
from zckpt.state.inventory import BUFFER, STATE, Fragment
from zckpt.torch_dtypes import DTYPE_NAMES
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from zckpt.engines.base import EngineAdapter
    from zckpt.pipelines.open import StrPath


BLOCK_BYTES = 1 << 20
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
    as the ``param`` of frozen weights. ``client_state``: the caller's own plain values, tensors and arrays, taken from
    rank 0. ``overwrite``: replace the checkpoint at ``path``, which stays whole until the new one is committed.
    ``latest``: have the file ``latest`` beside the checkpoint name it. ``budget``: memory, threads and kind of I/O;
    None: ``Budget.from_environment()``. ``progress``: such as ``zckpt.ProgressBar()``. ``pending_gradients``: what is
    done where gradients wait for an optimizer step, which no checkpoint holds: "refuse" the write, or "drop" them.

    ``background``: return a PendingWrite as soon as training may go on; the checkpoint is of the state at this call.
    With ``snapshot="copy"`` that is once the state has been copied. With "lazy" it is at once: the state is read while
    the next forward and backward passes run, and the next optimizer step waits until that is done; change it in no
    other way before. ``snapshot_bytes`` bounds the memory for copies on this rank: where the state is larger, the rest
    is on disk before training goes on. None: half of what is available, shared by the ranks of a machine. One write is
    under way at a time: the next write or restore and the end of the process wait for it and show its error.

    Returns the checkpoint's absolute path. Raises on every rank, and leaves nothing behind, if any rank fails:
    UnsupportedError, StateError, CheckpointExistsError, LockedError (somebody else is writing there), RankError,
    StorageError, NoSpaceError.
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
    if snapshot not in ("copy", "lazy"):
        raise ValueError(f"snapshot must be 'copy' or 'lazy', got {snapshot!r}")
    if pending_gradients not in ("refuse", "drop"):
        raise ValueError(f"pending_gradients must be 'refuse' or 'drop', got {pending_gradients!r}")
    wait()
    ranks = Ranks()
    others = Ranks(background=True) if background else ranks
    adapter, fragments, about, optimizer = ranks.together(
        lambda: _take(engine, ranks, parts, exclude, client_state), "prepare the write"
    )
    _refuse_differing(optimizer, ranks)
    fragments = _without_equal_copies(fragments, ranks)
    target = os.path.abspath(path if path is not None else os.path.join("checkpoints", f"global_step{adapter.step}"))
    ranks.agree(target, "paths")
    latest_in = os.path.dirname(target) if run is None else os.path.abspath(run)
    if latest:
        names.encode_latest(os.path.relpath(target, latest_in))  # refused now, not after the commit
    if background and snapshot_bytes is None:
        here = boot_id().encode()
        snapshot_bytes = available_bytes() // 2 // ranks.gather(here).count(here)
    if background and snapshot == "lazy":
        fragments = [_detached(fragment) for fragment in fragments]
    wait_for_caller(cuda_device_of(fragments))
    lock = WriteLock(open_store(target))
    try:
        save_id = ranks.first(lambda: _begin_locked(lock, target, overwrite), "begin the write").decode()
    except BaseException:
        lock.release()
        raise
    write_own = partial(write_rank, target, save_id, fragments, ranks.rank, ranks.size, budget, progress)
    finish = partial(_finish_write, target, save_id, about, latest, latest_in, lock)
    if not background:
        finish(ranks, write_own)
        return target
    write_own = partial(write_own, snapshot_bytes=snapshot_bytes)
    pending = start_write(target, lambda taken: finish(others, partial(write_own, taken=taken)))
    if snapshot == "lazy":
        adapter.before_change(pending.wait_until_taken)
    else:
        pending.wait_until_taken()
    return pending


def wait() -> None:
    """Until no write is under way in the background. Every rank calls it. Raises its error on every rank, unless
    ``PendingWrite.wait`` has done so on all of them."""
    Ranks().together(finish_current, "finish a write in the background")


def _detached(fragment: Fragment) -> Fragment:
    """With data of its own where something else than the optimizer's step may change it."""
    if fragment.part in (BUFFER, STATE) and isinstance(fragment.data, torch.Tensor):
        return replace(fragment, data=fragment.data.clone())
    return fragment


def _finish_write(
    target: str,
    save_id: str,
    about: catalog.About,
    latest: bool,
    latest_in: str,
    lock: WriteLock,
    ranks: Ranks,
    write_own: Callable[[], catalog.Receipt],
) -> None:
    """Every rank's files, then the commit; or, after a failure on any of them, none of it. Collective."""
    committed = False
    try:
        receipts = ranks.gather(catalog.pack(ranks.together(write_own, "write")))
        commit = partial(
            commit_write, target, save_id, receipts, about, latest=latest, latest_in=latest_in, confirm=lock.confirm
        )
        ranks.first(commit, "commit")
        committed = True
    finally:
        if not committed and ranks.rank == 0 and names.data_dir(save_id) in leftovers(target):
            open_store(target).remove(names.data_dir(save_id))
        lock.release()
        if not committed and ranks.rank == 0:
            open_store(target).remove_if_empty("")


def _take(
    engine: object,
    ranks: Ranks,
    parts: Collection[str] | None,
    exclude: Collection[str],
    client_state: Mapping[str, Any] | None,
) -> tuple[EngineAdapter, list[Fragment], catalog.About, object]:
    """What this rank writes, what rank 0 writes about it, and of that what the optimizer says."""
    adapter = adapt(engine)
    adapter.refuse_unsupported()
    inventory = adapter.inventory(parts)
    fragments = [fragment for fragment in inventory.fragments if fragment.part not in exclude]
    for fragment in fragments:  # a part's name is a file's name
        names.check_part_name(fragment.part)
        names.check_tensor_name(fragment.name)
    packed = b""
    state = adapter.state()
    if ranks.rank == 0:
        packed = _pack_tree({"engine": state, "client_state": dict(client_state or {})}, "", fragments, 0)
    rank_tree = _pack_tree(adapter.rank_state(), f"rank_state[{ranks.rank}]", fragments, ranks.rank)
    fragments.append(_state_fragment(f"rank/{ranks.rank}", torch.frombuffer(bytearray(rank_tree), dtype=torch.uint8)))
    writer = {
        "zckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **adapter.description,
    }
    about = catalog.About(adapter.step, BLOCK_BYTES, inventory.aliases, packed, writer)
    return adapter, fragments, about, state.get("optimizer")


def _refuse_differing(optimizer: object, ranks: Ranks) -> None:
    """Raises StateError, on every rank, if an optimizer's scalars, which are kept once, differ from rank to rank, as do
    those that are computed from a rank's own part of the weights. Collective."""
    mine = dict(_leaves(optimizer, "optimizer"))
    digests = ranks.gather(digest(msgpack.packb(mine)))
    differs = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    if differs is None:
        return
    all_leaves = [msgpack.unpackb(one) for one in ranks.gather(msgpack.packb(mine))]
    first, other = all_leaves[0], all_leaves[differs]
    path = next(path for path in {**first, **other} if first.get(path) != other.get(path))
    raise StateError(
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
        exact = value.item() if value.numel() == 1 else digest(host_bytes(value.detach().cpu().contiguous())).hex()
        yield path, f"{exact} ({value.dtype})"
    else:
        yield path, repr(value)


def _pack_tree(value: object, path: str, fragments: list[Fragment], rank: int) -> bytes:
    """The packed tree; what it holds of tensors and arrays is added to ``fragments``."""

    def put(where: str, leaf: object) -> tuple[int, str] | None:
        name = f"tree/{rank}/{len(fragments)}"
        # By exact type: a subclass, such as a masked array, holds more than its elements
        if type(leaf) is np.ndarray and leaf.dtype in _NUMPY_DTYPES:
            fragments.append(_state_fragment(name, torch.from_numpy(np.array(leaf))))
            return tree.NDARRAY, name
        if isinstance(leaf, torch.Tensor) and _is_plain(leaf):
            fragments.append(_state_fragment(name, leaf.detach().resolve_conj().resolve_neg().contiguous()))
            return tree.TENSOR, name
        return None

    return tree.pack(value, path, put)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and elements are all that there is to it."""
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return usual and tensor.dtype in DTYPE_NAMES and tensor.device.type in ("cpu", "cuda")


def _state_fragment(name: str, tensor: torch.Tensor) -> Fragment:
    shape = tuple(tensor.shape)
    return Fragment(STATE, name, shape, DTYPE_NAMES[tensor.dtype], 0, tensor.numel(), "host", 0, tensor.reshape(-1))


def _without_equal_copies(fragments: list[Fragment], ranks: Ranks) -> list[Fragment]:
    """Leaves out the rank-local values that equal rank 0's: a replicated buffer is stored once. Collective."""
    buffers = [(f.key, f.data) for f in fragments if f.part == BUFFER]
    mine = {key: digest(host_bytes(data.cpu())) for key, data in buffers if isinstance(data, torch.Tensor)}
    first = msgpack.unpackb(ranks.first(lambda: msgpack.packb(mine), "compare buffers"))
    return [f for f in fragments if f.copy == 0 or mine[f.key] != first.get(f.key)]


def _begin_locked(lock: WriteLock, target: str, overwrite: bool) -> bytes:
    lock.acquire()
    try:
        return begin_write(target, overwrite, lock.save_id)
    except BaseException:
        lock.release()
        open_store(target).remove_if_empty("")
        raise


def begin_write(target: str, overwrite: bool, save_id: str | None = None) -> bytes:
    """Makes the directory that the new data goes to, beside that of an older checkpoint, and returns the save id. What
    writers that died have left there goes first, for the space that it takes. The caller holds the checkpoint's lock.
    """
    store = open_store(target)
    if store.exists(names.MANIFEST) and not overwrite:
        raise CheckpointExistsError(
            "there is already a checkpoint here", file=target, hint="write elsewhere, or pass overwrite=True"
        )
    remove_leftovers(target)
    save_id = save_id or secrets.token_hex(8)
    store.make_directories(names.data_dir(save_id))
    return save_id.encode()


def write_rank(
    target: str,
    save_id: str,
    fragments: Sequence[Fragment],
    rank: int,
    world_size: int,
    budget: Budget | None = None,
    progress: Progress | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    snapshot_bytes: int = 0,
    taken: Callable[[], None] = lambda: None,
) -> catalog.Receipt:
    """One rank's files of a write that rank 0 has begun, durable. ``taken`` is called once the state may change.

    Raises StorageError, RankError.
    """
    store = open_store(target)
    if not store.exists(names.data_dir(save_id)):
        raise RankError(
            "rank 0 has made a directory that this rank does not see",
            file=os.path.join(target, names.data_dir(save_id)), rank=rank,
            hint="write to a file system that all ranks share",
        )  # fmt: skip
    store.make_directories(names.rank_dir(save_id, rank))
    plans = plan_shards(fragments, save_id, rank, world_size, block_bytes=block_bytes)
    nbytes = sum(int(plan.pieces.nbytes.sum()) for plan in plans)
    with reported(progress, "write", nbytes) as advance:
        table = write_shards(
            store, plans, budget or Budget.from_environment(), block_bytes,
            snapshot_bytes=snapshot_bytes, taken=taken, advance=advance,
        )  # fmt: skip
    store.put(names.digests_path(save_id, rank), table)
    store.sync_names(names.rank_dir(save_id, rank))
    return catalog.receipt(rank, digest(table), plans)


def commit_write(
    target: str,
    save_id: str,
    receipts: Sequence[bytes],
    about: catalog.About,
    *,
    latest: bool,
    latest_in: str | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> bytes:
    """On rank 0, when every rank's files are durable: the index, then the manifest, then the file ``latest`` in
    the directory ``latest_in``, or beside the checkpoint. ``confirm`` raises if this write has lost the right to do so.
    """
    manifest, index = catalog.catalog([catalog.unpack(receipt) for receipt in receipts], save_id, about)
    store = open_store(target)
    written = manifest_format.decode(manifest)
    with closing(store.reader()) as reader:
        for file in written.files:
            path = written.path(file)
            size = reader.size(path)
            if size != file.nbytes:
                raise RankError(f"rank {file.rank} wrote {file.nbytes} bytes, rank 0 sees {size}", file=path)
    store.put(names.index_path(save_id), index)
    store.sync_names(names.data_dir(save_id))
    confirm()
    store.replace(names.MANIFEST, manifest)
    if latest:
        latest_in = latest_in or os.path.dirname(target)
        open_store(latest_in).replace(names.LATEST, names.encode_latest(os.path.relpath(target, latest_in)))
    remove_leftovers(target)
    return b""
