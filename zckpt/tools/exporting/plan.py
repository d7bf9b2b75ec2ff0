"""Plans the files of an export as frozen data: which elements of the source each byte of a file is made of.

Nothing here reads or writes. The source of the tensors, a checkpoint or a live engine, fills the ``windows`` of a file.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zckpt.format.dtypes import ITEM_BYTES
from zckpt.geometry import all_of, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from zckpt.geometry import Ints, Span

EXTENT_BYTES_MIN = 4096
"""The fewest bytes of an extent, on average. A tensor with shorter extents is converted as a whole, because reading
such short extents takes longer."""
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64",
    "U64",
)  # fmt: skip
"""The dtypes in the reverse of the order in which the safetensors library writes tensors. The tensors of the last dtype
come first in a file."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class SourceTensor(NamedTuple):
    """A tensor of the source of an export."""

    dtype: str
    """Safetensors' name of the dtype that the tensor is converted to, such as ``"BF16"``."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    @property
    def all(self) -> Span:
        """The span of all elements."""
        return all_of(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.all.numel


class Extent(NamedTuple):
    """Adjacent elements of a source tensor."""

    source: str
    """The name of the source tensor."""
    span: Span
    """The elements."""

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the extent. ``source``: all elements of the source tensor, as a 1-D tensor."""
        return source[self.span.start : self.span.stop]


class Memory(NamedTuple):
    """A block of memory in which transformers would have one or several tensors when it saves them."""

    number: int
    """A number that identifies the memory. Tensors with the same number share memory."""
    nbytes: int
    """The size of the memory in bytes."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor as it is exported."""

    name: str
    """The key of the tensor in its file."""
    dtype: str
    """Safetensors' name of the dtype."""
    shape: tuple[int, ...]
    """The shape of the tensor."""
    extents: tuple[Extent, ...] | None
    """The extents whose elements make up the tensor, in order. None means that ``conversion`` makes the tensor."""
    conversion: Conversion | None = None
    """The conversion that makes the tensor, under its name."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A computation that makes tensors, or parts of tensors, from elements that are in memory at the same time."""

    sources: tuple[Extent, ...]
    """The elements that are read."""
    convert: Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]
    """A function that takes the elements of each extent as a 1-D tensor, and returns the outputs by name. It does not
    change these tensors, and it may return other tensors too."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that consists of tensors and of bytes that are known already, such as its header."""

    name: str
    """The name of the file."""
    nbytes: int
    """The size of the file in bytes."""
    known: Mapping[int, bytes]
    """The bytes that are known already, by the offset in the file at which they begin."""
    tensors: Mapping[int, OutputTensor]
    """The tensors, by the offset in the file at which they begin, in bytes."""

    @property
    def conversions(self) -> dict[Conversion, list[tuple[int, str]]]:
        """The conversions that make tensors of the file: the offset in the file and the name of each of these
        tensors."""
        places: dict[Conversion, list[tuple[int, str]]] = {}
        for offset, tensor in self.tensors.items():
            if tensor.conversion is not None:
                places.setdefault(tensor.conversion, []).append((offset, tensor.name))
        return places


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The plan of everything that an export writes."""

    files: tuple[OutputFile, ...]
    """The files that are made of tensors."""
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of all other files, such as the index, by the names of the files."""
    sources: Mapping[str, SourceTensor] = field(default_factory=dict)
    """All tensors of the source, by name, with the dtypes in which they are read."""
    left_out: tuple[str, ...] = ()
    """The names of the tensors of the source that are not exported."""


# Files


def size_in_bytes(size: int | str) -> int:
    """Returns the number of bytes of a size, which is a number or a text such as "5GB", "500 MB", "1.5GB" or "4096".
    Units are powers of 1000, as in Hugging Face's libraries. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B|)\s*", str(size), re.IGNORECASE)
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if nbytes < 1:
        raise ValueError(f"a size must be a number of bytes or a text such as '5GB' or '500MB', got {size!r}")
    return nbytes


def split_into_files(
    tensors: Sequence[OutputTensor], bytes_max: int, memory: Mapping[str, Memory] | None = None
) -> list[list[OutputTensor]]:
    """Returns the tensors of each file, split as Hugging Face splits them. Each file has as many tensors as fit in
    ``bytes_max``, in their order. A larger tensor gets a file of its own, which comes before the file that is being
    filled. ``memory``: the memory of each tensor, by its name. Tensors that share memory stay together, and their
    memory is counted once. None means that no tensors share memory."""
    blocks: dict[Memory, list[OutputTensor]] = {}
    for number, tensor in enumerate(tensors):
        block_memory = memory[tensor.name] if memory else Memory(number, tensor.nbytes)
        blocks.setdefault(block_memory, []).append(tensor)
    files: list[list[OutputTensor]] = []
    current: list[OutputTensor] = []
    current_bytes = 0
    for (_, nbytes), block in blocks.items():
        if nbytes > bytes_max:
            files.append(block)
            continue
        if current_bytes + nbytes > bytes_max:
            files.append(current)
            current, current_bytes = [], 0
        current += block
        current_bytes += nbytes
    return [*files, current] if current or not files else files


def safetensors_files(groups: Sequence[Sequence[OutputTensor]]) -> tuple[OutputFile, ...]:
    """Plans a file for each group of tensors. The files have the names that Hugging Face gives them:
    ``model.safetensors`` for a single file, and ``model-00001-of-0000n.safetensors`` and so on for several."""
    if len(groups) == 1:
        return (safetensors_file("model.safetensors", groups[0]),)
    return tuple(
        safetensors_file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    )


def safetensors_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Plans a file with the same bytes that the safetensors library writes."""
    ordered = sorted(tensors, key=lambda tensor: (-_ORDER.index(tensor.dtype), tensor.name))
    stops = list(itertools.accumulate((tensor.nbytes for tensor in ordered), initial=0))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, stop) in zip(ordered, itertools.pairwise(stops), strict=True):
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, stop)}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {len(header) + start: tensor for start, tensor in zip(stops, ordered, strict=False) if tensor.nbytes}
    return OutputFile(name, len(header) + stops[-1], {0: header}, places)


# Windows of a file


class WindowPart(NamedTuple):
    """A part of a window."""

    offset: int
    """The byte of the window at which the part begins."""
    content: bytes | Extent
    """The bytes of the part, or the elements of a source tensor that make it up."""
    dtype: str = "U8"
    """Safetensors' name of the dtype in which elements are written."""

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.span.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Window:
    """A range of bytes of a file that is written at once."""

    start: int
    """The offset of the window in the file, in bytes."""
    nbytes: int
    """The size of the window in bytes."""
    parts: tuple[WindowPart, ...]
    """The parts that fill the window without a gap."""


def windows(
    file: OutputFile, bytes_max: int, cut: Callable[[Extent], int] = lambda extent: extent.span.stop
) -> Iterator[Window]:
    """Yields the windows of a file, which have at most ``bytes_max`` bytes, in their order. Tensors that conversions
    make are left out. Only a tensor that is larger than a window is cut.

    ``cut(extent)``: returns the element of a source tensor at which it is best to end a part. The elements of
    ``extent`` would fill the window. The result has to be one of them after the first one, or the end of the span.
    """
    parts: list[WindowPart] = []
    first = stop = 0

    def take() -> Iterator[Window]:
        if parts:
            yield Window(first, stop - first, tuple(parts))
        parts.clear()

    places: dict[int, bytes | OutputTensor] = {**file.known, **file.tensors}
    for begin in sorted(places):
        content = places[begin]
        nbytes = len(content) if isinstance(content, bytes) else content.nbytes
        if begin != stop or stop - first + nbytes > bytes_max:
            yield from take()
            first = stop = begin
        if isinstance(content, bytes):
            for start in range(0, nbytes, bytes_max):
                if start:
                    yield from take()
                    first = stop
                parts.append(WindowPart(stop - first, content[start : start + bytes_max]))
                stop = begin + min(start + bytes_max, nbytes)
            continue
        item = ITEM_BYTES[content.dtype]
        for source, span in content.extents or ():
            while span.numel:
                if stop - first + item > bytes_max:
                    yield from take()
                    first = stop
                part = span.narrow(0, min(span.numel, (bytes_max - (stop - first)) // item))
                if part.numel < span.numel:
                    part = part.narrow(0, cut(Extent(source, part)) - part.start)
                parts.append(WindowPart(stop - first, Extent(source, part), content.dtype))
                stop += part.numel * item
                if part.numel < span.numel:
                    yield from take()
                    first = stop
                span = span.narrow(part.numel, span.numel - part.numel)
    yield from take()


def runs_of_view(shape: Sequence[int], strides: Sequence[int], start: int) -> tuple[Ints, Ints]:
    """Returns the elements of a view, in the row-major order of the view, as runs of adjacent elements of the tensor:
    the first element of each run, and the number of elements. ``shape``, ``strides``, ``start``: the shape of the view,
    its strides in elements, and the element of the tensor at which it begins."""
    if 0 in shape:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    dims, inner = _outer_dims(shape, strides)
    first = np.array([start], np.int64)
    for size, stride in zip(dims, strides, strict=False):
        first = (first[:, None] + np.arange(size) * stride).ravel()
    begins, stops = joined(first, first + inner)
    return begins, stops - begins


def count_runs(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the largest number of runs that ``runs_of_view`` can return for a view of this shape."""
    return math.prod(_outer_dims(shape, strides)[0])


def _outer_dims(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns the sizes of the first dimensions of a view, up to the last one whose elements are not adjacent, and the
    number of elements in all other dimensions."""
    inner, dims = 1, len(shape)
    while dims and (shape[dims - 1] == 1 or strides[dims - 1] == inner):
        dims -= 1
        inner *= shape[dims]
    return tuple(shape[:dims]), inner
