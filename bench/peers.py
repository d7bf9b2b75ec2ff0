"""How others write and load the same tensors: torch.save, safetensors and PyTorch's distributed checkpoint (DCP).

Every write is durable when it returns, every load returns tensors in memory of their own.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from common import make_durable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Tensors = dict[str, torch.Tensor]

warnings.filterwarnings("ignore", message=".*torch.distributed is .*", category=UserWarning)


def torch_save(state: Tensors, path: Path) -> None:
    torch.save(state, path)
    make_durable(path)


def safetensors_save(state: Tensors, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    make_durable(path)


def dcp_save(state: Tensors, path: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)  # which fsyncs its files
    make_durable(path)


def torch_load(path: Path) -> Tensors:
    found: Tensors = torch.load(path)
    return found


def safetensors_load(path: Path) -> Tensors:
    """By its map of the file, copied: what a map shows is the file's, and lost with it."""
    return {key: tensor.clone() for key, tensor in safetensors.torch.load_file(path).items()}


def safetensors_pread(path: Path) -> Tensors:
    return safetensors.torch.load_file(path, backend="pread")


def dcp_load_into(state: Tensors, path: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def dcp_load(like: Tensors) -> Callable[[Path], Tensors]:
    """DCP asks for the destination, so it is made here: that is part of loading."""

    def load(path: Path) -> Tensors:
        state = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in like.items()}
        dcp_load_into(state, path)
        return state

    return load


SAVES: dict[str, Callable[[Tensors, Path], None]] = {
    "torch.save": torch_save,
    "safetensors": safetensors_save,
    "DCP": dcp_save,
}
