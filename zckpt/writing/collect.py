"""Collects the state of an engine: tensors as fragments, all other values as packed trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zckpt.format import names, tree
from zckpt.format.digest import digest
from zckpt.format.names import Tier
from zckpt.offloading.away import place_of
from zckpt.state.inventory import BUFFER, RESERVED_PARTS, STATE, Fragment
from zckpt.transfer.devices import synchronize
from zckpt.transfer.memory import check_fragments, check_memory, host_bytes
from zckpt.transfer.torch_dtypes import DTYPE_NAMES
from zckpt.writing.plain import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zckpt.engines.contract import EngineAdapter
    from zckpt.writing.options import WriteOptions

_NUMPY_DTYPES = frozenset(map(np.dtype, ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]))


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of an engine, as one rank holds it."""

    fragments: list[Fragment]
    """The fragments of all parts that are written. The tensors of packed trees are added to this list later."""
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


def collect(adapter: EngineAdapter, options: WriteOptions) -> Collected:
    """Collects the state that ``options`` ask for. Raises ValueError, StateError, FormatError (N001, N003),
    DeviceError, and the errors of the adapter."""
    unknown = sorted(set(options.exclude) - set(adapter.parts))
    if unknown:
        raise ValueError(f"exclude: the engine has no part {', '.join(unknown)}; it has {', '.join(adapter.parts)}")
    synchronize(adapter.devices)
    inventory = adapter.inventory(options.parts)
    wanted = {*(adapter.parts if options.parts is None else options.parts)}.difference(options.exclude)
    fragments = [_where_it_is(fragment) for fragment in inventory.fragments if fragment.part not in options.exclude]
    for fragment in fragments:  # the name of a part becomes the name of a file
        names.check_part_name(fragment.part)
        names.check_tensor_name(fragment.name)
    check_fragments(fragments)
    state, rank_state = adapter.state(), adapter.rank_state()
    scalars = dict(sorted(_leaves(state.get("optimizer"), "optimizer")))
    left_out = [part for part in adapter.parts if part not in wanted and part not in RESERVED_PARTS]
    return Collected(fragments, inventory.aliases, state, rank_state, scalars, _digests(fragments), left_out)


def _where_it_is(fragment: Fragment) -> Fragment:
    """Returns ``fragment``. If its tensor is offloaded, the data of the fragment is the range of the scratch file that
    has the values."""
    place = place_of(fragment.data) if isinstance(fragment.data, torch.Tensor) else None
    return fragment if place is None else replace(fragment, tier=Tier.NVME, data=place)


def tensors_of(fragments: Iterable[Fragment]) -> Iterator[torch.Tensor]:
    """Yields the data of the fragments that are in memory."""
    return (fragment.data for fragment in fragments if isinstance(fragment.data, torch.Tensor))


def pack_tree(value: object, path: str, fragments: list[Fragment], rank: int) -> bytes:
    """Returns a tree in packed form. The tensors and arrays in it are added to ``fragments``."""

    def keep(tensor: torch.Tensor) -> str:
        name = f"tree/{rank}/{len(fragments)}"
        fragments.append(_state_fragment(name, tensor))
        return name

    return _packed(value, path, keep)


def add_rank_tree(value: object, fragments: list[Fragment], rank: int) -> None:
    """Adds the tree of one rank, and the tensors and arrays in it, to ``fragments``."""
    packed = pack_tree(value, f"rank_state[{rank}]", fragments, rank)
    fragments.append(_state_fragment(f"rank/{rank}", torch.frombuffer(bytearray(packed), dtype=torch.uint8)))


def fingerprint(client_state: Mapping[str, Any]) -> bytes:
    """Returns the digest of the client_state of one rank. It is the same for equal values."""

    def keep(tensor: torch.Tensor) -> str:
        return f"{tensor.dtype} {list(tensor.shape)} {digest(host_bytes(tensor.reshape(-1).cpu())).hex()}"

    return digest(_packed({names.CLIENT_STATE: dict(client_state)}, "", keep))


def _packed(value: object, path: str, keep: Callable[[torch.Tensor], str]) -> bytes:
    """Returns a tree in packed form. ``keep`` stores a tensor and returns its name. In the values that the caller has
    given, some values are replaced as ``plain`` says. The values of an engine are never replaced, because the engine
    has to get back what it had."""
    given = tuple(f"{path}.{key}" if path else key for key in (names.CLIENT_STATE, names.CLIENT_RANK_STATE))

    def put(where: str, leaf: object) -> tuple[int, str] | tree.Plain | None:
        # Only this very type: a subclass, such as a masked array, has more than its elements.
        if type(leaf) is np.ndarray and leaf.dtype in _NUMPY_DTYPES:
            return tree.NDARRAY, keep(torch.from_numpy(np.array(leaf)))
        if isinstance(leaf, torch.Tensor):
            tensor = _checked(leaf, where)
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.dtype in DTYPE_NAMES:
                return tree.TENSOR, keep(tensor)
        value = plain(leaf) if where.startswith(given) else None
        return None if value is None else tree.Plain(value)

    return tree.pack(value, path, put)


def _state_fragment(name: str, tensor: torch.Tensor) -> Fragment:
    shape = tuple(tensor.shape)
    return Fragment(STATE, name, shape, DTYPE_NAMES[tensor.dtype], 0, tensor.numel(), Tier.HOST, 0, tensor.reshape(-1))


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path of each value in a tree, and the value as text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    elif isinstance(value, torch.Tensor):
        tensor = _checked(value, path)
        exact = tensor.item() if tensor.numel() == 1 else digest(host_bytes(tensor.cpu())).hex()
        yield path, f"{exact} ({value.dtype})"
    else:
        yield path, repr(value)


def _checked(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Returns the values of a tensor of a tree as a contiguous tensor, whose memory may be read. Raises StateError and
    DeviceError."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    synchronize(check_memory([(path, tensor)]))
    return tensor.contiguous()


def _digests(fragments: Iterable[Fragment]) -> dict[str, bytes]:
    """Returns the digest of each buffer, by its key."""
    buffers = [(f.key, f.data) for f in fragments if f.part == BUFFER]
    return {key: digest(host_bytes(data.cpu())) for key, data in buffers if isinstance(data, torch.Tensor)}
