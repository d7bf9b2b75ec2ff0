"""Reads files of ``torch.save`` without running any code that is in them, and without reading their tensors.

Such a file is a zip archive without compression. It has a pickle of all objects, and one record with the bytes of each
storage. A pickle is a program. Here it may make only plain values and containers, tensors, NumPy's numbers and arrays,
and objects of a few classes of DeepSpeed and of torch's distributed checkpoints. Instead of the last of these it gets
inert objects, which have the same class name, but only attributes and no code. If the pickle asks for anything else, a
FormatError is raised that names it.

A file from a stranger can be written so that a few bytes of its pickle describe very much: objects that take far more
memory than bytes in the file, or numbers that all have the same hash, so that a dict of them takes endless time. So
each opcode is charged with about the memory that it takes, and the pickle is refused once all of them together exceed a
multiple of its length. The lengths of long keys, which are hashed and compared, are charged too.

Files are read, and never mapped to memory, because a process that touches a mapped page is killed if another process
has cut the file off meanwhile. Tensors with many elements are not read at all: see transfer/stored.py.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from contextlib import contextmanager
from datetime import date, datetime, time
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from zckpt.engines.tensors import dtype_name
from zckpt.errors import FormatError, MissingFileError, UnsupportedError, ZckptError, from_os_error
from zckpt.format.limits import NDIM_MAX
from zckpt.plan.inventory import FileRange
from zckpt.storage.files import read_at
from zckpt.tools.converting.source import AS_WRITTEN, COPY_AGAIN, check_regular
from zckpt.transfer.stored import GAP_BYTES, read_strided, stored_storage, with_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

PICKLE_BYTES_MAX = 256 << 20
"""The largest pickle that is read, in bytes. A pickle contains no values of tensors: that of a model with 100,000
parameters has about 20 MB."""
DIRECTORY_BYTES_MAX = 256 << 20
"""The largest directory of a zip archive that is read, in bytes. An entry for a tensor has about 100 bytes."""
MEMORY_BYTES_MIN, MEMORY_GROWTH_MAX = 64 << 20, 48
"""A pickle may take ``MEMORY_BYTES_MIN`` bytes of memory, and ``MEMORY_GROWTH_MAX`` more for each of its bytes and of
the bytes in the directory of the archive. What torch writes takes up to about 30."""
ENTRY_BYTES = 46
"""The bytes that an entry of the directory of a zip archive has beside its name."""
COPIED_BYTES_MAX = 256 << 20
"""The number of bytes by which all copied tensors together may exceed the size of the file. A tensor that is not one
range of the file, such as an expanded one, is copied as a whole."""
GROWTH_MAX = 8
"""The largest number of values that a pickle may describe for each of its bytes. A pickle in which no list is in two
places describes less than one value for each byte. A pickle with a list that contains itself describes values without
end."""
MARKS_MAX = 1000
"""How deep the containers of a pickle may be nested."""
_ENCRYPTED = 1
"""The flag bit that marks an encrypted record of a zip archive."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""The header in front of a record of a zip archive. Its last two fields are the lengths of the name and of the extra
field that follow it."""
_ZIP, _OLD = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The first bytes of a file that torch 1.6 or newer has written (``_ZIP``), and of a file that an older torch has
written (``_OLD``)."""
_INERT = frozenset({
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
})  # fmt: skip
"""The classes in whose place a pickle gets inert objects."""
_PLAIN: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, complex, list, dict, set, frozenset)},
    **{f"__builtin__.{kind.__name__}": kind for kind in (int, float, complex, list, dict, set, frozenset)},
    **{f"collections.{kind.__name__}": kind for kind in (OrderedDict, Counter, defaultdict)},
    **{f"datetime.{kind.__name__}": kind for kind in (date, datetime, time)},
    **{
        f"{module}.{name}": PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    **{f"{module}.WindowsPath": PureWindowsPath for module in ("pathlib", "pathlib._local")},
    "torch.Size": torch.Size,
    "_io.BytesIO": io.BytesIO,
}
"""The classes of plain values and containers that a pickle may make."""
_PLAIN_TYPES = frozenset(_PLAIN.values())
_SIZED = (list, tuple, str, bytes, dict, set, frozenset)
_MANY = frozenset({list, torch.Size, PurePosixPath, PureWindowsPath})
"""The classes of which a call makes an object of each character or item that it is given, or copies each item."""
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
"""The dtype of each class of storages."""
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""torch's dtypes by name."""
_NUMPY_DTYPE = re.compile(r"[biufcSU]\d{1,6}", re.ASCII)
"""The names of the dtypes that an array in a pickle may have: numbers, bool, bytes and text of up to a million bytes or
characters."""
_UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch.nested._internal.nested_tensor._rebuild_njt": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without values, on the device meta",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device whose memory torch cannot save",
    "torch._utils._rebuild_xla_tensor": "a tensor of a device whose memory torch cannot save",
    **{
        f"{module}.{name}Storage": "a quantized tensor"
        for module in ("torch", "torch.storage")
        for name in ("QInt8", "QInt32", "QUInt8", "QUInt4x2", "QUInt2x4")
    },
}
"""What the functions and classes of torch stand for that zckpt does not use, because it could not keep the tensor."""
_LEFT_OUT = (
    pickle.NEWOBJ_EX + pickle.OBJ + pickle.INST + pickle.EXT1 + pickle.EXT2 + pickle.EXT4 + pickle.BYTEARRAY8
    + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER
)  # fmt: skip
"""The opcodes that a pickle may not use. torch does not use them, and they make objects in other ways, or allocate
memory before they read."""
_SHORT = 256
"""The most characters of a text that costs no more than any other key."""
_NO_CALL = object()
"""Stands for a class of NumPy that is only an argument of a call."""
_COSTS = [16] * 256
"""About the memory that each opcode takes, in bytes: the object that it makes, and its places on the stack and in the
list or tuple that will hold it. The text or number that follows the opcode is not counted. Opcodes whose cost depends
on the number of values charge the rest themselves."""
for _opcodes, _cost in (
    (pickle.MARK + pickle.PROTO + pickle.FRAME + pickle.POP + pickle.POP_MARK, 1),
    (pickle.INT + pickle.BININT + pickle.BININT2 + pickle.LONG + pickle.LONG1 + pickle.LONG4 + pickle.FLOAT
     + pickle.BINFLOAT, 48),
    (pickle.STRING + pickle.BINSTRING + pickle.SHORT_BINSTRING + pickle.UNICODE + pickle.BINUNICODE
     + pickle.SHORT_BINUNICODE + pickle.BINUNICODE8 + pickle.BINBYTES + pickle.SHORT_BINBYTES + pickle.BINBYTES8, 80),
    (pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.EMPTY_LIST + pickle.LIST, 72),
    (pickle.EMPTY_DICT + pickle.DICT, 80),
    (pickle.PUT + pickle.LONG_BINPUT + pickle.MEMOIZE, 104),
    (pickle.EMPTY_SET + pickle.FROZENSET, 232),
):  # fmt: skip
    for _opcode in _opcodes:
        _COSTS[_opcode] = _cost


class Inert:
    """Stands for an object of a class of which only the name is used."""

    args: tuple[Any, ...] = ()
    """The arguments with which the pickle has made the object, or its state, if that is a tuple."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def load(path: str, place: FileRange | None = None) -> Any:
    """Returns what was saved in a file, or in the range ``place`` of the file. Its tensors of more than one element
    have no memory, except for those whose values torch changes when it reads them. See transfer/stored.py for how to
    get their values. Raises MissingFileError, FormatError, UnsupportedError and StorageError."""
    with _reading(path), _File(path, place) as file, _opened(file, path) as archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        raw = _small(archive, names.get("data.pkl"), PICKLE_BYTES_MAX)
        if raw is None:
            raise FormatError(
                "this is not a file of torch.save: it has no pickle that could be read", file=path, hint=AS_WRITTEN
            )
        order = _small(archive, names["byteorder"], len(b"little")) if "byteorder" in names else b"little"
        if order == b"big":
            raise UnsupportedError(f"{path} was written on a machine with another byte order")
        if order != b"little":
            raise FormatError("its record of the byte order cannot be read", file=path, hint=COPY_AGAIN)
        return _Unpickler(raw, file, names, path).load()


def load_pickle(path: str) -> Any:
    """Returns the value of a file that has nothing but a pickle without tensors. Raises the errors of ``load``."""
    with _reading(path), _File(path) as file:
        nbytes = file.seek(0, io.SEEK_END)
        if nbytes > PICKLE_BYTES_MAX:
            raise FormatError(f"its pickle has more than {PICKLE_BYTES_MAX} bytes", file=path)
        file.seek(0)
        return _Unpickler(file.read(nbytes), file, {}, path).load()


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """A context in which a file is read. It raises the errors of ``load`` in the place of others."""
    try:
        check_regular(path)
        yield
    except ZckptError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError("a file of the checkpoint is missing", file=path, hint=COPY_AGAIN) from error
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    except Exception as error:  # A damaged archive can make zipfile raise almost any error.
        raise FormatError(f"this is not a whole file of torch.save: {error}", file=path, hint=COPY_AGAIN) from error


def loads(raw: bytes | memoryview) -> Any:
    """Returns what was saved in the bytes of a file, with all tensors in memory. Raises FormatError, and
    UnsupportedError."""
    with os.fdopen(os.memfd_create("zckpt"), "wb") as file:
        file.write(raw)
        file.flush()
        return tree_map_only(torch.Tensor, with_values, load(f"/proc/self/fd/{file.fileno()}"))


class _File(io.FileIO):
    """A file that is open for reading, or a range of it, in which positions are counted from its beginning. No more
    than ``DIRECTORY_BYTES_MAX`` bytes are read at once."""

    def __init__(self, path: str, place: FileRange | None = None) -> None:
        super().__init__(path)
        self.start, size = 0, super().seek(0, io.SEEK_END)
        self.nbytes = size
        """The number of bytes of the file or the range."""
        if place is not None:
            self.start, self.nbytes = place.offset, place.nbytes
            if not 0 <= self.start <= self.start + self.nbytes <= size:
                self.close()
                raise FormatError(
                    "the file was cut off", file=path, start=self.start, stop=self.start + self.nbytes, hint=COPY_AGAIN
                )
        self.seek(0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.nbytes}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, "a position before the beginning")  # As for a whole file.
        return super().seek(self.start + position) - self.start

    def tell(self) -> int:
        return super().tell() - self.start

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.nbytes - self.tell(), 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > DIRECTORY_BYTES_MAX:
            raise ValueError(f"its directory has {size} bytes")
        return super().read(size)


def _opened(file: _File, path: str) -> zipfile.ZipFile:
    """Returns the archive in a file of ``torch.save``. Raises UnsupportedError for the format of torch before 1.6, and
    FormatError for a file in another format."""
    first = file.read(len(_OLD))
    if first == _OLD:
        raise UnsupportedError(
            f"{path} is in the format that torch had before 1.6, which cannot be read in parts",
            hint="load it with torch.load and save it with torch.save again",
        )
    if first[: len(_ZIP)] != _ZIP:
        raise FormatError("this is not a file of torch.save", file=path, hint=AS_WRITTEN)
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise FormatError("the file was cut off: its end is missing", file=path, hint=COPY_AGAIN) from error


def _small(archive: zipfile.ZipFile, info: zipfile.ZipInfo | None, bytes_max: int) -> bytes | None:
    """Returns the content of a record with at most ``bytes_max`` bytes. Returns None if there is no such record, if it
    is longer, or if it is compressed or encrypted, as torch never writes it."""
    if info is None or not _is_plain(info) or not 0 <= info.file_size == info.compress_size <= bytes_max:
        return None
    return archive.read(info)


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Returns whether a record is neither compressed nor encrypted."""
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED


class _Call:
    """An object that a pickle gets instead of a function, and that it may call."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class _Storage:
    """The record of a storage, whose bytes are ``numel`` elements of one dtype."""

    __slots__ = ("data", "dtype", "numel", "place")

    def __init__(self, place: FileRange, dtype: torch.dtype, numel: int) -> None:
        self.place, self.dtype, self.numel = place, dtype, numel
        self.data = stored_storage(place)


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, in its implementation in Python. The implementation in C allocates memory for as many
    objects as a pickle claims to have."""

    dispatch: ClassVar[dict[int, Any]] = {
        opcode: method for opcode, method in pickle._Unpickler.dispatch.items() if opcode not in _LEFT_OUT
    }
    """The opcodes that a pickle may use, each with its method."""

    def __init__(self, raw: bytes, file: _File, names: Mapping[str, zipfile.ZipInfo], path: str) -> None:
        super().__init__(io.BytesIO(raw), encoding="utf-8")
        self._raw, self._file, self._names, self._path = raw, file, names, path
        self._file_bytes = file.nbytes
        self._memory_max = MEMORY_BYTES_MIN + MEMORY_GROWTH_MAX * (len(raw) + ENTRY_BYTES * len(names))
        """How many bytes of memory the pickle may take."""
        self._room_bytes = self._memory_max
        """How many of them it has not taken yet."""
        self._copied_bytes = 0
        """The bytes of all tensors that have been, or will have to be, copied."""
        self._keys: set[Any] = set()
        """The keys that could be made so that they have the same hash."""
        self._same_hash: Counter[int] = Counter()
        """The number of these keys by hash."""
        self._made: dict[str, Any] = {}
        """What ``find_class`` has returned for each name."""
        self._storages: dict[str, _Storage] = {}
        """The storages by the key of their record."""
        self._places: dict[tuple[Any, ...], torch.Tensor] = {}
        """These tensors, by storage, place and dtype. So tied tensors stay tied."""

    def load(self) -> Any:
        try:
            tree = self._run()
            values_max = GROWTH_MAX * len(self._raw)
            if _values(tree, values_max + 1, {}) > values_max:
                raise FormatError(
                    "its pickle has the same list or tuple in so many places, or in itself, that it would describe "
                    f"more than {values_max} values",
                    hint="save it again without this list in its client_state",
                )
            return tree
        except ZckptError as error:
            error.file = error.file or self._path
            raise
        except OSError:
            raise
        except Exception as error:  # A pickle can be written so that it raises any error.
            raise FormatError(f"its pickle cannot be read: {error or type(error).__name__}", file=self._path) from error

    def _run(self) -> Any:
        """Carries out the pickle, and returns its value."""
        file = io.BytesIO(self._raw)
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        read, dispatch = self.read, self.dispatch
        while (opcode := read(1)) != pickle.STOP:
            number = opcode[0]
            self._room_bytes -= _COSTS[number]
            if self._room_bytes < 0:
                self._charge(0)
            dispatch[number](self)
        return self.stack.pop()

    def _charge(self, nbytes: int) -> None:
        """Counts memory, or time that is as long as that of filling so much memory. Raises FormatError if the pickle
        has taken too much."""
        self._room_bytes -= nbytes
        if self._room_bytes < 0:
            raise FormatError(
                f"its pickle of {len(self._raw)} bytes would take more than {self._memory_max} bytes of memory, or as "
                "much time",
                hint="keep what is large in tensors or arrays, and save it again",
            )

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self._made:
            self._made[path] = self._make(path, module, name)
        return self._made[path]

    def _make(self, path: str, module: str, name: str) -> Any:
        """Returns what a pickle gets for a global name. Raises FormatError for a name that is not known here."""
        if path in _PLAIN:
            return _PLAIN[path]
        if path in _INERT:
            return type(name, (Inert,), {})  # Each file gets a new class, which no other pickle can have changed.
        functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._tensor, "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._utils._rebuild_parameter": _data, "torch._utils._rebuild_parameter_with_state": _data,
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": _data,
            "torch._tensor._rebuild_from_type_v2": self._with_name, "_codecs.encode": _encoded, "numpy.dtype": _Dtype,
            "torch.serialization._get_layout": _data, "builtins.getattr": _member, "__builtin__.getattr": _member,
            "builtins.bytes": _no_bytes, "__builtin__.bytes": _no_bytes,
            # Its first argument is a class that is not known here, so the error names that class.
            "torch._utils._rebuild_wrapper_subclass": lambda *_: None,
        }  # fmt: skip
        if path in functions:
            return _Call(functions[path])
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
            return _Call(_scalar if name == "scalar" else _empty_array)
        if path == "numpy.ndarray":
            return _NO_CALL
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if path in _UNSUPPORTED:
            raise UnsupportedError(
                f"its pickle has {_UNSUPPORTED[path]}, which zckpt cannot keep",
                hint="save it as a dense tensor in host memory, of one of torch's usual dtypes",
            )
        raise FormatError(
            f"its pickle asks for {path}, which zckpt does not know and which could run any code, so it was not read",
            hint="if it is an object of your own that you trust, load the checkpoint as before into your training "
            "(zckpt.attach(engine) reads DeepSpeed's checkpoints, too), and write that with zckpt.write",
        )

    # Tensors

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int or type(key) is not str:
            raise FormatError("its pickle describes a storage in an unknown way")
        if key not in self._storages:
            self._storages[key] = self._record(f"data/{key}", dtype, numel)
        storage = self._storages[key]
        if (storage.dtype, storage.numel) != (dtype, numel):
            raise FormatError(f"its pickle describes the storage {key} in two ways")
        return storage

    def _record(self, name: str, dtype: torch.dtype, numel: int) -> _Storage:
        """Returns a record of a storage. Raises FormatError if it is missing, compressed, or shorter than ``numel``
        elements."""
        info = self._names.get(name)
        if info is None:
            raise FormatError(f"its record {name} is missing", hint=COPY_AGAIN)
        raw = bytearray(_LOCAL_HEADER.size)
        file = self._file
        found = read_at(file.fileno(), [memoryview(raw)], file.start + max(info.header_offset, 0))
        header = _LOCAL_HEADER.unpack(raw)
        start = file.start + info.header_offset + len(raw) + header[-2] + header[-1]
        nbytes = numel * dtype.itemsize
        whole = found == len(raw) and _is_plain(info) and 0 <= nbytes <= info.file_size
        if header[0] != _ZIP or not whole or start + nbytes > file.start + self._file_bytes:
            raise FormatError(
                f"its record {name} is damaged or cut off", start=start, stop=start + nbytes, hint=COPY_AGAIN
            )
        return _Storage(FileRange(self._path, start, nbytes), dtype, numel)

    def _tensor(
        self, storage: _Storage, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, *more: Any
    ) -> torch.Tensor:
        """Returns the tensor that torch's ``_rebuild_tensor_v2`` would return, or ``_rebuild_tensor_v3`` if ``more``
        begins with a dtype, which torch uses for dtypes that have no class of storages. ``more`` may end with the lazy
        operations that torch applies to the values. Raises FormatError if the tensor would have elements outside of its
        storage, and UnsupportedError for a dtype or an operation that zckpt cannot keep."""
        if not isinstance(storage, _Storage):
            raise FormatError("its pickle describes a tensor in an unknown way")
        dtype, *more_arguments = more if more and isinstance(more[0], torch.dtype) else (storage.dtype, *more)
        metadata = more_arguments[0] if more_arguments else {}
        lazy = frozenset(name for name, is_set in metadata.items() if is_set)
        if lazy - {"conj", "neg"}:
            raise UnsupportedError(f"its pickle has a tensor with {', '.join(sorted(lazy))}")
        dtype_name(dtype, "a tensor in its pickle")
        self._charge(384)
        if not len(size) == len(stride) <= NDIM_MAX:
            raise FormatError(f"a tensor has {len(size)} dimensions and {len(stride)} strides")
        sizes, strides = tuple(size), tuple(stride)
        last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if 0 not in sizes else -1
        natural = all(type(number) is int and number >= 0 for number in (offset, *sizes, *strides))
        if not natural or last >= storage.place.nbytes // dtype.itemsize:
            raise FormatError("a tensor goes beyond the end of its storage", hint=COPY_AGAIN)
        if last < 0:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        tensor = torch.empty(0, dtype=dtype, device="meta").set_(storage.data, offset, sizes, strides)
        # Older versions of torch, such as 2.7, forget the place of a storage to which no reference of Python leads.
        tensor._zckpt_storage = storage.data  # type: ignore[attr-defined]
        is_read = tensor.numel() == 1 or bool(lazy)
        if not is_read and tensor.is_contiguous():
            return tensor
        place = (id(storage), dtype, offset, sizes, strides, lazy)
        if place not in self._places:
            self._places[place] = tensor
            reads_max = min(tensor.numel(), (last - offset) * dtype.itemsize // GAP_BYTES + 1)
            self._charge(768 + 256 * reads_max)
            self._copied_bytes += tensor.numel() * dtype.itemsize
            if self._copied_bytes > self._file_bytes + COPIED_BYTES_MAX:
                raise FormatError(
                    "its tensors, some of which have more elements than are stored, would take far more memory than "
                    "the file has bytes",
                    hint="in the training script, register the clone() of buffers that are expanded, and save again",
                )
            if is_read:
                values = read_strided(storage.place, dtype, offset, sizes, strides)
                values = values.conj_physical() if "conj" in lazy else values
                self._places[place] = values.neg() if "neg" in lazy else values
        return self._places[place]

    def _with_name(self, make: object, _kind: object, args: Any, state: object) -> torch.Tensor:
        """Returns a tensor that was saved with attributes. Of these, only the name that DeepSpeed gives to an offloaded
        tensor (``ds_id``) is kept."""
        made = self._called(make, args)
        if not isinstance(made, torch.Tensor):
            raise TypeError("a tensor of an unknown kind")
        if isinstance(state, dict) and isinstance(state.get("ds_id"), str):
            made.ds_id = state["ds_id"]  # type: ignore[attr-defined]
        return made

    # Other objects

    def _called(self, make: Any, args: tuple[Any, ...]) -> Any:
        """Returns what a call returns. Only what ``find_class`` has returned can be called."""
        if not isinstance(make, (_Call, type)) or not isinstance(args, tuple):
            raise TypeError(f"a call of a {type(make).__name__} with a {type(args).__name__}")
        self._charge(64 + 16 * len(args))
        lengths = sum(len(argument) for argument in args if isinstance(argument, _SIZED))
        self._charge((32 if make in _MANY else 4) * lengths)
        if isinstance(make, _Call):
            return make.make(*args)
        self._charge(192)
        if make in _PLAIN_TYPES:
            kinds = (dict,) if issubclass(make, dict) else (list,) if issubclass(make, (set, frozenset)) else _SIZED
            for argument in args:
                if not isinstance(argument, (*kinds, int, float, type, type(None))):
                    raise TypeError(f"a {make.__name__} that is made of a {type(argument).__name__}")
                if isinstance(argument, kinds) and kinds is not _SIZED:
                    self._check_keys(argument)
                    self._charge(96 * len(argument))
        elif not issubclass(make, Inert):
            raise TypeError(f"a call of {make.__name__}")
        return make(*args)

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args)

    def _new(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        self.append(self._called(kind, args))

    def _build(self) -> None:
        """Sets the state of an object. This is allowed only for some objects, because for others it would run the code
        of their class."""
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is np.ndarray:
            self._charge(_set_array(made, state))
        elif isinstance(made, _Dtype):
            made.swapped = isinstance(state, tuple) and len(state) > 1 and state[1] == ">"
        elif isinstance(made, io.BytesIO):
            raw, *_ = state  # Its position and its attributes are not kept.
            self._charge(len(raw))
            made.write(raw)
            made.seek(0)
        elif isinstance(made, Inert) and isinstance(state, dict):
            self._charge(96 * len(state))
            if not all(type(key) is str for key in state):
                raise TypeError("an attribute without a name")
            vars(made).update(state)
        elif isinstance(made, Inert) and isinstance(state, tuple):
            made.args = state
        elif not (isinstance(made, OrderedDict) and isinstance(state, dict)):
            raise FormatError(f"its pickle sets the state of a {type(made).__name__}, which is not allowed")

    # Containers

    def _mark(self) -> None:
        if len(self.metastack) == MARKS_MAX:
            raise FormatError(f"its pickle is nested more than {MARKS_MAX} levels deep")
        self.metastack.append(self.stack)
        self.stack = []
        self.append = self.stack.append

    def pop_mark(self) -> list[Any]:
        """Returns the values on the stack behind the last mark, and removes them."""
        values, self.stack = self.stack, self.metastack.pop()
        self.append = self.stack.append
        return values

    def _top(self, kind: type) -> Any:
        """Returns the container on top of the stack. Raises TypeError if it is not a ``kind``."""
        if not isinstance(self.stack[-1], kind):
            raise TypeError(f"a {type(self.stack[-1]).__name__} in the place of a {kind.__name__}")
        return self.stack[-1]

    def _append(self) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def _extend(self) -> None:
        values = self.pop_mark()
        self._top(list).extend(values)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items(self._top(dict), [key, value])

    def _set_items(self, made: dict[Any, Any], items: list[Any]) -> None:
        """Adds items to a dict. ``items``: keys and values by turns."""
        self._check_keys(items[::2])
        self._charge(96 + 36 * len(items))
        for key, value in zip(items[::2], items[1::2], strict=True):
            made[key] = value

    def _more_items(self) -> None:
        items = self.pop_mark()
        self._set_items(self._top(dict), items)

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(self._top(dict), items)

    def _more_members(self) -> None:
        members = self.pop_mark()
        self._check_keys(members)
        self._charge(64 * len(members))
        self._top(set).update(members)

    def _frozen_set(self) -> None:
        members = self.pop_mark()  # This also sets ``append``, which must not be looked up before.
        self.append(self._called(frozenset, (members,)))

    def _check_keys(self, keys: Iterable[Any]) -> None:
        """Checks values before they are hashed, as keys of a dict or members of a set."""
        for key in keys:
            if type(key) is not str or len(key) > _SHORT:
                self._check_key(key)

    def _check_key(self, key: Any) -> None:
        """Charges for hashing a key, and for comparing it with all keys that have its hash."""
        if type(key) in (str, bytes, bool, float, type(None)) or (type(key) is int and -(1 << 63) <= key < 1 << 64):
            # Few numbers of 64 bits have the same hash. The hash of a text is random, so it is compared only if it is
            # equal.
            self._weight(key)
            return
        cost = 64 + self._weight(key)
        if key not in self._keys:
            self._charge(256)
            self._keys.add(key)
            self._same_hash[hash(key)] += 1
        self._charge(cost * self._same_hash[hash(key)])

    def _weight(self, key: Any, *, inner: bool = False) -> int:
        """Charges for hashing a key, or a part of a key if ``inner``. Returns the charge."""
        cost, parts = 0, key if isinstance(key, (tuple, frozenset)) else ()
        if inner and isinstance(key, frozenset):
            raise TypeError("a frozenset inside of a key")  # To compare it could take endless time.
        if isinstance(key, (str, bytes)):
            cost = len(key) >> 6
        elif isinstance(key, PurePath):
            cost = len(str(key))
        elif isinstance(key, int):
            cost = key.bit_length() >> 6
        self._charge(cost + 24 * len(parts))
        return cost + 24 * len(parts) + sum(self._weight(part, inner=True) for part in parts)

    dispatch |= {
        pickle.FRAME[0]: lambda self: self.read(8), pickle.REDUCE[0]: _reduce, pickle.NEWOBJ[0]: _new,
        pickle.BUILD[0]: _build, pickle.MARK[0]: _mark, pickle.APPEND[0]: _append, pickle.APPENDS[0]: _extend,
        pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _more_items, pickle.ADDITEMS[0]: _more_members,
        pickle.FROZENSET[0]: _frozen_set, pickle.DICT[0]: _dict,
    }  # fmt: skip


def _values(value: Any, again: int, known: dict[int, int]) -> int:
    """Returns the number of values in a tree. A container that is in two places counts twice, and an array for each of
    its bytes. ``again``: what a container counts for where it is inside itself. ``known``: the numbers of containers by
    id."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes) + 1
    inner = vars(value) if isinstance(value, Inert) else value
    if not isinstance(inner, (dict, list, tuple, set, frozenset)) or not inner:
        return 1
    if id(value) not in known:
        known[id(value)] = again
        items = (*inner, *inner.values()) if isinstance(inner, dict) else inner
        known[id(value)] = 1 + sum(_values(item, again, known) for item in items)
    return known[id(value)]


def _data(data: Any, *_: object) -> Any:
    return data


class _Dtype:
    """A NumPy dtype of plain numbers or text."""

    def __init__(self, name: str, *_: object) -> None:
        if not _NUMPY_DTYPE.fullmatch(name):
            raise UnsupportedError(f"its pickle has NumPy values of dtype {name}, which zckpt cannot keep")
        self.dtype, self.swapped = np.dtype(name), False

    @property
    def value(self) -> np.dtype[Any]:
        """The dtype, with the byte order that the pickle has set."""
        return self.dtype.newbyteorder(">") if self.swapped else self.dtype


def _scalar(dtype: _Dtype, raw: bytes) -> Any:
    """Returns the number, text or bytes of Python that is equal to a scalar of NumPy."""
    item = np.ndarray((), dtype.value, raw).item()
    if isinstance(item, np.generic):  # A long double has no equal in Python.
        raise UnsupportedError(f"its pickle has a NumPy number of dtype {dtype.dtype}, which zckpt cannot keep")
    return item


def _empty_array(*_: object) -> np.ndarray[Any, Any]:
    """Returns an array whose state will be set."""
    return np.empty(0, np.int8)


def _set_array(array: np.ndarray[Any, Any], state: Any) -> int:
    """Sets the state of an array, in the byte order of this machine. Returns the number of its bytes."""
    version, shape, dtype, in_columns, raw = state
    if not isinstance(raw, bytes):
        raise UnsupportedError("its pickle has a NumPy array of objects, which zckpt cannot keep")
    if dtype.swapped:
        raw = np.frombuffer(raw, dtype.value).astype(dtype.dtype).tobytes()
    array.__setstate__((version, shape, dtype.dtype, in_columns, raw))
    return len(raw)


def _no_bytes() -> bytes:
    """Returns what Python pickles as a call if the pickle has protocol 2 or lower."""
    return b""


def _member(kind: object, name: object) -> Inert:
    """Returns a member of an enum, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``."""
    if not isinstance(kind, type) or not issubclass(kind, Inert) or type(name) is not str:
        raise TypeError("it asks for getattr of something that is not an enum")
    return kind(name)


def _encoded(text: object, encoding: object) -> bytes:
    """Returns bytes that Python has pickled as text, because pickles of protocol 2 and lower cannot contain bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("text in an unknown encoding")
    return text.encode("latin1")
