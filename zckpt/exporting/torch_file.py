"""Plans a file as ``torch.save`` writes it, without having its tensors in memory.

Such a file is a zip archive without compression. It has a pickle of a tree, and a record for each storage, to which the
tensors of the pickle refer by number. The tree may hold anything that pickle can hold. It has a ``View`` wherever the
file has a tensor.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

import torch

from zckpt.exporting.plan import ExportPlan, OutputFile, OutputTensor, Run
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zckpt.exporting.plan import SourceTensor


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage of ``numel`` elements. They are those of ``values`` if it is given. Otherwise they are those of
    ``runs``, which are listed by the element at which each of them begins, and zero where there is no run."""

    dtype: torch.dtype
    numel: int
    runs: Mapping[int, Run] = field(default_factory=dict)
    values: bytes | None = None

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


def plan_torch_file(sources: Mapping[str, SourceTensor], aliases: Mapping[str, str], name: str) -> ExportPlan:
    """Plans one file of this name. ``torch.load`` with ``weights_only=True`` returns from it a dict of all tensors. A
    tied weight has all of its names in the dict, which share its memory. ``aliases``: the other names of tied weights.
    """
    views = {
        key: View(Storage(TORCH_DTYPES[one.dtype], one.numel, {0: Run(key, 0, one.numel)}), one.shape)
        for key, one in sources.items()
    }
    tied = {alias: views[key] for alias, key in aliases.items() if key in views}
    return ExportPlan((torch_file(name, {**views, **tied}),))


def torch_file(name: str, tree: object) -> OutputFile:
    """Plans a file that ``torch.load`` reads as ``tree``. Raises what pickle raises for a value that it cannot hold.

    torch itself lays out the file, with gaps in the place of the tensors. The checksums that a zip file has are
    therefore not those of the tensors, as with ``torch.serialization.set_crc32_options(False)``; torch does not read
    them.
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
    tensors, known = {}, {at: bytes(raw) for at, raw in file.known.items()}
    left_out = [storage for storage in pickler.storages if storage.values is None and storage.nbytes]
    for begin, storage in zip(file.gaps, left_out, strict=True):
        dtype, stop = DTYPE_NAMES[storage.dtype], 0
        for start, run in sorted({**storage.runs, storage.numel: Run("", 0, 0)}.items()):
            if stop < start:
                known[begin + stop * storage.dtype.itemsize] = bytes((start - stop) * storage.dtype.itemsize)
            if run.start < run.stop:
                shape = (run.stop - run.start,)
                tensors[begin + start * storage.dtype.itemsize] = OutputTensor(run.source, dtype, shape, (run,))
            stop = start + run.stop - run.start
    return OutputFile(name, file.nbytes, known, tensors)


class _Known(io.RawIOBase):
    """A file in memory without the records that torch leaves out."""

    def __init__(self) -> None:
        self.known: dict[int, bytearray] = {}
        """What torch has written, by the byte of the file at which it begins."""
        self.gaps: list[int] = []
        """The bytes of the file at which the records begin that are left out."""
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


class _Pickler(pickle._Pickler):  # The one in Python: that in C has no place for objects of absent classes.
    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch}
    write: Any
    memoize: Any
    save: Any

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)  # as torch.save
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
    """The name of torch's class for storages of ``dtype``; None for the newer dtypes, which have none."""
    name: str | None = torch.storage._dtype_to_storage_type_map().get(dtype)
    return name
