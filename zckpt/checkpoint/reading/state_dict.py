"""Reads a checkpoint into a state dict: what each rank holds of its tensors, and its plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.reading.loader import Loader, ReadRequest
from zckpt.engines.group import rank_group_of
from zckpt.engines.state_dict import OWN, PATHS, RANKS, STATE_DICT, STREAMS, Leaf, held_span, leaves_of, name_of
from zckpt.engines.tensors import local_of
from zckpt.errors import CastError, FormatError, MismatchError
from zckpt.format.names import CLIENT_RANK_STATE, CLIENT_STATE
from zckpt.plan.select import nearest
from zckpt.transfer.memory import check_cast, check_memory

if TYPE_CHECKING:
    import torch

    from zckpt.checkpoint.listing.tensors import TensorInfo

_INDICES = range(1 << 20)
SHOWN_MAX = 5
"""The largest number of problems that an error lists."""


def tensors_by_name(checkpoint: Loader) -> dict[str, TensorInfo]:
    """Returns the tensors that a state dict may have, by name: all that a state dict had when it was written, or the
    weights and buffers of an engine. Tied ones have each of their names."""
    infos = checkpoint.weights()
    return infos | {alias: infos[name] for alias, name in checkpoint.manifest.aliases.items() if name in infos}


def paths_of(checkpoint: Loader) -> dict[str, tuple[str | int, ...]]:
    """Returns the path of each leaf of the state dict that was written, by its name. It is empty if the checkpoint is
    not one of a state dict. Raises FormatError."""
    paths = [*_unpacked_paths(_tree(checkpoint).get(PATHS, []))]
    if not all(map(is_path, paths)):
        raise FormatError(f"state: {STATE_DICT}.{PATHS} is not a list of paths", file=checkpoint.path)
    return {name_of(path): path for path in paths}


def _unpacked_paths(packed: object) -> Iterator[Any]:
    """Yields the paths in what ``packed_paths`` has returned, and None for anything that it does not return."""
    for entry in packed if isinstance(packed, list) else [None]:
        container, keys = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if isinstance(container, tuple) and isinstance(keys, list):
            yield from ((*container, key) for key in keys)
        else:
            yield None


def own_rank(checkpoint: Loader) -> int | None:
    """Returns the number of this rank, if the checkpoint was written by as many ranks as the job has, or None."""
    group = rank_group_of(None)
    return group.rank if group.size == checkpoint.manifest.world_size else None


def is_path(value: object) -> bool:
    """Returns whether a value is a path. DCP makes a list of so many items as an index in a path says."""
    return isinstance(value, tuple) and any(value) and all(type(key) is str or key in _INDICES for key in value)


class PlainValues(Mapping[str, Any]):
    """The plain values of a checkpoint by name, those of all ranks. What a single rank has written is read when it is
    asked for."""

    def __init__(self, checkpoint: Loader, rank: int | None = None) -> None:
        """``rank``: the rank whose own values are returned. None means rank 0, or the first rank that has a value."""
        self._common = _map(checkpoint.root.get(CLIENT_STATE, {}), CLIENT_STATE, checkpoint)
        self._ranks = _map(_tree(checkpoint).get(RANKS, {}), f"{STATE_DICT}.{RANKS}", checkpoint)
        self._own, self._streams = (_names(_tree(checkpoint).get(key)) for key in (OWN, STREAMS))
        self._rank = rank
        self._checkpoint = checkpoint
        self._read: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter({**self._common, **self._ranks})

    def __contains__(self, name: object) -> bool:
        return name in self._common or name in self._ranks  # Mapping's own method would read the value.

    def __len__(self) -> int:
        return len({**self._common, **self._ranks})

    def __getitem__(self, name: str) -> Any:
        value = self._value(name)
        if name not in self._streams:
            return value
        if not isinstance(value, bytes):
            raise FormatError(f"state: {name} has no bytes", file=self._checkpoint.path)
        return BytesIO(value)

    def _value(self, name: str) -> Any:
        if self._rank is not None and name in self._own and name in self._of_rank(self._rank):
            return self._of_rank(self._rank)[name]
        if name in self._common:
            return self._common[name]
        rank = self._ranks[name]
        if type(rank) is not int or rank not in range(self._checkpoint.manifest.world_size):
            raise FormatError(f"state: {STATE_DICT}.{RANKS} has no rank of {name}", file=self._checkpoint.path)
        if name not in self._of_rank(rank):
            raise FormatError(f"state: {name} is not in the tree of rank {rank}", file=self._checkpoint.path)
        return self._of_rank(rank)[name]

    def _of_rank(self, rank: int) -> dict[str, Any]:
        if rank not in self._read:
            self._read[rank] = self._checkpoint.map_of_rank(rank, CLIENT_RANK_STATE) or {}
        return self._read[rank]


def _names(value: object) -> frozenset[str]:
    return frozenset(name for name in value if isinstance(name, str)) if isinstance(value, list) else frozenset()


def _tree(checkpoint: Loader) -> dict[str, Any]:
    engine = checkpoint.root.get("engine")
    tree = engine.get(STATE_DICT, {}) if isinstance(engine, dict) else {}
    return _map(tree, STATE_DICT, checkpoint)


def _map(value: object, what: str, checkpoint: Loader) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"state: {what} is not a map", file=checkpoint.path)
    return value


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is read into a state dict, on one rank."""

    tensors: dict[str, ReadRequest]
    """What is read of each tensor, by its name: the elements that this rank holds."""
    values: dict[str, Leaf]
    """The plain values by name, and their places."""
    left: list[str]
    """The names of the leaves that the checkpoint does not have, and which stay as they are."""


def plan_load(checkpoint: Loader, state_dict: Mapping[Any, Any], *, strict: bool) -> LoadPlan:
    """Plans what is read into a state dict. ``strict``: whether the checkpoint has to have all of its leaves. Raises
    MismatchError, which lists what does not fit, and the errors of ``leaves_of``."""
    leaves, infos, values = leaves_of(state_dict), tensors_by_name(checkpoint), PlainValues(checkpoint)
    plan, problems = LoadPlan({}, {}, []), []
    for name, leaf in leaves.items():
        if name not in (infos if leaf.is_tensor else values):
            plan.left.append(name)
            problems += [_why_missing(name, leaf, infos, values)] if strict else []
        elif not leaf.is_tensor:
            plan.values[name] = leaf
            if not isinstance(leaf.container, (MutableMapping, list)):
                problems.append(f"{name} is in a {type(leaf.container).__name__}, which cannot be changed")
        else:
            target = local_of(leaf.value).detach()
            try:
                check_fits(name, infos[name], leaf.value)
                plan.tensors[name] = ReadRequest(infos[name], held_span(leaf.value), target)
            except (ValueError, CastError) as error:
                problems.append(f"{name}: {error.message}" if isinstance(error, CastError) else str(error))
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems[:SHOWN_MAX])
        more = f"\n  and {len(problems) - SHOWN_MAX} more" if len(problems) > SHOWN_MAX else ""
        raise MismatchError(
            f"the checkpoint does not fit the state dict; nothing was changed:{listed}{more}",
            file=checkpoint.path, hint=_hint(leaves, plan.left, infos, values),
        )  # fmt: skip
    check_memory(((name, request.target) for name, request in plan.tensors.items()), MismatchError)
    return plan


def check_fits(name: str, info: TensorInfo, tensor: torch.Tensor) -> None:
    """Raises MismatchError if the shapes differ, and CastError if the dtype cannot be converted."""
    if tuple(tensor.shape) != info.shape:
        raise MismatchError(
            f"{name} is {list(info.shape)} in the checkpoint, {list(tensor.shape)} here", key=name,
            hint="make the model with the sizes of the checkpoint, or leave this tensor out of the state dict",
        )  # fmt: skip
    check_cast(info.dtype, tensor.dtype, name)


def _why_missing(name: str, leaf: Leaf, infos: Collection[str], values: Collection[str]) -> str:
    if hasattr(leaf.value, "state_dict"):
        return f"{name} is a {type(leaf.value).__name__} here: have its state_dict() there instead"
    kinds = "a tensor", "a plain value"
    here, there = kinds if leaf.is_tensor else reversed(kinds)
    is_there = name in infos or name in values
    return f"{name} is {here} here, {there} in the checkpoint" if is_there else f"missing: {name}"


def _hint(
    leaves: Mapping[str, Leaf], left: Sequence[str], infos: Collection[str], values: Collection[str]
) -> str | None:
    """Returns a hint about the leaves that the checkpoint does not have. It may have them as the other kind, or without
    the first key of their path."""
    if any(name in infos or name in values for name in left):
        return (
            "have a tensor of this shape where the checkpoint has a tensor, and a plain value where it has one; "
            "strict=False leaves these as they are"
        )
    missing = [leaves[name].path for name in left if leaves[name].is_tensor]
    if missing and all(name_of(path[1:]) in infos for path in missing):
        return f"the checkpoint has these names without {missing[0][0]!r}: pass state_dict[{missing[0][0]!r}]"
    near = f"{nearest([*infos], left[0])}; " if left and leaves[left[0]].is_tensor else ""
    return f"{near}strict=False leaves out what the checkpoint does not have" if left else None
