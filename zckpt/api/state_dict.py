"""Writes a state dict as a checkpoint. ``Checkpoint.load_into`` reads it back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import msgpack

from zckpt.api.background import wait_for
from zckpt.api.write import write_engine
from zckpt.engines.history import history_of
from zckpt.engines.state_dict.flat import PATHS, RANKS, Contents, FlatState
from zckpt.errors import StateError, first_few
from zckpt.format.digest import digest
from zckpt.format.names import CLIENT_STATE
from zckpt.format.tree import below
from zckpt.ranks.collectives import Ranks
from zckpt.state.lineage import run_by_tensors
from zckpt.writing.collect import fingerprint
from zckpt.writing.options import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from zckpt.api.background import PendingWrite
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget

    class _Options(TypedDict, total=False):
        step: int
        process_group: ProcessGroup | None
        overwrite: bool
        latest: bool
        budget: Budget | None
        progress: Progress | None
        keep_last: int | None
        keep_every: int | None
        reuse: StrPath | None
        node_local: bool
        copy_to: StrPath | None
        copy_keep_last: int | None
        copy_keep_every: int | None


@overload
def write_state_dict(
    state_dict: Mapping[Any, Any],
    path: StrPath,
    *,
    background: Literal[False] = False,
    **options: Unpack[_Options],
) -> str: ...
@overload
def write_state_dict(
    state_dict: Mapping[Any, Any],
    path: StrPath,
    *,
    background: Literal[True],
    snapshot_bytes: int | None = None,
    **options: Unpack[_Options],
) -> PendingWrite: ...
def write_state_dict(
    state_dict: Mapping[Any, Any],
    path: StrPath,
    *,
    step: int = 0,
    process_group: ProcessGroup | None = None,
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    reuse: StrPath | None = "latest",
    node_local: bool = False,
    copy_to: StrPath | None = None,
    copy_keep_last: int | None = None,
    copy_keep_every: int | None = None,
    background: bool = False,
    snapshot_bytes: int | None = None,
) -> str | PendingWrite:
    """Writes a state dict as one checkpoint. Every rank has to call this.

    A state dict is a dict of tensors, DTensors, plain values, and dicts and lists of them. The checkpoint is durable
    when this returns, and a failure of any rank leaves nothing of it, as with ``zckpt.write``.
    ``zckpt.open(path).load_into(state_dict)`` reads it into a state dict on any number of ranks and any mesh. Its
    tensors are those of the part ``param``. The name of a tensor is made of the keys around it, such as
    ``model.layers.0.weight``.

    A DTensor is written as it is divided, whatever its placements are, except ``Partial``. Tensors that several ranks
    hold, such as plain tensors, are compared and written once, and each of these ranks writes a share. A plain value
    has to be the same on all ranks that have it. What a rank has of its own therefore needs a name of its own, such as
    ``f"loader.{rank}"``: the other ranks need not have it.

    Args:
        state_dict: the state dict, such as ``{"model": model.state_dict(), "epoch": 3}``. Plain values may have the
            types that ``client_state`` of ``zckpt.write`` may have, such as NumPy arrays, and come back in the same
            plain forms.
        path: the directory of the checkpoint: a path of a file system, or a URL such as ``s3://bucket/run/step100``.
        step: the number of the training step, by which checkpoints are ordered.
        process_group: the ranks that write. None means all ranks of the job.
        overwrite: as for ``zckpt.write``.
        latest: as for ``zckpt.write``.
        budget: as for ``zckpt.write``.
        progress: as for ``zckpt.write``.
        keep_last: as for ``zckpt.write``. State dicts with the same names of leaves count as one run.
        keep_every: as for ``zckpt.write``.
        reuse: as for ``zckpt.write``. "latest" means the checkpoint that the file ``latest`` names.
        node_local: as for ``zckpt.write``.
        copy_to: as for ``zckpt.write``.
        copy_keep_last: as for ``zckpt.write``.
        copy_keep_every: as for ``zckpt.write``.
        background: as for ``zckpt.write``. The tensors may change as soon as this returns.
        snapshot_bytes: as for ``zckpt.write``.

    Returns:
        The absolute path of the checkpoint. With ``background``, a PendingWrite.

    Raises:
        StateError: a value cannot be kept, two leaves have the same name, or a tensor or value differs between ranks.
            The error names it and the ranks.
        UnsupportedError: a tensor cannot be written, such as a sparse or a ``Partial`` one.
        ZckptError: the other errors of ``zckpt.write``.
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not allowed.
    """
    options = WriteOptions(
        step=step, overwrite=overwrite, latest=latest, budget=budget, progress=progress, keep_last=keep_last,
        keep_every=keep_every, reuse=reuse, node_local=node_local, copy_to=copy_to, copy_keep_last=copy_keep_last,
        copy_keep_every=copy_keep_every, background=background, snapshot_bytes=snapshot_bytes,
        replace_foreign=overwrite,
    )  # fmt: skip
    return write_contents(partial(Contents.of, state_dict), path, options, process_group)


def write_contents(
    contents: Callable[[int], Contents],
    path: StrPath,
    options: WriteOptions,
    process_group: ProcessGroup | None = None,
    call: str = "zckpt.write_state_dict",
) -> str | PendingWrite:
    """Does the work of ``write_state_dict``. ``contents`` returns what this rank has. Its argument is the number of
    ranks. ``call``: the function that every rank has to call, for messages."""
    ranks = Ranks(process_group, call=call)
    wait_for(ranks)
    with ranks.undivided():
        state, options = _agreed(contents, options, process_group, ranks)
    return write_engine(state, path, options, call)


def _agreed(
    make: Callable[[int], Contents], options: WriteOptions, group: ProcessGroup | None, ranks: Ranks
) -> tuple[FlatState, WriteOptions]:
    """Compares what the ranks have. Returns what this rank writes, and the options with its plain values. Mostly all
    ranks have the same names and values. Only if not, they tell each other what they have."""
    made: list[tuple[Contents, list[bytes]]] = []

    def prepare() -> list[bytes]:
        contents = make(ranks.size)
        values = {name: [contents.paths[name], _fingerprint(name, value)] for name, value in contents.values.items()}
        tensors = [{name: contents.paths[name] for name in contents.tensors}, contents.aliases()]
        made.append((contents, [msgpack.packb(tensors), msgpack.packb(values)]))
        return list(map(digest, made[0][1]))

    # Each step below runs on all ranks. Nothing between two steps can fail on one rank alone.
    digests = ranks.share(prepare, "prepare the write")
    ((contents, outlines),) = made
    differ = [any(of_rank[which] != digests[0][which] for of_rank in digests) for which in range(2)]
    told = [outlines]
    if any(differ):
        own = [outline if differs else b"" for outline, differs in zip(outlines, differ, strict=True)]
        told = ranks.share(lambda: own, "compare the state dicts")
    tensors, values = (
        [msgpack.unpackb(of_rank[which]) for of_rank in (told if differ[which] else [outlines])] for which in range(2)
    )
    return _divided(contents, tensors, values, options, group, ranks.rank)


def _divided(
    contents: Contents,
    tensors_of_ranks: Sequence[Any],
    values_of_ranks: Sequence[Any],
    options: WriteOptions,
    group: ProcessGroup | None,
    rank: int,
) -> tuple[FlatState, WriteOptions]:
    """Returns what ``_agreed`` returns. ``tensors_of_ranks``: the paths of the tensors of each rank, and their aliases.
    ``values_of_ranks``: the path and the fingerprint of each plain value. Both have one item if all ranks have the
    same. Raises the same StateError on every rank if plain values differ."""
    holders = _holders([paths for paths, _ in tensors_of_ranks])
    value_holders = _holders(values_of_ranks)
    for name in value_holders.keys() & holders.keys():
        raise StateError(f"{name} is a tensor on one rank and a plain value on another", key=name)
    for name, ranks in value_holders.items():
        if len({values_of_ranks[number][name][1] for number in ranks}) > 1:
            raise _differing(name, {number: values_of_ranks[number][name][1] for number in ranks})
    same = len(tensors_of_ranks) == 1
    tensors, aliases = contents.tensors, tensors_of_ranks[0][1]
    if not same:  # A set of replicas has only tensors that the same ranks have.
        aliases = {}
        tensors = {name: tensor.of_ranks(holders[name]) for name, tensor in tensors.items()}
    paths = {name: path for of_rank, _ in tensors_of_ranks for name, path in of_rank.items()}
    paths |= {name: path for of_rank in values_of_ranks for name, (path, _) in of_rank.items()}
    tree = {
        PATHS: {name: tuple(path) for name, path in paths.items()},
        RANKS: {name: ranks[0] for name, ranks in value_holders.items() if ranks[0]},
    }
    state = FlatState(tensors, aliases, tree, {name: ranks[0] for name, ranks in holders.items()}, group=group)
    history_of(state).run_id = run_by_tensors((name, ()) for name in sorted(paths))
    own = {name: value for name, value in contents.values.items() if value_holders[name][0] == rank}
    values = {"client_state": own} if rank == 0 else {"rank_state": own or None}
    return state, replace(options, **values)


def _holders(of_ranks: Sequence[Mapping[str, object]]) -> dict[str, list[int]]:
    """Returns the ranks that have each name. If all ranks have the same names, it is rank 0 for each."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(of_ranks):
        for name in names:
            holders.setdefault(name, []).append(rank)
    return holders


def _fingerprint(name: str, value: object) -> bytes:
    """Returns a digest of a plain value. Raises StateError, which names it, if it cannot be kept."""
    try:
        return fingerprint({name: value})
    except StateError as error:
        where = below(CLIENT_STATE, name)
        error.message, error.key = error.message.replace(where, name), name
        raise


def _differing(name: str, fingerprints: Mapping[int, bytes]) -> StateError:
    """Returns the error for a plain value that differs between ranks. ``fingerprints``: those of the ranks that have
    it."""
    first = min(fingerprints)
    other = next(value for value in fingerprints.values() if value != fingerprints[first])
    ranks = [rank for rank, value in fingerprints.items() if value == other]
    return StateError(
        f"{name} is another value on rank {first_few(ranks, 5)} than on rank {first}", key=name,
        hint='what each rank has of its own needs a name of its own, such as f"loader.{rank}"',
    )  # fmt: skip
