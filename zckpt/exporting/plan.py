"""What an export writes, as frozen data: its files, and of which elements of the source each byte of them is made.

Nothing here reads or writes: whoever has the tensors, a checkpoint or a live engine, fills the ``windows`` of a file.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from zckpt.format.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

RUN_BYTES_MIN = 4096
"""A tensor whose elements lie in shorter runs in the source is converted whole: to read such runs takes longer."""
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64",
    "U64",
)  # fmt: skip
"""Safetensors files have the tensors of the last of these dtypes first."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Source(NamedTuple):
    """A tensor that the export is made of, with the dtype that it is converted to on the way."""

    dtype: str
    """safetensors name: F32, BF16, ..."""
    shape: tuple[int, ...]


class Run(NamedTuple):
    """Elements ``[start, stop)`` of the tensor ``source``, in row-major order."""

    source: str
    start: int
    stop: int


class Memory(NamedTuple):
    """The memory in which transformers would have a tensor when it saves it: a number of its own, and its bytes."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor as it is exported: the elements of ``runs``, one after the other. None: a ``Conversion`` makes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...] | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that have to be whole in memory to be converted: ``convert`` makes ``outputs`` of ``sources``, and may
    return other tensors too. Both are dicts by name."""

    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that consists of tensors and of bytes that are known already, such as its header. Both are listed by the
    byte of the file at which they begin."""

    name: str
    nbytes: int
    known: Mapping[int, bytes]
    tensors: Mapping[int, OutputTensor]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """``files`` are made of tensors; ``small_files``, such as the index, are known by their content."""

    files: tuple[OutputFile, ...]
    conversions: tuple[Conversion, ...] = ()
    small_files: Mapping[str, bytes] = field(default_factory=dict)


# Which elements of the source a tensor has


def runs_of_view(source: str, shape: Sequence[int], strides: Sequence[int], start: int) -> tuple[Run, ...]:
    """The runs of a view of a contiguous tensor, from whose element ``start`` on the view steps by ``strides``."""
    if 0 in shape:
        return ()
    inner, dims = 1, len(shape)
    while dims and (shape[dims - 1] == 1 or strides[dims - 1] == inner):
        dims -= 1
        inner *= shape[dims]
    found: list[Run] = []
    for position in itertools.product(*map(range, shape[:dims])):
        first = start + sum(map(int.__mul__, position, strides))
        if found and found[-1].stop == first:
            found[-1] = found[-1]._replace(stop=first + inner)
        else:
            found.append(Run(source, first, first + inner))
    return tuple(found)


def count_runs(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The most runs that ``runs_of_view`` finds."""
    inner, dims = 1, len(shape)
    while dims and (shape[dims - 1] == 1 or strides[dims - 1] == inner):
        dims -= 1
        inner *= shape[dims]
    return math.prod(shape[:dims])


# Files


def size_in_bytes(given: int | str) -> int:
    """Bytes, from a number or a text such as "5GB", "500 MB", "1.5GB" or "4096". Units are powers of 1000, as Hugging
    Face has them. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B|)\s*", str(given), re.IGNORECASE)
    nbytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if nbytes < 1:
        raise ValueError(f"a size must be a number of bytes or a text such as '5GB' or '500MB', got {given!r}")
    return nbytes


def split_into_files(
    tensors: Sequence[OutputTensor], bytes_max: int, memory: Mapping[str, Memory] | None = None
) -> list[list[OutputTensor]]:
    """The tensors of each file, as Hugging Face splits them: each file has as many as fit in ``bytes_max``, in their
    order. A tensor that is larger has a file of its own, before the one that is being filled. Tensors in one
    ``memory`` stay together, and count as that."""
    blocks: dict[Memory, list[OutputTensor]] = {}
    for number, tensor in enumerate(tensors):
        own = memory[tensor.name] if memory else Memory(number, tensor.nbytes)
        blocks.setdefault(own, []).append(tensor)
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
        current = current + block
        current_bytes += nbytes
    return [*files, current] if current or not files else files


def safetensors_files(shards: Sequence[Sequence[OutputTensor]], stem: str = "model") -> tuple[OutputFile, ...]:
    """``<stem>.safetensors``, or ``<stem>-00001-of-0000n.safetensors`` and so on, as Hugging Face names them."""
    if len(shards) == 1:
        return (safetensors_file(f"{stem}.safetensors", shards[0]),)
    return tuple(
        safetensors_file(f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors", shard)
        for number, shard in enumerate(shards, 1)
    )


def safetensors_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """A file with the bytes that the safetensors library writes."""
    ordered = sorted(tensors, key=lambda one: (-_ORDER.index(one.dtype), one.name))
    stops = list(itertools.accumulate((one.nbytes for one in ordered), initial=0))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for one, (start, stop) in zip(ordered, itertools.pairwise(stops), strict=True):
        entries[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": (start, stop)}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {len(header) + start: one for start, one in zip(stops, ordered, strict=False) if one.nbytes}
    return OutputFile(name, len(header) + stops[-1], {0: header}, places)


# Slices of a file


class Slice(NamedTuple):
    """Bytes of a file from byte ``offset`` of its window on: ``known``, or, if that is None, elements ``[start, stop)``
    of ``source`` as ``dtype``."""

    offset: int
    known: bytes | None
    source: str = ""
    start: int = 0
    stop: int = 0
    dtype: str = "U8"

    @property
    def nbytes(self) -> int:
        if self.known is not None:
            return len(self.known)
        return (self.stop - self.start) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Window:
    """``nbytes`` of a file from byte ``start`` on, which ``slices`` fill without a gap."""

    start: int
    nbytes: int
    slices: tuple[Slice, ...]


def windows(
    file: OutputFile, bytes_max: int, cut: Callable[[str, int, int], int] = lambda source, start, stop: stop
) -> Iterator[Window]:
    """Cuts all of a file but what conversions make into windows of at most ``bytes_max``, in the order of the file.

    ``cut(source, start, stop)``: where a slice of these elements, which fill a window, had better end; an element after
    ``start``, at most ``stop``. No tensor but a larger one than a window is cut.
    """
    own: list[Slice] = []
    first = stop = 0

    def take() -> Iterator[Window]:
        if own:
            yield Window(first, stop - first, tuple(own))
        own.clear()

    places: dict[int, bytes | OutputTensor] = {**file.known, **file.tensors}
    for begin in sorted(places):
        content = places[begin]
        whole = len(content) if isinstance(content, bytes) else content.nbytes
        if begin != stop or stop - first + whole > bytes_max:
            yield from take()
            first = stop = begin
        if isinstance(content, bytes):
            own.append(Slice(begin - first, content))
            stop = begin + whole
            continue
        item = ITEM_BYTES[content.dtype]
        for source, start, run_stop in content.runs or ():
            while start < run_stop:
                if stop - first + item > bytes_max:
                    yield from take()
                    first = stop
                end = min(run_stop, start + (bytes_max - (stop - first)) // item)
                end = end if end == run_stop else cut(source, start, end)
                own.append(Slice(stop - first, None, source, start, end, content.dtype))
                stop += (end - start) * item
                if end < run_stop:
                    yield from take()
                    first = stop
                start = end
    yield from take()
