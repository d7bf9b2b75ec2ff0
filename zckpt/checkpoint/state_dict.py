"""Writes a state dict as a checkpoint. ``Checkpoint.load_into`` reads it back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import msgpack

from zckpt.checkpoint.background import wait_for
from zckpt.checkpoint.write import CommonOptions, write_together
from zckpt.checkpoint.writing.collect import fingerprint
from zckpt.checkpoint.writing.options import Background, CopyTo, EarlierOptions, WriteOptions, only_earlier
from zckpt.engines.history import history_of
from zckpt.engines.state_dict import (
    OWN,
    PATHS,
    RANKS,
    STREAMS,
    FlatState,
    HeldLeaves,
    check_names,
    matches,
    packed_paths,
)
from zckpt.errors import StateError, first_few
from zckpt.format.digest import digest
from zckpt.format.names import CLIENT_STATE
from zckpt.format.tree import below
from zckpt.plan.lineage import run_by_tensors
from zckpt.plan.select import several
from zckpt.ranks.collectives import Ranks, check_equal
from zckpt.system.collector import without_collector

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from zckpt.checkpoint.background import PendingWrite
    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


class Options(CommonOptions, total=False):
    """The arguments that ``zckpt.dcp.Writer`` has, too."""

    step: int


class _Options(Options, total=False):
    process_group: ProcessGroup | None
    per_rank: Collection[str]
    overwrite: bool


@overload
def write_state_dict(
    state_dict: Mapping[Any, Any], path: StrPath, *, background: Literal[False] = False, **options: Unpack[_Options]
) -> str: ...
@overload
def write_state_dict(
    state_dict: Mapping[Any, Any],
    path: StrPath,
    *,
    background: Literal[True] | Background,
    snapshot_bytes: int | None = None,
    **options: Unpack[_Options],
) -> PendingWrite: ...
def write_state_dict(
    state_dict: Mapping[Any, Any],
    path: StrPath,
    *,
    step: int = 0,
    process_group: ProcessGroup | None = None,
    per_rank: Collection[str] = (),
    overwrite: bool = False,
    latest: bool = True,
    budget: Budget | None = None,
    progress: Progress | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    reuse: StrPath | None = "latest",
    node_local: bool = False,
    ranks_per_file: int = 1,
    copy_to: StrPath | CopyTo | None = None,
    background: bool | Background = False,
    **earlier: Unpack[EarlierOptions],
) -> str | PendingWrite:
    """Writes a state dict as one checkpoint. Every rank has to call this.

    A state dict is a dict of tensors, DTensors, plain values, and dicts and lists of them. The checkpoint is durable
    when this returns, and a failure of any rank leaves nothing of it, as with ``zckpt.write``.
    ``zckpt.open(path).load_into(state_dict)`` reads it into a state dict on any number of ranks and any mesh. Its
    tensors are those of the part ``param``. The name of a tensor is made of the keys around it, such as
    ``model.layers.0.weight``.

    A DTensor is written as it is divided, whatever its placements are, except ``Partial``. Tensors that several ranks
    hold, such as plain tensors, are compared and written once, and each of these ranks writes a share. Plain values
    are compared, too. What a rank has of its own therefore needs a name of its own, such as ``f"loader.{rank}"``, which
    the other ranks need not have, or is named by ``per_rank``.

    Args:
        state_dict: the state dict, such as ``{"model": model.state_dict(), "epoch": 3}``. Plain values may have the
            types that ``client_state`` of ``zckpt.write`` may have, such as NumPy arrays, and come back in the same
            plain forms. A leaf may also be an ``io.BytesIO``, which comes back with its position at the beginning.
        path: the directory of the checkpoint: a path of a file system, or a URL such as ``s3://bucket/run/step100``.
        step: the number of the training step, by which checkpoints are ordered.
        process_group: the ranks that write. None means all ranks of the job.
        per_rank: names of leaves, or globs such as ``"*.running_mean"``, of which each rank may have its own: plain
            tensors and plain values. At the same number of ranks, each gets its own back, and otherwise that of rank 0.
        overwrite: as for ``zckpt.write``.
        latest: as for ``zckpt.write``.
        budget: as for ``zckpt.write``.
        progress: as for ``zckpt.write``.
        keep_last: as for ``zckpt.write``. State dicts with the same names of leaves count as one run.
        keep_every: as for ``zckpt.write``.
        reuse: as for ``zckpt.write``. "latest" means the checkpoint that the file ``latest`` names.
        node_local: as for ``zckpt.write``.
        ranks_per_file: as for ``zckpt.write``.
        copy_to: as for ``zckpt.write``.
        background: as for ``zckpt.write``, but a snapshot is never "lazy". The tensors may change as soon as this
            returns.
        earlier: as for ``zckpt.write``.

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
        keep_every=keep_every, reuse=reuse, node_local=node_local, ranks_per_file=ranks_per_file, copy_to=copy_to,
        background=background, earlier=only_earlier(write_state_dict, earlier), replace_foreign=overwrite,
    )  # fmt: skip
    return write_contents(partial(HeldLeaves.of, state_dict), path, options, process_group, per_rank)


def write_contents(
    contents: Callable[[int], HeldLeaves],
    path: StrPath,
    options: WriteOptions,
    process_group: ProcessGroup | None = None,
    per_rank: Collection[str] = (),
    call: str = "zckpt.write_state_dict",
) -> str | PendingWrite:
    """Does the work of ``write_state_dict``. ``contents`` returns what this rank has. Its argument is the number of
    ranks. ``call``: the function that every rank has to call, for messages."""
    ranks = Ranks(process_group, call=call)
    wait_for(ranks)
    with ranks.undivided():
        state, options = _agreed(contents, options, process_group, per_rank, ranks)
        return write_together(state, path, options, call, ranks)


@without_collector
def _agreed(
    make: Callable[[int], HeldLeaves],
    options: WriteOptions,
    group: ProcessGroup | None,
    per_rank: Collection[str],
    ranks: Ranks,
) -> tuple[FlatState, WriteOptions]:
    """Compares what the ranks have. Returns what this rank writes, and the options with its plain values. Mostly all
    ranks have the same names and values. Only if not, they tell each other what they have."""
    made: list[tuple[HeldLeaves, list[Any]]] = []

    def prepare() -> list[Any]:
        patterns = several(per_rank) or ()
        contents = make(ranks.size).with_own(patterns, ranks.rank)
        check_names(contents.paths)
        # Each rank may have another value of its own, so such a value has no fingerprint.
        values = {
            name: [
                contents.paths[name],
                b"" if matches(name, patterns) else _fingerprint(name, value),
                name in contents.streams,
            ]
            for name, value in contents.values.items()
        }
        tensors = [
            {fragment.name: contents.paths[fragment.name] for fragment in contents.fragments},
            contents.aliases(),
            {
                fragment.name: [fragment.dtype, *fragment.shape]
                for fragment in contents.fragments
                if 0 in fragment.shape
            },
        ]
        made.append((contents, [tensors, values]))
        return [digest(msgpack.packb(tensors)), digest(msgpack.packb(values)), sorted(patterns)]

    def compare(digests: Sequence[Any]) -> list[bool]:
        check_equal([of_rank[2] for of_rank in digests], "per_rank arguments")
        return [any(of_rank[which] != digests[0][which] for of_rank in digests) for which in range(2)]

    # Each step below runs on all ranks. Nothing between two steps can fail on one rank alone.
    differ = ranks.decide(prepare, compare, "prepare the write")
    ((contents, outlines),) = made

    def join(told: Sequence[Sequence[Any]]) -> _Joined:
        return _joined(*([of_rank[which] for of_rank in (told if differ[which] else [outlines])] for which in range(2)))

    own_outlines = [outline if differs else None for outline, differs in zip(outlines, differ, strict=True)]
    joined = ranks.decide(lambda: own_outlines, join, "compare the state dicts") if any(differ) else None

    def make_state() -> tuple[FlatState, WriteOptions]:
        paths, aliases, holders, value_holders, flags = joined or join([])
        tree: dict[str, Any] = {
            PATHS: packed_paths(map(tuple, paths.values())),
            RANKS: {name: of_value[0] for name, of_value in value_holders.items() if of_value[0]},
            **flags,
        }
        fragments = tuple(contents.written(ranks.rank, aliases, holders, differ=differ[0]))
        state = FlatState(fragments, aliases, tree, contents.devices, group=group)
        history = history_of(state)
        history.run_id, history.by_contents = run_by_tensors((name, ()) for name in paths), True
        first = {name: value for name, value in contents.values.items() if value_holders[name][0] == ranks.rank}
        own = {name: contents.values[name] for name in tree[OWN] if name in contents.values}
        if ranks.rank == 0:
            return state, replace(options, client_state=first, rank_state=own or None)
        return state, replace(options, rank_state={**first, **own} or None)

    return ranks.together(make_state, "prepare the write")


_Holders = dict[str, list[int]]
_Joined = tuple[dict[str, Any], dict[str, str], _Holders, _Holders, dict[str, list[str]]]
"""The paths of all tensors and plain values; the aliases of the tensors; the ranks that have each tensor, and each
plain value; and the names of the values that differ from rank to rank and of those that are streams."""


def _joined(tensors_of_ranks: Sequence[Any], values_of_ranks: Sequence[Any]) -> _Joined:
    """``tensors_of_ranks``: the paths of the tensors of each rank, their aliases, and the dtypes and shapes of those
    without elements. ``values_of_ranks``: for each plain value its path, its fingerprint, and whether it is a stream.
    Both have one item if all ranks have the same. Raises StateError if plain values differ, or tensors without
    elements."""
    holders, value_holders = _holders([paths for paths, *_ in tensors_of_ranks]), _holders(values_of_ranks)
    empty = [of_rank[2] for of_rank in tensors_of_ranks]
    for name in dict.fromkeys(name for of_rank in empty for name in of_rank):
        kinds = {rank: empty[rank].get(name) for rank in holders[name]}
        other = next((rank for rank, kind in kinds.items() if kind != kinds[holders[name][0]]), None)
        if other is not None:  # No rank reads its values, so nothing else compares it.
            first = holders[name][0]
            kind, other_kind = ("not empty" if kinds[rank] is None else str(kinds[rank]) for rank in (first, other))
            raise StateError(f"{name} is {kind} on rank {first}, and {other_kind} on rank {other}", key=name)
    for name in value_holders.keys() & holders.keys():
        raise StateError(f"{name} is a tensor on one rank and a plain value on another", key=name)
    for name, ranks in value_holders.items():
        if len({tuple(values_of_ranks[number][name][1:]) for number in ranks}) > 1:
            raise _differing(name, {number: tuple(values_of_ranks[number][name][1:]) for number in ranks})
    paths = {name: path for of_rank, *_ in tensors_of_ranks for name, path in of_rank.items()}
    paths |= {name: path for of_rank in values_of_ranks for name, (path, *_) in of_rank.items()}
    flags = {
        OWN: [name for name, ranks in value_holders.items() if not values_of_ranks[ranks[0]][name][1]],
        STREAMS: [name for name, ranks in value_holders.items() if values_of_ranks[ranks[0]][name][2]],
    }
    aliases = tensors_of_ranks[0][1] if len(tensors_of_ranks) == 1 else {}
    return paths, aliases, holders, value_holders, flags


def _holders(of_ranks: Sequence[Mapping[str, object]]) -> _Holders:
    """Returns the ranks that have each name. If all ranks have the same names, it is rank 0 for each."""
    if len(of_ranks) == 1:
        first = [0]
        return dict.fromkeys(of_ranks[0], first)
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


def _differing(name: str, fingerprints: Mapping[int, object]) -> StateError:
    """Returns the error for a plain value that differs between the ranks that have it."""
    first = min(fingerprints)
    other = next(value for value in fingerprints.values() if value != fingerprints[first])
    ranks = [rank for rank, value in fingerprints.items() if value == other]
    return StateError(
        f"{name} is another value on rank {first_few(ranks, 5)} than on rank {first}", key=name,
        hint=f"per_rank=[{name!r}] keeps that of each rank; or give each a name of its own, such as "
        f"{name + '.{rank}'!r}",
    )  # fmt: skip
