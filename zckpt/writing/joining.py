"""Sends trees of one rank to the other ranks, which join them. Engines need it whose ranks hold tensors of different
names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zckpt.engines import optimizer
from zckpt.format import tree
from zckpt.state.inventory import EXTRA_STATE
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zckpt.writing.collect import Collected

_TENSOR = "\0tensor"
"""The key of a map that stands for a tensor in a packed tree."""


def packed_names(collected: Collected) -> bytes:
    """Returns, in packed form, what ``joined`` needs of each rank."""
    trees = {name: collected.state[name] for name in ("optimizer", EXTRA_STATE) if name in collected.state}
    return tree.pack([trees, dict(collected.aliases)], "", _put)


def joined(state: Mapping[str, Any], of_ranks: Sequence[bytes]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state of an engine and its aliases with the tensors of all ranks. ``state``: that of one rank.
    ``of_ranks``: what ``packed_names`` has returned on each rank. Raises StateError if ranks have different values of
    the same thing."""
    unpacked = [tree.unpack(packed, lambda kind, name: None, "the trees of a rank") for packed in of_ranks]
    trees = [_with_tensors(trees) for trees, _ in unpacked]
    aliases = {alias: name for _, of_rank in reversed(unpacked) for alias, name in of_rank.items()}
    whole = dict(state)
    if "optimizer" in whole:
        whole["optimizer"] = optimizer.joined([of_rank["optimizer"] for of_rank in trees])
    extra = sorted({name for of_rank in trees for name in of_rank.get(EXTRA_STATE, ())})
    return whole | ({EXTRA_STATE: extra} if extra else {}), aliases


def _put(path: str, leaf: object) -> tree.Plain | None:
    if isinstance(leaf, torch.Tensor):
        data = leaf.detach().cpu().contiguous()
        return tree.Plain({_TENSOR: [DTYPE_NAMES[leaf.dtype], list(leaf.shape), bytes(host_bytes(data))]})
    number = leaf.item() if isinstance(leaf, np.generic) else None
    return None if number is None else tree.Plain(number)


def _with_tensors(value: Any) -> Any:
    """Returns an unpacked tree with tensors in the places of the maps that stand for them."""
    if isinstance(value, dict) and value.keys() == {_TENSOR}:
        dtype, shape, data = value[_TENSOR]
        return torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[dtype]).view(shape)
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_tensors, value))
    return value
