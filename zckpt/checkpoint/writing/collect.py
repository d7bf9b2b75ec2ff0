"""Collects the state of an engine: tensors as fragments, all other values as packed trees."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch

from zckpt.checkpoint.writing.plain import is_told, number, number_key, plain, plain_key
from zckpt.engines.away import where_they_are
from zckpt.engines.contract import left_out
from zckpt.errors import StateError
from zckpt.format import names, tree
from zckpt.format.digest import digest
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.inventory import BUFFER, EXTRA_STATE, PARAM, RESERVED_PARTS, STATE, Fragment
from zckpt.plan.lineage import Use, use_of
from zckpt.plan.replicas import ReplicaSet
from zckpt.transfer.devices import synchronize
from zckpt.transfer.memory import check_fragments, check_memory, host_bytes
from zckpt.transfer.stored import in_order, stored_range
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from zckpt.transfer.values_digest import replica_digest, values_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.engines.contract import StateAdapter
    from zckpt.plan.data_files import FragmentPlaces

_NUMPY_DTYPES = frozenset(map(np.dtype, ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]))


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of an engine, as one rank holds it."""

    fragments: Sequence[Fragment]
    """The fragments of all parts that are written, without the tensors of packed trees."""
    places: FragmentPlaces
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any]
    scalars: dict[str, str]
    """The values that the optimizer keeps once for all ranks, as text, by their path in its state. They are compared
    between the ranks, and shown if they differ."""
    buffers: dict[str, bytes]
    """The digest of each buffer, by its key."""
    left_out: list[str]
    """The parts of the optimizer that the engine has and that ``options`` leave out."""
    use: Use
    unsaved: tuple[str, ...]
    """A phrase for each thing that no checkpoint can hold, as in ``Inventory.unsaved``."""
    replicas: dict[str, ReplicaSet]
    """The sets of replicas of which this rank holds one, by their labels."""
    step: int
    description: Mapping[str, str]
    peft_configs: Mapping[str, str]
    """The last three are those of the adapter."""


def collect(
    adapter: StateAdapter, options: WriteOptions, replicas: dict[str, tuple[tuple[int, int], bytes]]
) -> Collected:
    """Collects the state that ``options`` ask for. ``replicas``: as in ``History``. Raises ValueError, StateError,
    FormatError (N001, N003), DeviceError, and the errors of the adapter."""
    parts = adapter.parts
    unknown = sorted(set(options.exclude) - set(parts))
    if unknown:
        raise ValueError(f"exclude: the engine has no part {', '.join(unknown)}; it has {', '.join(parts)}")
    synchronize(adapter.devices)
    inventory = adapter.inventory(options.parts)
    wanted = {*(parts if options.parts is None else options.parts)}.difference(options.exclude)
    fragments = where_they_are(fragment for fragment in inventory.fragments if fragment.part not in options.exclude)
    for part in {fragment.part for fragment in fragments}:  # It becomes the name of a file.
        names.check_part_name(part)
    names.check_tensor_names([fragment.name for fragment in fragments])
    places = check_fragments(fragments)
    state, rank_state = adapter.state(), adapter.rank_state()
    scalars = dict(sorted(_leaves(state.get("optimizer"), "optimizer")))
    buffers = {f.key: values_digest(f.data) for f in fragments if f.part == BUFFER and isinstance(f.data, torch.Tensor)}
    left_out = [part for part in parts if part not in wanted and part not in RESERVED_PARTS]
    all_weights = options.parts is not None and PARAM in options.parts
    use = use_of(wanted, parts, trains=adapter.trains, all_weights=all_weights)
    return Collected(
        fragments, places, inventory.aliases, state, rank_state, scalars, buffers, left_out, use,
        inventory.unsaved, _replica_sets(fragments, replicas if options.parts is None else {}), adapter.step,
        adapter.description, adapter.peft_configs,
    )  # fmt: skip


def tensors_of(fragments: Iterable[Fragment]) -> Iterator[torch.Tensor]:
    """Yields the data of the fragments that are in memory."""
    return (fragment.data for fragment in fragments if isinstance(fragment.data, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Changes:
    """What of the trees of one rank is not written as it is."""

    replaced: dict[str, str] = field(default_factory=dict)
    """The values of the caller that are replaced and of which a warning tells: the path of each, and in words its type
    and that of the plain value."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The values that are left out: the path of each, and in words the path and the reason."""

    def copy(self) -> Changes:
        return Changes({**self.replaced}, {**self.left_out})


def pack_tree(
    value: object,
    path: str,
    fragments: list[Fragment],
    rank: int,
    changes: Changes | None = None,
    *,
    leave_out: bool = False,
) -> bytes:
    """Returns a tree in packed form. The tensors and arrays in it are added to ``fragments``, and what is not kept as
    it is to ``changes``. ``leave_out``: whether what cannot be kept is left out. If not, it raises StateError."""
    first = len(fragments)

    def name(number: int) -> str:
        return f"tree/{rank}/{first + number}"

    packed, tensors = _packed_tree(value, path, name, changes or Changes(), leave_out=leave_out)
    fragments += [_state_fragment(name(number), tensor) for number, tensor in enumerate(tensors)]
    return packed


def _packed_tree(
    value: object, path: str, name: Callable[[int], str], changes: Changes, *, leave_out: bool
) -> tuple[bytes, list[torch.Tensor]]:
    """Returns a tree in packed form, as ``pack_tree`` does, and the tensors and arrays in it. ``name`` returns the name
    of each of these, by its number."""
    tensors: list[torch.Tensor] = []
    replaced: dict[str, str] = {}

    def keep(tensor: torch.Tensor) -> str:
        tensors.append(tensor)
        return name(len(tensors) - 1)

    try:
        packed = _packed(value, path, keep, replaced)
    except StateError:
        if not leave_out:
            raise
        tensors.clear()
        replaced.clear()
        packed = _packed(_sifted(value, path, changes.left_out), path, keep, replaced)
    changes.replaced.update(replaced)
    return packed, tensors


def packed_for_joining(collected: Collected, changes: Changes, *, leave_out: bool) -> bytes:
    """Returns, in packed form, what ``joined`` needs of each rank. ``changes``, ``leave_out``: as for ``pack_tree``."""
    trees = {name: collected.state[name] for name in ("optimizer", EXTRA_STATE) if name in collected.state}
    packed, tensors = _packed_tree({"engine": trees}, "", str, changes, leave_out=leave_out)
    told = [
        (DTYPE_NAMES[tensor.dtype], tensor.shape, bytes(host_bytes(tensor.detach().cpu().contiguous())))
        for tensor in tensors
    ]
    raw: bytes = msgpack.packb([packed, dict(collected.aliases), told])
    return raw


def joined(
    adapter: StateAdapter, state: Mapping[str, Any], of_ranks: Sequence[bytes], *, leave_out: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state of an engine and its aliases with the tensors of all ranks. ``state``: that of one rank.
    ``of_ranks``: what ``packed_for_joining`` has returned on each rank. ``leave_out``: as for ``joined_optimizer``."""
    unpacked = [_unpacked(raw) for raw in of_ranks]
    aliases = {alias: name for _, of_rank in reversed(unpacked) for alias, name in of_rank.items()}
    whole = dict(state)
    if "optimizer" in whole:
        whole["optimizer"] = adapter.joined_optimizer(
            [trees["optimizer"] for trees, _ in unpacked], leave_out=leave_out
        )
    extra = sorted({name for trees, _ in unpacked for name in trees.get(EXTRA_STATE, ())})
    return whole | ({EXTRA_STATE: extra} if extra else {}), aliases


def _unpacked(raw: bytes) -> tuple[Any, Any]:
    packed, aliases, tensors = msgpack.unpackb(raw)

    def get(kind: int, name: str) -> object:
        dtype, shape, data = tensors[int(name)]
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cpu")
        host_bytes(tensor)[:] = np.frombuffer(data, np.uint8)
        return tensor.numpy() if kind == tree.NDARRAY else tensor

    return tree.unpack(packed, get, "the trees of a rank")["engine"], aliases


def kept_client_state(client_state: Mapping[str, Any], changes: Changes) -> Mapping[str, Any]:
    """Returns the client_state of one rank without what cannot be kept. ``changes`` gets what is left out."""
    root = {names.CLIENT_STATE: dict(client_state)}
    kept: dict[str, Mapping[str, Any]] = _sifted(root, "", changes.left_out)
    return kept[names.CLIENT_STATE]


def what_is_left_out(adapter: StateAdapter, client_rank_state: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns what a save, with these states of registered objects, would leave out, as in ``Changes``."""
    changes = Changes()
    of_rank = {**adapter.rank_state(), names.CLIENT_RANK_STATE: client_rank_state}
    for value, path in (({"engine": adapter.state()}, ""), (of_rank, "rank_state[0]")):
        _sifted(value, path, changes.left_out)
    return changes.left_out


def add_rank_tree(
    value: object, fragments: list[Fragment], rank: int, changes: Changes | None = None, *, leave_out: bool = False
) -> None:
    """Adds the tree of one rank, and the tensors and arrays in it, to ``fragments``, as ``pack_tree`` does."""
    packed = pack_tree(value, f"rank_state[{rank}]", fragments, rank, changes, leave_out=leave_out)
    fragments.append(_state_fragment(f"rank/{rank}", torch.frombuffer(bytearray(packed), dtype=torch.uint8)))


def fingerprint(client_state: Mapping[str, Any]) -> bytes:
    """Returns the digest of the client_state of one rank. It is the same for equal values."""

    def keep(tensor: torch.Tensor) -> str:
        return f"{tensor.dtype} {list(tensor.shape)} {values_digest(tensor).hex()}"

    return digest(_packed({names.CLIENT_STATE: dict(client_state)}, "", keep))


_GIVEN = re.compile(rf"(rank_state\[\d+\]\.)?({names.CLIENT_STATE}|{names.CLIENT_RANK_STATE})\b", re.ASCII)
"""Matches the path of a value that the caller has given."""
_ROOT_DEPTH = 1
"""The depth of the values in a tree that are never left out as a whole, such as the client_state."""


def _packed(
    value: object, path: str, keep: Callable[[torch.Tensor], str] | None = None, replaced: dict[str, str] | None = None
) -> bytes:
    """Returns a tree in packed form. ``keep`` stores a tensor and returns its name. Without it, this only finds out
    whether the tree can be kept. ``replaced``: as in ``Changes``."""

    def put(where: str, leaf: object) -> tuple[int, str] | tree.Plain | None:
        # Only this very type: a subclass, such as a masked array, has more than its elements.
        if type(leaf) is np.ndarray and leaf.dtype in _NUMPY_DTYPES:
            return tree.NDARRAY, keep(torch.from_numpy(np.array(leaf))) if keep else ""
        if isinstance(leaf, torch.Tensor):
            tensor = _checked(leaf, where)
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.dtype in DTYPE_NAMES:
                return tree.TENSOR, keep(tensor) if keep else ""
        kept = _replacement(where, leaf)
        if kept is not None and replaced is not None and is_told(kept.value, leaf):
            replaced[where] = f"{where} ({type(leaf).__name__}) as {type(kept.value).__name__}"
        return kept

    def put_key(where: str, key: object) -> str | int | None:
        kept = _key(where, key)
        if kept is not None and replaced is not None and kept != key:
            replaced[tree.below(where, key)] = f"the key {key!r} of {where} as {kept!r}"
        return kept

    return tree.pack(value, path, put, put_key)


def _key(path: str, key: object) -> str | int | None:
    """Returns the plain key that takes the place of a key of the map at ``path``, or None if there is none."""
    return (plain_key if _GIVEN.match(path) else number_key)(key)


def _sifted(value: Any, path: str, gone: dict[str, str], depth: int = 0, inside: frozenset[int] = frozenset()) -> Any:
    """Returns the value at ``path`` without what cannot be kept. Each such value goes with the map entry that it is in,
    so a list stays whole or goes as a whole. ``gone`` gets the entries that went, as in ``Changes``. ``depth``: the
    level of the value in the tree. ``inside``: the ``id`` of every dict and list around it, because a value may contain
    itself. Raises StateError if nothing of the value can be kept."""
    try:
        _packed(value, path)
        return value
    except StateError as error:
        # The parts of a value that is too deep or too large are not tried one by one.
        if id(value) in inside or (error.rule is not None and depth > _ROOT_DEPTH):
            raise
        inside |= {id(value)}
        simpler = _replacement(path, value)
        if simpler is not None:
            return _sifted(simpler.value, path, gone, depth, inside)
        if type(value) in (list, tuple):
            of_items: dict[str, str] = {}
            items = [_sifted(item, f"{path}[{i}]", of_items, depth + 1, inside) for i, item in enumerate(value)]
            gone.update(of_items)  # If the whole list goes, only the list itself counts.
            return type(value)(items)
        if type(value) not in (dict, OrderedDict, Counter):
            raise
        kept, packed_keys = type(value)(), set[str | int]()
        for key, item in value.items():
            entry = tree.below(path, key)
            try:
                packed_key = tree.kept_key(key, path, _key, packed_keys, value)
                _packed(packed_key, path)
                kept[key] = _sifted(item, entry, gone, depth + 1, inside)
                packed_keys.add(packed_key)
            except StateError as why:
                gone[entry] = why.message if why.key == entry else f"{entry}, since {why.message}"
                if tree.is_key(key) and not _GIVEN.match(entry):
                    kept[key] = left_out(why.message)
                    packed_keys.add(key)
        return kept


def _replacement(where: str, value: object) -> tree.Plain | None:
    """Returns the plain value that takes the place of a value in a tree, or None. An engine has to get back what it
    had, so only its numpy scalars are replaced, by equal numbers."""
    try:
        return (plain if _GIVEN.match(where) else number)(value)
    except Exception as error:  # It comes from the class of the value.
        raise StateError(f"{where}: {type(value).__name__} cannot be kept: {error!r}", key=where) from error


def _state_fragment(name: str, tensor: torch.Tensor) -> Fragment:
    span = all_of(tensor.shape)
    return Fragment(STATE, name, DTYPE_NAMES[tensor.dtype], span, Tier.HOST, 0, tensor.reshape(-1))


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path of each value in a tree, and the value as text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        tensor = _checked(value, path)
        exact = tensor.item() if tensor.numel() == 1 else values_digest(tensor).hex()
        yield path, f"{exact} ({value.dtype})"
    else:
        kept = number(value)
        yield path, repr(value if kept is None else kept.value)


def _checked(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Returns the values of a tensor of a tree as a contiguous tensor, whose memory may be read. Raises StateError and
    DeviceError."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if stored_range(tensor) is None:
        synchronize(check_memory([(path, tensor)]))
    return in_order(tensor)


def _replica_sets(
    fragments: Iterable[Fragment], known: dict[str, tuple[tuple[int, int], bytes]]
) -> dict[str, ReplicaSet]:
    """Returns ``Collected.replicas``. Uses and renews what is ``known``, as in ``History``."""
    sets: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        if fragment.replicated and fragment.span.numel:
            sets.setdefault(fragment.replicated, []).append(fragment)
    return {
        label: ReplicaSet.of(members, [_digest_of_replica(member, known) for member in members])
        for label, members in sets.items()
    }


def _digest_of_replica(fragment: Fragment, known: dict[str, tuple[tuple[int, int], bytes]]) -> bytes:
    data = fragment.data
    if not isinstance(data, torch.Tensor):
        return b""
    if fragment.part != PARAM or data.is_inference():
        # Kernels of DeepSpeed change weights and moments without a change that torch counts.
        return replica_digest(data)
    changes = data.data_ptr(), data._version
    before = known.get(fragment.key)
    if before is None or before[0] != changes:
        known[fragment.key] = before = changes, replica_digest(data)
    return before[1]
