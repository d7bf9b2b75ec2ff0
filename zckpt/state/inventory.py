"""What one rank holds of a training state: fragments of tensors, and where their bytes are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

TIERS = ("device", "host", "nvme")
"""Where a state lives when it is saved. The order is the numbering of the format (spec, files)."""

MASTER, PARAM, BUFFER, STATE = "master", "param", "buffer", "state"
"""The parts with a meaning of their own. ``master``: the weights that the optimizer updates, also where no others are
kept, as in fp32. ``param``: all weights as the model computes with them; those that have a master are derived from it.
``buffer``: the module's persistent buffers. ``state``: the trees of non-tensor state and the arrays inside them; it is
not listed among a model's tensors, and no adapter returns it.

Every other part is a *moment*: what an optimizer keeps in the shape of the weights, under torch's name for it.
"""
RESERVED_PARTS = frozenset({MASTER, PARAM, BUFFER, STATE})
ANY_TIME = frozenset({PARAM, BUFFER, STATE})
"""The parts that may change without a step of the optimizer: a model's own forward updates what it does not train."""
GRADIENT = "gradient"
"""Gradients between a backward pass and the step that uses them, and the buffers that they are reduced in. An engine
holds them in memory, but no checkpoint has them."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes ``[offset, offset + nbytes)`` of a file that holds a state on disk while it is not in use: a swap file."""

    path: str
    offset: int
    nbytes: int

    def narrow(self, start: int, nbytes: int) -> FileSpan:
        """``nbytes`` from byte ``start`` of this span on."""
        return FileSpan(self.path, self.offset + start, nbytes)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``[start, stop)`` of one tensor, in row-major order, as one rank holds them.

    ``data`` is where the bytes are: a contiguous 1-D tensor of ``stop - start`` elements that shares memory with the
    state itself (never a copy), or a range of a swap file; None while only the geometry is asked for. ``copy`` numbers
    rank-local values of one tensor, such as a buffer that differs from rank to rank: 0 is the value everybody else
    reads.
    """

    part: str
    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """safetensors name: F32, BF16, ..."""
    start: int
    stop: int
    tier: str = "device"
    copy: int = 0
    data: torch.Tensor | FileSpan | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def place(self) -> tuple[str, int] | None:
        """Where the bytes of ``data`` begin: the path of a swap file and an offset in it, or the empty path and an
        address in host memory. None for the memory of a device, and without data."""
        data = self.data
        if isinstance(data, FileSpan):
            return data.path, data.offset
        return ("", data.data_ptr()) if data is not None and data.is_cpu else None


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that one rank writes, or wants to read.

    ``fragments`` stand in the order in which they lie in memory, part by part: that is the order of the files.
    ``aliases`` maps the further names of tied weights to the one under which the tensor is kept.
    """

    fragments: tuple[Fragment, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holding:
    """A place in which an engine holds values of one part of its state, on one rank."""

    part: str
    """``master``, ``exp_avg``, ``param``, ``buffer``, ``gradient``, ..."""
    name: str
    """What errors call it: the name of its parameter or buffer, that of the first one where there are several, or what
    the framework calls the memory."""
    data: torch.Tensor | FileSpan
    """A dense tensor of any shape, which has elements, or the range of a swap file. Tensors may be views, and several
    holdings may share a storage."""
    dtype: torch.dtype
    workspace: bool = False
    """Whether nobody needs the values that are in this memory now: the engine uses it only while it computes."""
