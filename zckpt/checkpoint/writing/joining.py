"""Sends trees of one rank to the other ranks, which join them. Engines need it whose ranks hold tensors of different
names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch

from zckpt.checkpoint.writing.collect import packed_tree
from zckpt.format import tree
from zckpt.plan.inventory import EXTRA_STATE
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.checkpoint.writing.collect import Changes, Collected
    from zckpt.engines.contract import StateAdapter


def packed_for_joining(collected: Collected, changes: Changes, *, leave_out: bool) -> bytes:
    """Returns, in packed form, what ``joined`` needs of each rank. ``changes``, ``leave_out``: as for ``pack_tree``."""
    trees = {name: collected.state[name] for name in ("optimizer", EXTRA_STATE) if name in collected.state}
    packed, tensors = packed_tree({"engine": trees}, "", str, changes, leave_out=leave_out)
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
