"""Writes and loads the same tensors by torch.save, safetensors and PyTorch's distributed checkpoint (DCP).

Every write is durable when it returns. Every load returns tensors that own their memory.
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
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)  # it fsyncs its files itself
    make_durable(path)


def torch_load(path: Path) -> Tensors:
    tensors: Tensors = torch.load(path)
    return tensors


def safetensors_load(path: Path) -> Tensors:
    """Copies the tensors that safetensors maps from the file, because mapped tensors do not own their memory."""
    return {key: tensor.clone() for key, tensor in safetensors.torch.load_file(path).items()}


def safetensors_pread(path: Path) -> Tensors:
    return safetensors.torch.load_file(path, backend="pread")


def dcp_load_into(state: Tensors, path: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def dcp_load(like: Tensors) -> Callable[[Path], Tensors]:
    """Returns a function that loads tensors like these. DCP needs a destination, so making it is part of the load."""

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
