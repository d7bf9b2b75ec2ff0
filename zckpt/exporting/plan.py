"""Plans what an export writes, as frozen data: its files, and the elements of the source that each byte is made of.

Nothing here reads or writes. Whoever has the tensors, a checkpoint or a live engine, fills the ``windows`` of a file.
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
"""A tensor whose elements lie in runs of fewer bytes in the source is converted as a whole, because reading so short
runs takes longer."""
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64",
    "U64",
)  # fmt: skip
"""The dtypes in the order in which the safetensors library sorts tensors. The tensors of the last dtype come first."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class SourceTensor(NamedTuple):
    """A tensor that the export is made from."""

    dtype: str
    """Safetensors' name of the dtype that the tensor is converted to, such as ``"BF16"``."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Run(NamedTuple):
    """The elements ``[start, stop)`` of the tensor ``source``, in row-major order."""

    source: str
    start: int
    stop: int


class Memory(NamedTuple):
    """The memory in which transformers would have a tensor when it saves it."""

    number: int
    """A number that no other memory has. Tensors with the same number share memory."""
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
    runs: tuple[Run, ...] | None
    """The elements of sources that make up the tensor, in this order. None means that a ``Conversion`` makes it."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of tensors that have to be whole in memory."""

    sources: tuple[str, ...]
    """The names of the tensors that are converted."""
    outputs: tuple[str, ...]
    """The names of the tensors that the conversion makes."""
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    """Returns the outputs by name, given the sources by name. It may return other tensors too."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that consists of tensors and of bytes that are known already, such as its header."""

    name: str
    """The name of the file."""
    nbytes: int
    """The size of the file in bytes."""
    known: Mapping[int, bytes]
    """The bytes that are known already, by the byte of the file at which they begin."""
    tensors: Mapping[int, OutputTensor]
    """The tensors, by the byte of the file at which they begin."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Everything that an export writes."""

    files: tuple[OutputFile, ...]
    """The files that are made of tensors."""
    conversions: tuple[Conversion, ...] = ()
    """The conversions that make those tensors of ``files`` that have no runs."""
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    """The content of all other files, such as the index, by their names."""


# Which elements of the source a tensor has


def runs_of_view(source: str, shape: Sequence[int], strides: Sequence[int], start: int) -> tuple[Run, ...]:
    """Returns the runs of a view of a contiguous tensor. The view begins at the tensor's element ``start``, and has
    ``shape`` and ``strides``."""
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
    """Returns the largest number of runs that ``runs_of_view`` can find."""
    inner, dims = 1, len(shape)
    while dims and (shape[dims - 1] == 1 or strides[dims - 1] == inner):
        dims -= 1
        inner *= shape[dims]
    return math.prod(shape[:dims])


# Files


def size_in_bytes(given: int | str) -> int:
    """Returns a size in bytes, given as a number or as a text such as "5GB", "500 MB", "1.5GB" or "4096". Units are
    powers of 1000, as those of Hugging Face are. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B|)\s*", str(given), re.IGNORECASE)
    nbytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if nbytes < 1:
        raise ValueError(f"a size must be a number of bytes or a text such as '5GB' or '500MB', got {given!r}")
    return nbytes


def split_into_files(
    tensors: Sequence[OutputTensor], bytes_max: int, memory: Mapping[str, Memory] | None = None
) -> list[list[OutputTensor]]:
    """Returns the tensors of each file, split as Hugging Face splits them. Each file has as many tensors as fit in
    ``bytes_max``, in their order. A tensor that is larger gets a file of its own, which comes before the one that is
    being filled. Tensors that share ``memory`` stay together, and their memory is counted once."""
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
        current += block
        current_bytes += nbytes
    return [*files, current] if current or not files else files


def safetensors_files(shards: Sequence[Sequence[OutputTensor]], stem: str = "model") -> tuple[OutputFile, ...]:
    """Plans the files of all shards. They are named as Hugging Face names them: ``<stem>.safetensors`` if there is one,
    and ``<stem>-00001-of-0000n.safetensors`` and so on if there are several."""
    if len(shards) == 1:
        return (safetensors_file(f"{stem}.safetensors", shards[0]),)
    return tuple(
        safetensors_file(f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors", shard)
        for number, shard in enumerate(shards, 1)
    )


def safetensors_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Plans a file with the same bytes that the safetensors library writes."""
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


# Windows of a file


class WindowPart(NamedTuple):
    """Bytes of a window: either ``known`` ones, or elements of a source."""

    offset: int
    """The byte of the window at which the part begins."""
    known: bytes | None
    """The bytes themselves. None means that they are elements of a source."""
    source: str = ""
    """The name of the source."""
    start: int = 0
    """The first element of the source."""
    stop: int = 0
    """The element after the last one."""
    dtype: str = "U8"
    """Safetensors' name of the dtype that the elements are written in."""

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        if self.known is not None:
            return len(self.known)
        return (self.stop - self.start) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a file: ``nbytes`` bytes from byte ``start`` on, which ``parts`` fill without a gap."""

    start: int
    nbytes: int
    parts: tuple[WindowPart, ...]


def windows(
    file: OutputFile, bytes_max: int, cut: Callable[[str, int, int], int] = lambda source, start, stop: stop
) -> Iterator[Window]:
    """Cuts a file into windows of at most ``bytes_max`` bytes, in the order of the file. Tensors that conversions make
    are left out. Only a tensor that is larger than a window is cut.

    ``cut(source, start, stop)``: returns at which element a part had better end. The elements ``[start, stop)`` fill
    the window; the result has to be after ``start``, and at most ``stop``.
    """
    own: list[WindowPart] = []
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
            for start in range(0, whole, bytes_max):
                if start:
                    yield from take()
                    first = stop
                own.append(WindowPart(stop - first, content[start : start + bytes_max]))
                stop = begin + min(start + bytes_max, whole)
            continue
        item = ITEM_BYTES[content.dtype]
        for source, start, run_stop in content.runs or ():
            while start < run_stop:
                if stop - first + item > bytes_max:
                    yield from take()
                    first = stop
                end = min(run_stop, start + (bytes_max - (stop - first)) // item)
                end = end if end == run_stop else cut(source, start, end)
                own.append(WindowPart(stop - first, None, source, start, end, content.dtype))
                stop += (end - start) * item
                if end < run_stop:
                    yield from take()
                    first = stop
                start = end
    yield from take()
