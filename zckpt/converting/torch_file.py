"""Writes a file that ``torch.load`` reads, with no more than a few MiB of its tensors in memory at a time.

Such a file is a zip archive without compression. It has a pickle of the tree, and a record for each storage, to which
the tensors of the pickle refer by number. The tree may hold anything that pickle can hold. It has a ``View`` wherever
the file has a tensor.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ALIGNMENT_BYTES = 64
"""Every storage begins at a multiple of this many bytes, so that it can be mapped. torch does the same."""
LOCAL_HEADER_BYTES = 30
"""The size of the fixed part of the header before each record. The record's name and its extra fields follow it."""
SIZES_FIELD_BYTES = 20
"""The size of the extra field with the sizes of a large record, which ``zipfile`` puts before the other fields."""
PADDING_FIELD = b"FB"
"""The id of the extra field that is used as padding. torch uses the same one."""


class Source(NamedTuple):
    """The elements ``[start, stop)`` of the tensor ``key`` of a checkpoint, which begin at element ``at`` of a storage.
    If the values of the tensor differ from rank to rank, those of ``rank`` are taken."""

    key: str
    start: int
    stop: int
    at: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage of ``numel`` elements. They are those of ``values`` if it is given. Otherwise they are those of
    ``sources``, and zero where no source has an element."""

    dtype: torch.dtype
    numel: int
    sources: Sequence[Source] = ()
    values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A contiguous tensor, whose elements are those of a storage from the first one on."""

    storage: Storage
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class that need not be installed here."""

    module: str
    name: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements ``[start, stop)`` of a storage, which are in a buffer from byte ``at`` on."""

    storage: Storage
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.storage.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A tree as the bytes of its pickle, and the storages that it refers to, in the order of their numbers."""

    pickled: bytes
    storages: tuple[Storage, ...]

    @classmethod
    def of(cls, tree: object) -> TorchFile:
        """Plans the file of a tree. Raises what pickle raises for a value that it cannot hold."""
        data = io.BytesIO()
        pickler = _Pickler(data)
        pickler.dump(tree)
        return cls(data.getvalue(), tuple(pickler.storages))

    @property
    def nbytes(self) -> int:
        """About the size of the file in bytes. The headers of its records are not counted."""
        return len(self.pickled) + sum(storage.nbytes + ALIGNMENT_BYTES for storage in self.storages)

    def write(self, file: IO[bytes], buffer: torch.Tensor, fill: Callable[[Sequence[Chunk]], None]) -> None:
        """Writes the file. ``fill`` puts the elements of some chunks into ``buffer``, which is uint8 in host memory.
        Raises OSError, and what ``fill`` raises."""
        archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        try:
            for name, raw in (("data.pkl", self.pickled), ("byteorder", b"little"), ("version", b"3\n")):
                with _record(archive, name) as record:
                    record.write(raw)
            numbers = {storage: number for number, storage in enumerate(self.storages)}
            for chunks in _batches(self.storages, buffer.numel()):
                fill(chunks)
                for chunk in chunks:
                    if chunk.start == 0:
                        record = _record(archive, f"data/{numbers[chunk.storage]}")
                    record.write(host_bytes(buffer[chunk.at : chunk.at + chunk.nbytes]).data)
                    if chunk.stop == chunk.storage.numel:
                        record.close()
            archive.close()
        except BaseException:
            archive.fp = None  # keeps `zipfile` from completing a file that is of no use
            raise


def _batches(storages: Sequence[Storage], room_bytes: int) -> Iterator[list[Chunk]]:
    """Cuts all storages into chunks, and puts as many of them together as fit in the buffer."""
    batch: list[Chunk] = []
    used = 0
    for storage in storages:
        start, item = 0, storage.dtype.itemsize
        while True:
            count = min(storage.numel - start, (room_bytes - used) // item)
            batch.append(Chunk(storage, start, start + count, used))
            start, used = start + count, -(-(used + count * item) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if start == storage.numel:
                break
            yield batch
            batch, used = [], 0
        if used + ALIGNMENT_BYTES > room_bytes:
            yield batch
            batch, used = [], 0
    if batch:
        yield batch


def _record(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Begins a record. Its data begin at a multiple of ALIGNMENT_BYTES."""
    info = zipfile.ZipInfo(f"archive/{name}")
    assert archive.fp is not None
    begins = archive.fp.tell() + LOCAL_HEADER_BYTES + len(info.filename) + SIZES_FIELD_BYTES + 4
    padding = -begins % ALIGNMENT_BYTES
    info.extra = PADDING_FIELD + padding.to_bytes(2, "little") + bytes(padding)
    return archive.open(info, "w", force_zip64=True)


class _Pickler(pickle._Pickler):  # the pickler written in Python: the one in C cannot write objects of absent classes
    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch}
    write: Any
    memoize: Any
    save: Any

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)  # the protocol of torch.save
        self.storages: dict[Storage, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        number = self.storages.setdefault(obj, len(self.storages))
        kind = _storage_type(obj.dtype)
        if kind is None:
            return "storage", torch.UntypedStorage, str(number), "cpu", obj.nbytes
        return "storage", getattr(torch, kind), str(number), "cpu", obj.numel

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            values = obj.detach().cpu().contiguous()
            obj = View(Storage(values.dtype, values.numel(), values=values), tuple(values.shape))
        if not isinstance(obj, View):
            return NotImplemented
        stride = torch.empty(obj.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (obj.storage, 0, obj.shape, stride, False, OrderedDict())
        if _storage_type(obj.storage.dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*arguments, obj.storage.dtype)
        return torch._utils._rebuild_tensor_v2, arguments

    def save_instance(self, obj: Instance) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
        self.save(dict(obj.attributes))
        self.write(pickle.BUILD)

    dispatch[Instance] = save_instance


def _storage_type(dtype: torch.dtype) -> str | None:
    """Returns the name of torch's class for storages of ``dtype``, or None for newer dtypes, which have no such
    class."""
    name: str | None = torch.storage._dtype_to_storage_type_map().get(dtype)
    return name
