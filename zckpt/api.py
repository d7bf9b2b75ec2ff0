"""The pipelines: write, open, restore, validate. Each reads top to bottom; the work is done by the layers below."""

from __future__ import annotations

import os
import platform
import secrets
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import msgpack
import numpy as np
import torch

from zckpt.background import PendingWrite, start_write, wait
from zckpt.checkpoint import Checkpoint, Want
from zckpt.engines import adapt
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    RankError,
    StorageError,
    UnfinishedWriteError,
    ZckptError,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names, tree
from zckpt.format.digest import digest
from zckpt.format.limits import LATEST_BYTES_MAX, MANIFEST_BYTES_MAX
from zckpt.format.rules import broken
from zckpt.io import commit
from zckpt.io.budget import Budget
from zckpt.io.local import LocalReader
from zckpt.io.memory import available_bytes, host_bytes, wait_for_caller
from zckpt.io.ranks import Ranks
from zckpt.io.write import cuda_device_of, write_shards
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.plan.reshard import Span
from zckpt.progress import Progress, reported
from zckpt.state.inventory import BUFFER, PARAM, STATE, Fragment
from zckpt.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from zckpt.validation import Finding, Report, check_checkpoint
from zckpt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from zckpt.engines.base import EngineAdapter

BLOCK_BYTES = 1 << 20
_NUMPY_DTYPES = frozenset(map(np.dtype, ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]))
StrPath = str | os.PathLike[str]


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
    None: ``Budget.from_environment()``. ``progress``: such as ``zckpt.ProgressBar()``.

    ``background``: return a PendingWrite as soon as training may go on; the checkpoint is of the state at this call.
    With ``snapshot="copy"`` that is once the state has been copied. With "lazy" it is at once: the state is read while
    the next forward and backward passes run, and the next optimizer step waits until that is done; change it in no
    other way before. ``snapshot_bytes`` bounds the memory for copies on this rank: where the state is larger, the rest
    is on disk before training goes on. None: half of what is available, shared by the ranks of a machine. One write is
    under way at a time: the next write or restore and the end of the process wait for it and show its error.

    Returns the checkpoint's absolute path. Raises on every rank, and leaves nothing behind, if any rank fails:
    UnsupportedError, StateError, CheckpointExistsError, RankError, StorageError, NoSpaceError.
    """
    if snapshot not in ("copy", "lazy"):
        raise ValueError(f"snapshot must be 'copy' or 'lazy', got {snapshot!r}")
    wait()
    ranks = Ranks()
    adapter, fragments, about = ranks.together(
        lambda: _take(engine, ranks, parts, exclude, client_state), "prepare the write"
    )
    fragments = _without_equal_copies(fragments, ranks)
    target = os.path.abspath(path if path is not None else os.path.join("checkpoints", f"global_step{adapter.step}"))
    ranks.agree(target, "paths")
    if latest:
        names.encode_latest(os.path.basename(target))  # refused now, not after the commit
    save_id = ranks.first(lambda: begin_write(target, overwrite), "begin the write").decode()
    wait_for_caller(cuda_device_of(fragments))
    if snapshot == "lazy" and background:
        fragments = [_detached(fragment) for fragment in fragments]
    write_own = partial(write_rank, target, save_id, fragments, ranks.rank, ranks.size, budget, progress)
    finish = partial(_finish_write, target, save_id, about, latest)
    if not background:
        finish(ranks, write_own)
        return target
    if snapshot_bytes is None:
        here = socket.gethostname().encode()
        snapshot_bytes = available_bytes() // 2 // ranks.gather(here).count(here)
    write_own = partial(write_own, snapshot_bytes=snapshot_bytes)
    others = Ranks(background=True)
    pending = start_write(target, lambda taken: finish(others, partial(write_own, taken=taken)))
    if snapshot == "lazy":
        adapter.before_change(pending.wait_until_taken)
    else:
        pending.wait_until_taken()
    return pending


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
    ranks: Ranks,
    write_own: Callable[[], catalog.Receipt],
) -> None:
    """Every rank's files, then the commit; or, after a failure on any of them, none of it. Collective."""
    committed = False
    try:
        receipts = ranks.gather(catalog.pack(ranks.together(write_own, "write")))
        ranks.first(lambda: commit_write(target, save_id, receipts, about, latest=latest), "commit")
        committed = True
    finally:
        if not committed and ranks.rank == 0:
            _discard(target, save_id)


def _take(
    engine: object,
    ranks: Ranks,
    parts: Collection[str] | None,
    exclude: Collection[str],
    client_state: Mapping[str, Any] | None,
) -> tuple[EngineAdapter, list[Fragment], catalog.About]:
    """What this rank writes, and what rank 0 writes about it."""
    adapter = adapt(engine)
    adapter.refuse_unsupported()
    inventory = adapter.inventory(parts)
    fragments = [fragment for fragment in inventory.fragments if fragment.part not in exclude]
    for fragment in fragments:  # a part's name is a file's name
        names.check_part_name(fragment.part)
        names.check_tensor_name(fragment.name)
    packed = b""
    if ranks.rank == 0:
        packed = _pack_tree({"engine": adapter.state(), "client_state": dict(client_state or {})}, "", fragments, 0)
    rank_tree = _pack_tree(adapter.rank_state(), f"rank_state[{ranks.rank}]", fragments, ranks.rank)
    fragments.append(_state_fragment(f"rank/{ranks.rank}", torch.frombuffer(bytearray(rank_tree), dtype=torch.uint8)))
    writer = {
        "zckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **adapter.description,
    }
    return adapter, fragments, catalog.About(adapter.step, BLOCK_BYTES, inventory.aliases, packed, writer)


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


def begin_write(target: str, overwrite: bool) -> bytes:
    """Makes the directory that the new data goes to, beside that of an older checkpoint, and returns the save id."""
    if os.path.lexists(os.path.join(target, names.MANIFEST)) and not overwrite:
        raise CheckpointExistsError(
            "there is already a checkpoint here", file=target, hint="write elsewhere, or pass overwrite=True"
        )
    save_id = secrets.token_hex(8)
    commit.make_directories(os.path.join(target, names.data_dir(save_id)))
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
    data = os.path.join(target, names.data_dir(save_id))
    if not os.path.isdir(data):
        raise RankError(
            "rank 0 has made a directory that this rank does not see", file=data, rank=rank,
            hint="write to a file system that all ranks share",
        )  # fmt: skip
    own = os.path.join(target, names.rank_dir(save_id, rank))
    commit.make_directories(own)
    plans = plan_shards(fragments, save_id, rank, world_size, block_bytes=block_bytes)
    nbytes = sum(piece.nbytes for plan in plans for piece in plan.pieces)
    with reported(progress, "write", nbytes) as advance:
        table = write_shards(
            target, plans, budget or Budget.from_environment(), block_bytes,
            snapshot_bytes=snapshot_bytes, taken=taken, advance=advance,
        )  # fmt: skip
    commit.write_file(os.path.join(target, names.digests_path(save_id, rank)), table)
    commit.fsync_directory(own)
    return catalog.receipt(rank, digest(table), plans)


def commit_write(target: str, save_id: str, receipts: Sequence[bytes], about: catalog.About, *, latest: bool) -> bytes:
    """On rank 0, when every rank's files are durable: the index, then the manifest, then ``latest``."""
    manifest, index = catalog.catalog([catalog.unpack(receipt) for receipt in receipts], save_id, about)
    reader = LocalReader(target)
    written = manifest_format.decode(manifest)
    for file in written.files:
        size = reader.size(written.path(file))
        if size != file.nbytes:
            raise RankError(f"rank {file.rank} wrote {file.nbytes} bytes, rank 0 sees {size}", file=written.path(file))
    commit.write_file(os.path.join(target, names.index_path(save_id)), index)
    commit.fsync_directory(os.path.join(target, names.data_dir(save_id)))
    replaced = _replaced_save(target)
    commit.replace_file(os.path.join(target, names.MANIFEST), manifest)
    if latest:
        parent, name = os.path.split(target)
        commit.replace_file(os.path.join(parent, names.LATEST), names.encode_latest(name))
    if replaced is not None:
        commit.remove_tree(os.path.join(target, names.data_dir(replaced)))
    return b""


def _replaced_save(target: str) -> str | None:
    """The save id of the manifest that is about to be replaced; None if there is none or it cannot be read."""
    try:
        return _open(target).manifest.save_id
    except ZckptError:
        return None


def _discard(target: str, save_id: str) -> None:
    """After a failure: removes what this write has made, unless a manifest names it, or may do so."""
    try:
        if _open(target).manifest.save_id == save_id:
            return
    except CheckpointNotFoundError:
        pass
    except ZckptError:
        return
    commit.remove_tree(os.path.join(target, names.data_dir(save_id)))
    commit.remove_empty_directory(target)


def open(path: StrPath, *, budget: Budget | None = None) -> Checkpoint:  # noqa: A001  reads like the builtin on purpose
    """Opens the checkpoint at ``path``, or, in the directory of a run, the one that ``latest`` names.

    ``budget``: memory, threads and kind of I/O of all reads; None: ``Budget.from_environment()``.

    Reads the manifest and nothing else. Needs neither the framework that wrote it nor torch.distributed. Raises
    CheckpointNotFoundError, UnfinishedWriteError, VersionError, FeatureError, FormatError, StorageError.
    """
    return _open(_find(os.fspath(path)), budget)


def _open(path: str, budget: Budget | None = None) -> Checkpoint:
    reader = LocalReader(path)
    if not os.path.lexists(os.path.join(path, names.MANIFEST)):
        raise CheckpointNotFoundError("there is no manifest", file=path)
    raw = reader.read(names.MANIFEST, 0, min(reader.size(names.MANIFEST), MANIFEST_BYTES_MAX + 1))
    try:
        return Checkpoint(path, manifest_format.decode(raw), reader, budget)
    except FormatError as error:
        error.file = os.path.join(path, names.MANIFEST)
        raise


def _find(path: str) -> str:
    """The checkpoint's directory. Raises CheckpointNotFoundError, UnfinishedWriteError, FormatError (L001)."""
    if os.path.lexists(os.path.join(path, names.MANIFEST)):
        return path
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise CheckpointNotFoundError(f"the path {what}", file=path, hint="give the directory of a checkpoint or run")
    if os.path.lexists(os.path.join(path, names.LATEST)):
        raw = LocalReader(path).read(names.LATEST, 0, LATEST_BYTES_MAX + 1)
        found = os.path.join(path, names.decode_latest(raw, os.path.join(path, names.LATEST)))
        if os.path.lexists(os.path.join(found, names.MANIFEST)):
            return found
        raise CheckpointNotFoundError("`latest` names a checkpoint that is not there", file=found, rule="L001")
    entries = os.listdir(path)
    if any(names.is_data_dir(entry) for entry in entries):
        raise UnfinishedWriteError(
            "a write was begun here and never committed",
            file=path,
            hint="open an older checkpoint; this one is not whole",
        )
    hint = "give the directory of a checkpoint or run"
    if any(entry.endswith("_states.pt") for entry in entries):
        hint = "this looks like a checkpoint in DeepSpeed's own format"
    raise CheckpointNotFoundError("there is no manifest", file=path, hint=hint)


def restore(
    engine: object,
    path: StrPath,
    *,
    parts: Collection[str] | None = None,
    strict: bool = True,
    state: Collection[str] | None = None,
    rng: bool = False,
    verify: bool | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint straight into the memory of a live engine, of any world size, stage and offload. Every rank
    calls it. Returns the ``client_state``.

    ``parts``: only these, such as ``["master"]`` for a warm start; None: all that the engine has. Weights in the dtype
    that the model computes with are derived from restored masters. ``strict=False``: leaves out what is missing,
    unexpected or of another shape, and the engine keeps its own. ``state``: which trees of non-tensor state
    ("counters", "optimizer", "scaler", "scheduler"); None: all, or none where ``parts`` is given. ``rng``: also restore
    the random number generators of every rank, which needs the world size of the writer. ``verify``: compare every
    block with its digest; None: yes, unless the environment has ZCKPT_VERIFY=0. ``budget``: as for ``open``.
    ``progress``: such as ``zckpt.ProgressBar()``.

    Everything that can be known without reading tensors is checked before the engine is touched. Raises MismatchError,
    which lists every difference, ValueError for a part or tree that does not exist, and what ``zckpt.open`` and
    ``Checkpoint.load`` raise, on every rank.
    """
    wait()
    ranks = Ranks()
    ranks.agree(os.path.abspath(path), "paths")
    plan = ranks.together(
        lambda: _plan_restore(engine, path, ranks, parts, strict, state, rng, budget), "prepare the restore"
    )
    ranks.agree(plan.checkpoint.manifest.save_id, "checkpoints")
    own = ranks.rank if plan.checkpoint.world_size == ranks.size else None
    ranks.together(lambda: _fill(plan.adapter, plan.checkpoint, plan.wanted, own, verify, progress), "restore")
    ranks.together(lambda: plan.adapter.finish_restore(plan.state, plan.rank_state), "restore")
    return plan.client_state


@dataclass(frozen=True, slots=True)
class _RestorePlan:
    """What one rank restores, all of it checked."""

    adapter: EngineAdapter
    checkpoint: Checkpoint
    wanted: tuple[Fragment, ...]
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any] | None
    client_state: dict[str, Any]


def _plan_restore(
    engine: object,
    path: StrPath,
    ranks: Ranks,
    parts: Collection[str] | None,
    strict: bool,
    trees: Collection[str] | None,
    rng: bool,
    budget: Budget | None,
) -> _RestorePlan:
    adapter = adapt(engine)
    adapter.refuse_unsupported()
    checkpoint = open(path, budget=budget)
    stored = {part: {info.name for info in checkpoint.values() if info.part == part} for part in checkpoint.parts}
    if trees is None:
        trees = adapter.trees if parts is None else ()
    unknown = [*(set(parts or ()) - set(stored)), *(set(trees) - set(adapter.trees))]
    if unknown:
        known = ", ".join([*stored, *adapter.trees])
        raise ValueError(f"the checkpoint has no {', '.join(unknown)}; parts and trees are {known}")
    if parts is not None:
        stored = {part: stored[part] for part in parts}
    wanted = adapter.wanted(stored)
    if parts is not None:
        wanted = tuple(fragment for fragment in wanted if fragment.part in parts)
    differences = _differences(checkpoint, wanted)
    problems = list(differences.values())
    problems += [f"unexpected: {key}, the engine has no place for it" for key in adapter.unexpected(stored)]
    if not strict:
        wanted = tuple(fragment for fragment in wanted if fragment.key not in differences)
        problems = []
    engine_state, client_state = _root(checkpoint)
    chosen = {name: engine_state.get(name) for name in trees}
    problems += adapter.check_state(chosen, wanted)
    if rng and checkpoint.world_size != ranks.size:
        problems.append(
            f"rng=True needs {checkpoint.world_size} ranks, as wrote the checkpoint; these are {ranks.size}"
        )
    if problems:
        raise MismatchError(
            "the checkpoint does not fit the engine; nothing was changed:\n  " + "\n  ".join(problems),
            file=checkpoint.path,
            rank=ranks.rank,
        )
    checkpoint.check_sizes(checkpoint[key] for key in {fragment.key for fragment in wanted})
    rank_state = checkpoint.rank_state(ranks.rank) if rng else None
    return _RestorePlan(adapter, checkpoint, wanted, chosen, rank_state, client_state)


def _root(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The two branches of the root tree. Raises FormatError (T001) where it is not such a tree."""
    root = checkpoint.state if isinstance(checkpoint.state, dict) else {}
    engine, client_state = root.get("engine"), root.get("client_state")
    if not (isinstance(engine, dict) and isinstance(client_state, dict)):
        raise broken("T001", "the tree of state has no engine and client_state", file=checkpoint.path)
    return engine, client_state


def _differences(checkpoint: Checkpoint, wanted: Sequence[Fragment]) -> dict[str, str]:
    """What is missing or of another shape or dtype, a line each, by key. Weights and buffers in the dtype that a model
    computes with may be converted; what the optimizer updates may not."""
    found = {}
    for key, fragment in {fragment.key: fragment for fragment in wanted}.items():
        dtype = TORCH_DTYPES[fragment.dtype]
        if key not in checkpoint:
            found[key] = f"missing: {key} {list(fragment.shape)}"
            continue
        info = checkpoint[key]
        converts = fragment.part in (PARAM, BUFFER) and dtype.is_floating_point and info.dtype.is_floating_point
        if info.shape != fragment.shape or not (converts or info.dtype == dtype):
            found[key] = (
                f"differs: {key} is {info.dtype} {list(info.shape)}, the engine has {dtype} {list(fragment.shape)}"
            )
    return found


def _fill(
    adapter: EngineAdapter,
    checkpoint: Checkpoint,
    wanted: tuple[Fragment, ...],
    rank: int | None,
    verify: bool | None,
    progress: Progress | None,
) -> None:
    def want(fragment: Fragment) -> Want:
        assert isinstance(fragment.data, torch.Tensor), "fill supplies the memory"
        info = checkpoint[fragment.key]
        return Want(info, [Span(fragment.start, fragment.stop, 0)], fragment.data)

    nbytes = sum((f.stop - f.start) * checkpoint[f.key].dtype.itemsize for f in wanted)
    try:
        with reported(progress, "restore", nbytes) as advance, closing(adapter.fill(wanted)) as batches:
            for fragments in batches:
                wants = [want(fragment) for fragment in fragments]
                checkpoint.read(wants, rank=rank, verify=verify, advance=advance)
    except (FormatError, StorageError) as error:
        error.hint = "the engine is restored in part: restore it from a whole checkpoint before you train on"
        raise


def validate(path: StrPath, *, data: bool = True, progress: Progress | None = None) -> Report:
    """Checks a checkpoint against the specification. ``data``: read every byte and compare it with its digest; without,
    only names, sizes, headers and the index are checked. ``progress``: such as ``zckpt.ProgressBar()``.

    Never raises for what is wrong with the checkpoint: that is in the report, one finding per broken rule and place.
    Raises CheckpointNotFoundError if there is nothing to check, and StorageError.
    """
    try:
        checkpoint = open(path)
    except FormatError as error:
        return Report(os.fspath(path), [Finding.of(error)], files=1)
    return check_checkpoint(checkpoint, data=data, progress=progress)
