"""A state dict as a flat map from names to leaves.

A leaf is a tensor or a plain value. Its name is its path: the keys of the maps and the indices of the lists around it,
joined by dots. A list belongs to a path only if there are tensors or maps in it, and is a plain value otherwise.
PyTorch's distributed checkpoints (DCP) have the same rule and the same names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zckpt.engines.contract import StateAdapter
from zckpt.engines.shards import is_sharded, replica_set, span_of
from zckpt.engines.tensors import dtype_name, local_of
from zckpt.errors import StateError, UnsupportedError, printable
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.inventory import BUFFER, PARAM, Fragment, Inventory
from zckpt.transfer.memory import lies_in_order, not_plain
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from zckpt.geometry import Span

Path = tuple[str | int, ...]
STATE_DICT, PATHS, RANKS, OWN, STREAMS = "state_dict", "paths", "ranks", "own", "streams"
"""The tree of a state dict in the state of an engine, and its keys: what ``packed_paths`` returns; for each plain
value that rank 0 does not have, the rank that has written it; the names of the plain values of which each rank has its
own; and the names of those that were an ``io.BytesIO``, whose bytes are kept."""


class Leaf(NamedTuple):
    """A tensor or a plain value of a state dict, and the place where it is."""

    path: Path
    container: Any
    key: Any
    value: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def leaves_of(state_dict: object) -> dict[str, Leaf]:
    """Returns the leaves of a state dict by name. Raises TypeError if it is not a map, and StateError if two leaves
    have the same name."""
    if not isinstance(state_dict, Mapping):
        own = "; pass its state_dict()" if hasattr(state_dict, "state_dict") else ""
        kind = type(state_dict).__name__
        raise TypeError(f"a state dict is a dict of tensors and plain values by name, got {kind}{own}")
    leaves: dict[str, Leaf] = {}
    for name, leaf in _leaves(state_dict, (), frozenset()):
        if (first := leaves.setdefault(name, leaf)) is not leaf:
            paths = f"{first.path} and {leaf.path}"
            raise StateError(f"two leaves of the state dict are called {name}: {paths}", key=name)
    return leaves


def name_of(path: Path) -> str:
    return ".".join(map(str, path))


def check_names(names: Iterable[str]) -> None:
    """Raises StateError if the name of a leaf is not valid Unicode, which the names in a file have to be."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise StateError(
                f"the name {printable(name)} is not valid Unicode", key=name, hint="rename it in the state dict"
            ) from None


def packed_paths(paths: Iterable[Path]) -> list[list[Path | list[str | int]]]:
    """Returns paths as the tree ``STATE_DICT`` has them: for each map or list, its own path and the keys of its leaves.
    So the tree has no list for each leaf."""
    keys: dict[Path, list[str | int]] = {}
    for path in paths:
        keys.setdefault(path[:-1], []).append(path[-1])
    return [[container, of_container] for container, of_container in keys.items()]


def _leaves(container: Any, path: Path, around: frozenset[int]) -> Iterator[tuple[str, Leaf]]:
    """Yields the leaves in a map or list, and their names. ``around``: the ``id`` of each container around it."""
    if id(container) in around:
        raise StateError(f"{name_of(path)} is a value that contains itself", key=name_of(path))
    is_map, prefix = isinstance(container, Mapping), name_of((*path, ""))
    for key, value in container.items() if is_map else enumerate(container):
        name = str(key)
        below = (*path, name if is_map else key)
        if isinstance(value, torch.Tensor) or not (isinstance(value, Mapping) or _is_divided(value)):
            yield prefix + name, Leaf(below, container, key, value)
        else:
            yield from _leaves(value, below, around | {id(container)})


def _is_divided(value: object) -> bool:
    """Returns whether a value is a list in which there are tensors or maps."""
    return isinstance(value, list) and any(
        isinstance(item, (torch.Tensor, Mapping)) or _is_divided(item) for item in value
    )


def held(name: str, tensor: torch.Tensor, ranks: int, local: torch.Tensor | None = None) -> Fragment:
    """Returns what this rank holds of a tensor, which may be no elements. ``ranks``: the number of ranks that write.
    ``local``: the values that are written in the place of those that the tensor has on this rank. Raises
    UnsupportedError, which names the tensor, for one that cannot be written."""
    own = local_of(tensor)
    data = values_in_order(name, own if local is None else local)
    if own is tensor:
        return fragment_of(name, all_of(tensor.shape), data, "every rank" if ranks > 1 else "")
    try:
        span = held_span(tensor)
    except ValueError as error:
        raise UnsupportedError(f"{name} {error}", hint="redistribute a Partial tensor, which sums it") from error
    return fragment_of(name, span, data, replica_set(tensor, ranks))


def values_in_order(name: str, local: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor with the values of ``local``. It is a copy only if they do not lie in order. Raises
    UnsupportedError, which names the tensor, for one that cannot be written."""
    if why := not_plain(local):
        raise UnsupportedError(f"{name} {why}", hint="keep a dense copy of it, or the tensors that it is made of")
    dtype_name(local.dtype, name)
    if not lies_in_order(local):
        local = local.detach().resolve_conj().resolve_neg().contiguous()
    return local


def fragment_of(name: str, span: Span, data: torch.Tensor, replicated: str = "") -> Fragment:
    """Returns the fragment that has the values of a tensor that ``values_in_order`` has returned."""
    tier = _tier_of_host() if data.is_cpu else Tier.DEVICE
    return Fragment(PARAM, name, DTYPE_NAMES[data.dtype], span, tier, 0, data, replicated)


@cache
def _tier_of_host() -> Tier:
    """Returns the tier of tensors in host memory. Without an accelerator, the model computes there."""
    return Tier.HOST if torch.accelerator.is_available() else Tier.DEVICE


def held_span(tensor: Any) -> Span:
    """Returns the elements of a tensor that this rank holds, in the order of its local tensor. These are none of a
    DTensor on a mesh to which this rank does not belong. Raises ValueError as ``span_of`` does."""
    if is_sharded(tensor) and tensor.device_mesh.get_coordinate() is None:
        return all_of(tensor.shape).narrow(0, 0)
    return span_of(tensor)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Returns whether one of several names or globs matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class HeldLeaves:
    """What this rank has of a state dict, by the names of its leaves."""

    fragments: list[Fragment] = field(default_factory=list)
    """The elements of the tensors that this rank holds. Of each tensor there is a fragment, which may have none of its
    elements, or several, whose spans have the same grid."""
    devices: set[torch.device] = field(default_factory=set)
    """The devices of the tensors, without the CPU."""
    values: dict[str, Any] = field(default_factory=dict)
    """The plain values. The bytes of an ``io.BytesIO`` are in its place."""
    paths: dict[str, Path] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    """The names of the plain values that are an ``io.BytesIO``."""

    @classmethod
    def of(cls, state_dict: Mapping[Any, Any], ranks: int) -> HeldLeaves:
        """Returns the contents of a state dict. ``ranks``: as for ``held``. Raises the errors of ``leaves_of`` and
        ``held``."""
        made = cls()
        for name, (path, _, _, value) in leaves_of(state_dict).items():
            if isinstance(value, torch.Tensor):
                made.add_tensor(path, held(name, value, ranks))
            else:
                made.add_value(name, path, value)
        return made

    def add_tensor(self, path: Path, fragment: Fragment) -> None:
        """Adds a tensor, or one more fragment of a tensor."""
        data: Any = fragment.data
        if not data.is_cpu:
            self.devices.add(data.device)
        self.paths[fragment.name] = path
        self.fragments.append(fragment)

    def add_value(self, name: str, path: Path, value: Any) -> None:
        self.paths[name] = path
        if isinstance(value, BytesIO):
            if value.closed:
                raise StateError("this io.BytesIO is closed, so its bytes are gone", key=name)
            self.streams.add(name)
        self.values[name] = value.getvalue() if isinstance(value, BytesIO) else value

    def with_own(self, per_rank: Collection[str], rank: int) -> HeldLeaves:
        """Returns the same, with the plain tensors that a name or glob in ``per_rank`` matches as the own tensors of
        this rank."""
        if not per_rank:
            return self
        fragments = [
            fragment._replace(part=BUFFER, copy=rank, replicated="")
            if matches(fragment.name, per_rank) and fragment.span == all_of(fragment.shape)
            else fragment
            for fragment in self.fragments
        ]
        return replace(self, fragments=fragments)

    def aliases(self) -> dict[str, str]:
        """Returns, for each name of a tensor that has the same memory as one before it, the name of that one."""
        tensors: list[Any] = [fragment.data for fragment in self.fragments]
        addresses = [tensor.data_ptr() for tensor in tensors]
        times = Counter(addresses)
        if len(times) == len(addresses):
            return {}
        held = [*zip(self.fragments, tensors, addresses, strict=True)]
        names = {fragment.name for fragment, _, address in held if times[address] > 1 and fragment.part == PARAM}
        places: defaultdict[str, list[object]] = defaultdict(list)
        for fragment, data, address in held:
            if fragment.name in names and fragment.span.numel:
                places[fragment.name].append((fragment.span, address, data.device, data.dtype))
        first: dict[tuple[object, ...], str] = {}
        named = ((name, first.setdefault(tuple(place), name)) for name, place in places.items())
        return {name: other for name, other in named if other != name}

    def written(
        self, rank: int, aliases: Collection[str], holders: Mapping[str, Sequence[int]], *, differ: bool
    ) -> Iterator[Fragment]:
        """Yields the fragments that this rank writes, without those of ``aliases``, which are other names of the same
        tensors. ``rank``: the number of this rank. ``holders``: the ranks that have each tensor. ``differ``: whether
        these are not the same for all tensors. A set of replicas has only tensors that the same ranks have."""
        for fragment in self.fragments:
            _, name, _, (grid, first, stop), _, _, _, replicated = fragment
            if name in aliases or not (first < stop or (0 in grid.shape and holders[name][0] == rank)):
                continue
            if differ and replicated:
                ranks = holders[name]
                fragment = fragment._replace(replicated=f"{replicated} of {ranks}" if len(ranks) > 1 else "")
            yield fragment


@dataclass(eq=False)
class FlatState:
    """A state dict on one rank as a live state that is written. The ranks have compared what they have."""

    fragments: tuple[Fragment, ...]
    aliases: dict[str, str]
    tree: dict[str, Any]
    """The tree ``STATE_DICT``."""
    devices: Collection[torch.device] = ()
    """The devices of the fragments, without the CPU."""
    step: int = 0
    group: ProcessGroup | None = None
    """The process group of the ranks that write, or None if these are all ranks of the job."""


class StateDictAdapter(StateAdapter):
    """Reads one state dict on one rank. Its tensors belong to the part ``param``. Those of which each rank has its own
    belong to the part ``buffer``, which may have several copies of a tensor."""

    engine: FlatState
    trains = False
    parts = (PARAM, BUFFER)
    if_replicas_differ = 'per_rank=["<name>"] keeps what each rank has, such as the statistics of a BatchNorm'

    @staticmethod
    def process_group(engine: FlatState) -> ProcessGroup | None:
        return engine.group

    @property
    def step(self) -> int:
        return self.engine.step

    def set_step(self, step: int) -> None:
        self.engine.step = step

    @property
    def description(self) -> dict[str, str]:
        return {"framework": f"torch {torch.__version__}", "mode": "a state dict", "optimizer": "none"}

    @property
    def devices(self) -> Collection[torch.device]:
        return self.engine.devices

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        pass  # What cannot be written was refused when the FlatState was made.

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        return Inventory(self.engine.fragments, self.engine.aliases)

    def state(self) -> dict[str, Any]:
        return {STATE_DICT: self.engine.tree}
