"""Sends trees of one rank to the other ranks, which join them. Engines need it whose ranks hold tensors of different
names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import torch

from zckpt.engines import optimizer
from zckpt.format import tree
from zckpt.state.inventory import EXTRA_STATE
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from zckpt.writing.plain import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.writing.collect import Collected


def packed_for_joining(collected: Collected) -> bytes:
    """Returns, in packed form, what ``joined`` needs of each rank. Raises StateError for a value that cannot be
    kept."""
    tensors: list[tuple[str, list[int], bytes]] = []

    def put(path: str, leaf: object) -> tuple[int, str] | tree.Plain | None:
        if not isinstance(leaf, torch.Tensor):
            return number(leaf)
        data = leaf.detach().cpu().contiguous()
        tensors.append((DTYPE_NAMES[leaf.dtype], list(leaf.shape), bytes(host_bytes(data))))
        return tree.TENSOR, str(len(tensors) - 1)

    trees = {name: collected.state[name] for name in ("optimizer", EXTRA_STATE) if name in collected.state}
    packed = tree.pack([trees, dict(collected.aliases)], "", put)
    raw: bytes = msgpack.packb([packed, tensors])
    return raw


def joined(
    state: Mapping[str, Any], of_ranks: Sequence[bytes], *, leave_out: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state of an engine and its aliases with the tensors of all ranks. ``state``: that of one rank.
    ``of_ranks``: what ``packed_for_joining`` has returned on each rank. ``leave_out``: whether the values of the first
    rank count if ranks have different values of the same thing. If not, it raises StateError."""
    unpacked = [_unpacked(raw) for raw in of_ranks]
    aliases = {alias: name for _, of_rank in reversed(unpacked) for alias, name in of_rank.items()}
    whole = dict(state)
    if "optimizer" in whole:
        whole["optimizer"] = optimizer.joined([trees["optimizer"] for trees, _ in unpacked], leave_out=leave_out)
    extra = sorted({name for trees, _ in unpacked for name in trees.get(EXTRA_STATE, ())})
    return whole | ({EXTRA_STATE: extra} if extra else {}), aliases


def _unpacked(raw: bytes) -> Any:
    packed, tensors = msgpack.unpackb(raw)

    def get(kind: int, name: str) -> torch.Tensor:
        dtype, shape, data = tensors[int(name)]
        return torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[dtype]).view(shape)

    return tree.unpack(packed, get, "the trees of a rank")
