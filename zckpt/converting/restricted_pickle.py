"""Reads files of ``torch.save`` without running any code that is in them, and without reading their tensors.

Such a file is a zip archive without compression. It has a pickle of all objects, and one record with the bytes of each
storage. A pickle is a program. Here it may make only plain values and containers, tensors, NumPy's numbers and arrays,
and objects of a few classes of DeepSpeed. In the place of the latter it gets inert objects, which have the same class
name and nothing but attributes. For anything else, a FormatError is raised that names it.

The tensors share the memory of a mapped file, so a byte is read only when somebody looks at it. ``TorchFiles.place``
says where in the file the bytes of a tensor lie, for callers that read ranges of the file instead.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sized
from contextlib import closing
from datetime import date, datetime, time
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch

from zckpt.converting.source import AS_WRITTEN, COPY_AGAIN, check_regular
from zckpt.errors import FormatError, MissingFileError, UnsupportedError, ZckptError, from_os_error
from zckpt.format.limits import NDIM_MAX, TREE_DEPTH_MAX
from zckpt.state.inventory import FileSpan

if TYPE_CHECKING:
    from collections.abc import Callable

PICKLE_BYTES_MAX = 256 << 20
"""The largest pickle that is read, in bytes. A pickle has no tensors in it: that of a model with 100,000 parameters
takes some 20 MB."""
COPIED_BYTES_MAX = 256 << 20
"""A tensor that does not lie in one range of the file, such as an expanded one, is copied as a whole when it is used.
All such tensors together may have this many bytes more than the file."""
GROWTH_MAX = 8
"""The largest number of values that a pickle may describe for each of its bytes. A pickle in which no list is in two
places describes less than one. A list that contains itself has no end."""
_ENCRYPTED = 1
"""The flag of a record of a zip archive."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ZIP, _OLD = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The first bytes of a file that torch 1.6 or newer has written, and of one that an older torch has written."""
_INERT = frozenset({
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
})  # fmt: skip
_PLAIN: dict[str, type] = {
    **{f"builtins.{one.__name__}": one for one in (int, float, complex, list, dict, set, frozenset)},
    **{f"__builtin__.{one.__name__}": one for one in (int, float, complex, list, dict, set, frozenset)},
    **{f"collections.{one.__name__}": one for one in (OrderedDict, Counter, defaultdict)},
    **{f"datetime.{one.__name__}": one for one in (date, datetime, time)},
    **{
        f"{at}.{name}": PurePosixPath for at in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")
    },
    **{f"{at}.WindowsPath": PureWindowsPath for at in ("pathlib", "pathlib._local")},
    "torch.Size": torch.Size,
}
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
_NUMPY_KINDS = frozenset("biufcSU")


class Inert:
    """Stands for an object of a class that is known by its name only."""

    args: tuple[Any, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class TorchFiles:
    """The files that were loaded, and where in memory they are mapped."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._files: list[tuple[int, int, str, torch.UntypedStorage]] = []
        """The address, the size in bytes, the path and the storage of each mapped file, in the order of addresses."""

    def load(self, path: str) -> Any:
        """Returns what was saved in a file, with its tensors mapped. Raises MissingFileError, FormatError,
        UnsupportedError and StorageError."""
        try:
            archive = _open(path)
            with closing(archive):
                names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                raw = _small(archive, names.get("data.pkl"), PICKLE_BYTES_MAX)
                if raw is None:
                    raise FormatError(
                        "this is not a file of torch.save: it has no pickle that could be read", file=path,
                        hint=AS_WRITTEN,
                    )  # fmt: skip
                order = _small(archive, names["byteorder"], len(b"little")) if "byteorder" in names else b"little"
                if order == b"big":
                    raise UnsupportedError(f"{path} was written on a machine with another byte order")
                if order != b"little":
                    raise FormatError("its record of the byte order cannot be read", file=path, hint=COPY_AGAIN)
                return _Unpickler(raw, self._map(path), names, path).load()
        except ZckptError:
            raise
        except FileNotFoundError as error:
            raise MissingFileError("a file of the checkpoint is missing", file=path, hint=COPY_AGAIN) from error
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        except Exception as error:  # whatever a damaged archive can make of zipfile
            raise FormatError(f"this is not a whole file of torch.save: {error}", file=path, hint=COPY_AGAIN) from error

    def place(self, data: torch.Tensor | FileSpan | None) -> torch.Tensor | FileSpan | None:
        """Returns the range of a file in which the bytes of a contiguous tensor lie, or ``data`` itself if they do not
        lie in a mapped file."""
        if not isinstance(data, torch.Tensor) or not data.numel():
            return data
        nbytes, address = data.numel() * data.element_size(), data.data_ptr()
        found = bisect_right(self._bases, address) - 1
        if found < 0:
            return data
        base, size, path, _ = self._files[found]
        return FileSpan(path, address - base, nbytes) if address + nbytes <= base + size else data

    def _map(self, path: str) -> torch.UntypedStorage:
        with open(path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
        mapped = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(path, False, size))
        base = mapped.data_ptr()
        at = bisect_right(self._bases, base)
        self._bases.insert(at, base)
        self._files.insert(at, (base, size, path, mapped))
        return mapped


def _open(path: str) -> zipfile.ZipFile:
    check_regular(path)
    with open(path, "rb") as file:
        first = file.read(len(_OLD))
    if first == _OLD:
        raise UnsupportedError(
            f"{path} is in the format that torch had before 1.6, which cannot be read in parts",
            hint="load it with torch.load and save it with torch.save again",
        )
    if first[: len(_ZIP)] != _ZIP:
        raise FormatError("this is not a file of torch.save", file=path, hint=AS_WRITTEN)
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise FormatError("the file was cut off: its end is missing", file=path, hint=COPY_AGAIN) from error


def _small(archive: zipfile.ZipFile, info: zipfile.ZipInfo | None, bytes_max: int) -> bytes | None:
    """Returns a record of at most ``bytes_max``, as torch writes it, which is neither compressed nor encrypted; None if
    it is not such a record."""
    if info is None or not _is_plain(info) or not 0 <= info.file_size == info.compress_size <= bytes_max:
        return None
    return archive.read(info)


def _is_plain(info: zipfile.ZipInfo) -> bool:
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED


class _Call:
    """What a pickle gets and may call in the place of a function."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)


class _Storage:
    """The record of a storage, whose bytes are ``numel`` elements of a dtype."""

    def __init__(self, data: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> None:
        self.data, self.dtype, self.numel = data, dtype, numel


class _Array(Inert):
    """A NumPy array, whose values the pickle sets after it has made the object."""

    value: Any = None


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, in the version written in Python. The one in C takes memory for as many objects as a
    pickle claims to have."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.NEWOBJ_EX[0]], dispatch[pickle.OBJ[0]], dispatch[pickle.INST[0]]
    """Without further ways to make objects, which torch has no use for."""

    def __init__(self, raw: bytes, mapped: torch.UntypedStorage, names: dict[str, zipfile.ZipInfo], path: str) -> None:
        super().__init__(io.BytesIO(raw), encoding="utf-8")
        self._mapped, self._names, self._path = mapped, names, path
        self._values_max = GROWTH_MAX * len(raw)
        self._copied_values = 0
        """The number of values that calls of the pickle were given to copy."""
        self._nested: dict[int, tuple[tuple[Any, ...], int, int]] = {}
        """The tuples that have tuples in them, by id, each with the number of values in it and its depth."""
        self._made: dict[str, Any] = {}
        self._storages: dict[tuple[str, torch.dtype], _Storage] = {}

    def load(self) -> Any:
        try:
            found = super().load()
            if _sum(found, _values, self._values_max + 1, {}) > self._values_max:
                raise self._too_many()
            if _sum(found, _copied_bytes, 0, {}) > self._mapped.nbytes() + COPIED_BYTES_MAX:
                raise FormatError(
                    "its tensors, some of which have more elements than are stored, would take far more memory than "
                    "the file has bytes", file=self._path,
                    hint="in the training script, register the clone() of buffers that are expanded, and save again",
                )  # fmt: skip
            return self._resolved(found, {})
        except (FormatError, UnsupportedError):
            raise
        except OSError:
            raise
        except Exception as error:  # a pickle can be made to raise any error
            raise FormatError(f"its pickle cannot be read: {error or type(error).__name__}", file=self._path) from error

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self._made:
            self._made[path] = self._make(path, module, name)
        return self._made[path]

    def _make(self, path: str, module: str, name: str) -> Any:
        if path in _PLAIN:
            return _PLAIN[path]
        if path in _INERT:
            return type(name, (Inert,), {})  # a new class for each file, which no other pickle can have changed
        known: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._tensor, "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": _with_name, "_codecs.encode": _encoded, "numpy.dtype": _dtype,
        }  # fmt: skip
        if path in known:
            return _Call(known[path])
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
            return _Call(_scalar if name == "scalar" else lambda *_: _Array())
        if path == "numpy.ndarray":
            return _Array
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise FormatError(
            f"its pickle asks for {path}, which may run any code, so it was not read", file=self._path,
            hint="if it is an object of your own in a client_state that you trust, load the checkpoint into an engine "
            "after zckpt.attach(engine), which reads DeepSpeed's checkpoints too, and write it with zckpt.write",
        )  # fmt: skip

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int or type(key) is not str:
            raise FormatError("its pickle describes a storage in an unknown way", file=self._path)
        if (key, dtype) not in self._storages:
            self._storages[key, dtype] = self._record(f"data/{key}", dtype, numel)
        return self._storages[key, dtype]

    def _record(self, name: str, dtype: torch.dtype, numel: int) -> _Storage:
        info = self._names.get(name)
        if info is None:
            raise FormatError(f"its record {name} is missing", file=self._path, hint=COPY_AGAIN)
        at = info.header_offset
        header = _LOCAL_HEADER.unpack(bytes(self._mapped[at : at + _LOCAL_HEADER.size].tolist()))
        start = at + _LOCAL_HEADER.size + header[-2] + header[-1]
        nbytes = numel * dtype.itemsize
        whole = _is_plain(info) and 0 <= nbytes <= info.file_size
        if header[0] != _ZIP or not whole or start + nbytes > self._mapped.nbytes() or start % dtype.itemsize:
            raise FormatError(
                f"its record {name} is damaged or cut off", file=self._path, start=start, stop=start + nbytes,
                hint=COPY_AGAIN,
            )  # fmt: skip
        return _Storage(self._mapped[start : start + nbytes], dtype, numel)

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        if not isinstance(storage, _Storage):
            raise FormatError("its pickle describes a tensor in an unknown way", file=self._path)
        sizes, strides = tuple(size), tuple(stride)
        numbers = (offset, *sizes, *strides)
        last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if 0 not in sizes else -1
        if any(type(one) is not int or one < 0 for one in numbers) or last >= storage.numel or len(sizes) > NDIM_MAX:
            raise FormatError("a tensor goes beyond the end of its storage", file=self._path, hint=COPY_AGAIN)
        if last < 0:
            return torch.empty(sizes, dtype=storage.dtype)
        return torch.empty(0, dtype=storage.dtype).set_(storage.data, offset, sizes, strides)

    def _build(self) -> None:
        """Sets the state of an object. This is allowed only for inert objects, because for others it would run the code
        of their class."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state = stack.pop()
        made = stack[-1]
        if isinstance(made, _Array):
            made.value = _array(state)
        elif isinstance(made, _Dtype):
            made.swapped = isinstance(state, tuple) and len(state) > 1 and state[1] == ">"
        elif isinstance(made, Inert) and isinstance(state, dict):
            vars(made).update({str(key): value for key, value in state.items()})
        elif not (isinstance(made, OrderedDict) and isinstance(state, dict)):
            raise FormatError(
                f"its pickle sets the state of a {type(made).__name__}, which is not allowed", file=self._path
            )

    dispatch[pickle.BUILD[0]] = _build

    def _append_tuple(self, made: tuple[Any, ...]) -> None:
        """Puts a new tuple on the stack. A tuple that becomes a key of a dict is hashed with all that is in it, which
        takes without end where the same tuple is in too many places: so it is refused before."""
        below = [self._nested.get(id(one), (one, len(one), 1)) for one in made if type(one) is tuple]
        if below:
            values, depth = len(made) + sum(one[1] for one in below), 1 + max(one[2] for one in below)
            if values > self._values_max or depth > TREE_DEPTH_MAX:
                raise self._too_many()
            self._nested[id(made)] = made, values, depth
        self.append(made)  # type: ignore[attr-defined]

    def _tuple_of(self, count: int) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        made = tuple(stack[-count:])
        del stack[-count:]
        self._append_tuple(made)

    dispatch[pickle.TUPLE[0]] = lambda self: self._append_tuple(tuple(self.pop_mark()))
    dispatch[pickle.TUPLE1[0]] = lambda self: self._tuple_of(1)
    dispatch[pickle.TUPLE2[0]] = lambda self: self._tuple_of(2)
    dispatch[pickle.TUPLE3[0]] = lambda self: self._tuple_of(3)

    def _copies(self, args: Any) -> Any:
        """Returns the arguments of a call, after it has counted the values that the call may copy. A pickle may give
        the same list or text to many calls."""
        self._copied_values += sum(len(one) for one in args if isinstance(one, Sized))
        if self._copied_values > self._values_max:
            raise self._too_many()
        return args

    def _reduce(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        args = self._copies(stack.pop())
        stack[-1] = stack[-1](*args)

    def _new(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        args = self._copies(stack.pop())
        kind = stack.pop()
        stack.append(kind.__new__(kind, *args))

    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.NEWOBJ[0]] = _new

    def _too_many(self) -> FormatError:
        return FormatError(
            "its pickle has the same list or tuple in so many places, or in itself, that it would describe more than "
            f"{self._values_max} values", file=self._path, hint="save it again without this list in its client_state",
        )  # fmt: skip

    def _resolved(self, value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
        """Returns ``value`` with NumPy's arrays in the place of the objects that stand for them. Containers are changed
        in place where that is possible. ``known``: containers by id, each with what it has become."""
        if isinstance(value, _Array):
            return value.value
        if not isinstance(value, (dict, list, tuple, Inert)):
            return value
        if id(value) in known:
            return known[id(value)][1]
        known[id(value)] = value, value  # with the value itself, or its id could become that of another one
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self._resolved(item, known)
        elif isinstance(value, list):
            value[:] = [self._resolved(item, known) for item in value]
        elif isinstance(value, tuple) and any(isinstance(item, (_Array, dict, list, tuple, Inert)) for item in value):
            items = [self._resolved(item, known) for item in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                known[id(value)] = value, tuple(items)
        elif isinstance(value, Inert):
            self._resolved(vars(value), known)
        return known[id(value)][1]


def _sum(value: Any, of: Callable[[Any], int], again: int, known: dict[int, int]) -> int:
    """Returns the sum of ``of`` over all values of a tree. A container in two places counts twice. ``again``: what a
    container counts inside of itself. ``known``: the sums of containers by id."""
    if isinstance(value, _Array) or not isinstance(value, (dict, list, tuple, set, frozenset, Inert)):
        return of(value)
    if id(value) not in known:
        known[id(value)] = again
        inner = vars(value) if isinstance(value, Inert) else value
        items = (*inner, *inner.values()) if isinstance(inner, dict) else inner
        known[id(value)] = of(value) + sum(_sum(one, of, again, known) for one in items)
    return known[id(value)]


def _values(value: Any) -> int:
    return int(value.value.nbytes) + 1 if isinstance(value, _Array) and value.value is not None else 1


def _copied_bytes(value: Any) -> int:
    copied = isinstance(value, torch.Tensor) and not value.is_contiguous()
    return value.numel() * value.element_size() if copied else 0


class _Dtype:
    """A NumPy dtype of plain numbers or text."""

    def __init__(self, name: str) -> None:
        self.dtype, self.swapped = np.dtype(name), False
        if self.dtype.kind not in _NUMPY_KINDS or self.dtype.itemsize > 1 << 20:
            raise ValueError(f"an array of dtype {name}")

    @property
    def value(self) -> np.dtype[Any]:
        return self.dtype.newbyteorder(">") if self.swapped else self.dtype


def _dtype(name: object, *_: object) -> _Dtype:
    if not isinstance(name, str):
        raise TypeError("a dtype without a name")
    return _Dtype(name)


def _scalar(dtype: _Dtype, raw: object) -> Any:
    return np.frombuffer(_bytes(raw), dtype.value, 1)[0]


def _array(state: Any) -> Any:
    _, shape, dtype, in_columns, raw = state
    found = np.frombuffer(_bytes(raw), dtype.value).reshape(shape, order="F" if in_columns else "C")
    return found.astype(dtype.dtype.newbyteorder("="))


def _bytes(raw: object) -> bytes:
    if not isinstance(raw, bytes):
        raise TypeError("an array of objects")
    return raw


def _with_name(make: object, kind: object, args: Any, state: object) -> torch.Tensor:
    """Returns a tensor that was saved with attributes. Of these only the name that DeepSpeed gives to what it offloads
    is kept."""
    made = make(*args) if isinstance(make, _Call) else None
    if not isinstance(made, torch.Tensor):
        raise TypeError("a tensor of an unknown kind")
    if isinstance(state, dict) and isinstance(state.get("ds_id"), str):
        made.ds_id = state["ds_id"]  # type: ignore[attr-defined]
    return made


def _encoded(text: object, encoding: object) -> bytes:
    """Returns the bytes that Python pickled as text. Pickles of protocol 2 and lower have no bytes of their own."""
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("text in an unknown encoding")
    return text.encode("latin1")
