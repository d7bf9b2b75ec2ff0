"""Plans a file as ``torch.save`` writes it, without having its tensors in memory.

Such a file is a zip archive without compression. It contains a pickle of a tree, and a record for each storage. The
tensors of the pickle refer to the storages by number. The tree may contain anything that can be pickled. It has a
``View`` in the place of each tensor.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

import torch

from zckpt.geometry import all_of
from zckpt.tools.exporting.plan import ExportPlan, Extent, OutputFile, OutputTensor
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.tools.exporting.plan import SourceTensor


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage of a tensor, with the elements that are written to it."""

    dtype: torch.dtype
    """The dtype of the elements."""
    numel: int
    """The number of elements."""
    extents: Mapping[int, Extent] = field(default_factory=dict)
    """The extents of the source that are written to the storage, by the element of the storage at which each begins.
    All other elements are zero."""
    values: bytes | None = None
    """The bytes of all elements, if they are known already. There are no ``extents`` then."""

    @property
    def nbytes(self) -> int:
        """The size of the storage in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A contiguous tensor that begins at the first element of a storage."""

    storage: Storage
    """The storage that has the elements."""
    shape: tuple[int, ...]
    """The shape of the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object to be pickled whose class need not be installed."""

    module: str
    """The name of the module of the class."""
    name: str
    """The name of the class."""
    attributes: Mapping[str, Any]
    """The attributes of the object."""


def plan_torch_file(names: Mapping[str, str], sources: Mapping[str, SourceTensor], file: str) -> ExportPlan:
    """Plans a file from which ``torch.load`` with ``weights_only=True`` returns a dict of all tensors. In this dict, a
    tied weight has all of its names, which share its memory. ``names``: maps the names of the tensors to their names in
    ``sources``. ``file``: the name of the file."""
    views = {
        source: View(Storage(TORCH_DTYPES[tensor.dtype], tensor.numel, {0: Extent(source, tensor.all)}), tensor.shape)
        for source, tensor in sources.items()
    }
    return ExportPlan((torch_file(file, {name: views[source] for name, source in names.items()}),))


def torch_file(name: str, tree: object) -> OutputFile:
    """Plans a file from which ``torch.load`` returns ``tree``. Raises the errors of pickle for a value that cannot be
    pickled.

    torch itself lays out the file, with gaps in the place of the tensors. So the checksums of the zip records are not
    those of the tensors, as with ``torch.serialization.set_crc32_options(False)``. torch does not read them.
    """
    pickled, file = io.BytesIO(), _Known()
    pickler = _Pickler(pickled)
    pickler.dump(tree)
    with torch.serialization._open_zipfile_writer(cast("IO[bytes]", file)) as archive:
        for record, raw in (("data.pkl", pickled.getvalue()), ("byteorder", b"little")):
            archive.write_record(record, raw, len(raw))
        for number, storage in enumerate(pickler.storages):
            if storage.values is not None:
                archive.write_record(f"data/{number}", storage.values, storage.nbytes)
            else:
                archive.write_record_metadata(f"data/{number}", storage.nbytes)
    tensors, known = {}, {offset: bytes(raw) for offset, raw in file.known.items()}
    left_out = [storage for storage in pickler.storages if storage.values is None and storage.nbytes]
    for begin, storage in zip(file.gaps, left_out, strict=True):
        dtype, stop = DTYPE_NAMES[storage.dtype], 0
        for start, extent in sorted({**storage.extents, storage.numel: Extent("", all_of((0,)))}.items()):
            if stop < start:
                known[begin + stop * storage.dtype.itemsize] = bytes((start - stop) * storage.dtype.itemsize)
            numel = extent.span.numel
            if numel:
                tensor = OutputTensor(extent.source, dtype, (numel,), (extent,))
                tensors[begin + start * storage.dtype.itemsize] = tensor
            stop = start + numel
    return OutputFile(name, file.nbytes, known, tensors)


class _Known(io.RawIOBase):
    """A file in memory to which ``torch.save`` writes everything but the values of the tensors."""

    def __init__(self) -> None:
        self.known: dict[int, bytearray] = {}
        """The bytes that torch has written, by the offset in the file at which they begin."""
        self.gaps: list[int] = []
        """The offsets in the file at which the missing records begin."""
        self.nbytes = self._start = 0

    def write(self, data: Any) -> int:
        self.known.setdefault(self._start, bytearray()).extend(data)
        self.nbytes += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR
        self.gaps.append(self.nbytes)
        self._start = self.nbytes = self.nbytes + offset
        return self.nbytes


class _Pickler(pickle._Pickler):  # The pickler in C cannot write an object whose class is not installed.
    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch}
    write: Any
    memoize: Any
    save: Any

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)  # torch.save uses this protocol.
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
            obj = View(Storage(values.dtype, values.numel(), values=host_bytes(values).tobytes()), tuple(values.shape))
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
    """Returns the name of torch's class for storages of this dtype, or None for a newer dtype, which has no such
    class."""
    name: str | None = torch.storage._dtype_to_storage_type_map().get(dtype)
    return name
