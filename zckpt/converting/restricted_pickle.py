"""Reads files of ``torch.save`` without running any code that is in them, and without reading their tensors.

Such a file is a zip archive without compression. It has a pickle of all objects, and one record with the bytes of each
storage. A pickle is a program. Here it may make only plain values and containers, tensors, NumPy's numbers and arrays,
and objects of a few classes of DeepSpeed. Instead of the last of these it gets inert objects, which have the same class
name, but only attributes and no code. If the pickle asks for anything else, a FormatError is raised that names it.

The tensors share the memory of a mapped file, so a byte is read only when somebody uses it. For callers that read
ranges of the file instead, ``TorchFiles.place`` returns where in the file the bytes of a tensor are.
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
from zckpt.state.inventory import FileRange

if TYPE_CHECKING:
    from collections.abc import Callable

PICKLE_BYTES_MAX = 256 << 20
"""The largest pickle that is read, in bytes. A pickle contains no values of tensors: that of a model with 100,000
parameters has about 20 MB."""
COPIED_BYTES_MAX = 256 << 20
"""The number of bytes by which all copied tensors together may exceed the size of the file. A tensor that is not one
range of the file, such as an expanded one, is copied as a whole when it is used."""
GROWTH_MAX = 8
"""The largest number of values that a pickle may describe for each of its bytes. A pickle in which no list is in two
places describes less than one value for each byte. A pickle with a list that contains itself describes values without
end."""
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
}
"""The classes of plain values and containers that a pickle may make."""
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
"""The dtype of each class of storages."""
_NUMPY_KINDS = frozenset("biufcSU")
"""NumPy's letters for the kinds of dtypes that an array in a pickle may have: numbers, bool, bytes and text."""


class Inert:
    """Stands for an object of a class of which only the name is used."""

    args: tuple[Any, ...] = ()
    """The arguments with which the pickle has made the object."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class TorchFiles:
    """The files that were loaded, and the places in memory to which they are mapped."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        """The address of each mapped file, in ascending order."""
        self._files: list[tuple[int, int, str, torch.UntypedStorage]] = []
        """The address, the size in bytes, the path and the storage of each mapped file, in ascending order of the
        addresses."""

    def load(self, path: str) -> Any:
        """Returns what was saved in a file. Its tensors are mapped. Raises MissingFileError, FormatError,
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
        except Exception as error:  # A damaged archive can make zipfile raise almost any error.
            raise FormatError(f"this is not a whole file of torch.save: {error}", file=path, hint=COPY_AGAIN) from error

    def place(self, data: torch.Tensor | FileRange | None) -> torch.Tensor | FileRange | None:
        """Returns the range of a file that has the bytes of a contiguous tensor, or ``data`` itself if it is not in a
        mapped file."""
        if not isinstance(data, torch.Tensor) or not data.numel():
            return data
        nbytes, address = data.numel() * data.element_size(), data.data_ptr()
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return data
        base, size, path, _ = self._files[index]
        return FileRange(path, address - base, nbytes) if address + nbytes <= base + size else data

    def _map(self, path: str) -> torch.UntypedStorage:
        """Maps a file to memory, and returns all of it as one storage."""
        with open(path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
        mapped = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(path, False, size))
        base = mapped.data_ptr()
        index = bisect_right(self._bases, base)
        self._bases.insert(index, base)
        self._files.insert(index, (base, size, path, mapped))
        return mapped


def _open(path: str) -> zipfile.ZipFile:
    """Opens a file of ``torch.save``. Raises UnsupportedError for the format of torch before 1.6, and FormatError for a
    file in another format."""
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

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)


class _Storage:
    """The record of a storage, whose bytes are ``numel`` elements of one dtype."""

    def __init__(self, data: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> None:
        self.data, self.dtype, self.numel = data, dtype, numel


class _Array(Inert):
    """A NumPy array. The pickle first makes the object, and then sets its value."""

    value: Any = None


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, in its implementation in Python. The implementation in C allocates memory for as many
    objects as a pickle claims to have."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    """The opcodes that a pickle may use, each with its method. Opcodes that make objects in other ways, and that torch
    does not use, are removed."""
    del dispatch[pickle.NEWOBJ_EX[0]], dispatch[pickle.OBJ[0]], dispatch[pickle.INST[0]]

    def __init__(self, raw: bytes, mapped: torch.UntypedStorage, names: dict[str, zipfile.ZipInfo], path: str) -> None:
        super().__init__(io.BytesIO(raw), encoding="utf-8")
        self._mapped, self._names, self._path = mapped, names, path
        self._values_max = GROWTH_MAX * len(raw)
        """The largest number of values that the pickle may describe."""
        self._copied_values = 0
        """The number of values that calls of the pickle were given to copy so far."""
        self._nested: dict[int, tuple[tuple[Any, ...], int, int]] = {}
        """The tuples that have tuples in them, by id. Each entry also has the number of values in the tuple and its
        depth."""
        self._made: dict[str, Any] = {}
        """What ``find_class`` has returned for each name."""
        self._storages: dict[tuple[str, torch.dtype], _Storage] = {}
        """The storages by the key of their record and their dtype."""

    def load(self) -> Any:
        try:
            tree = super().load()
            if _sum(tree, _values, self._values_max + 1, {}) > self._values_max:
                raise self._too_many()
            if _sum(tree, _copied_bytes, 0, {}) > self._mapped.nbytes() + COPIED_BYTES_MAX:
                raise FormatError(
                    "its tensors, some of which have more elements than are stored, would take far more memory than "
                    "the file has bytes", file=self._path,
                    hint="in the training script, register the clone() of buffers that are expanded, and save again",
                )  # fmt: skip
            return self._resolved(tree, {})
        except (FormatError, UnsupportedError):
            raise
        except OSError:
            raise
        except Exception as error:  # A pickle can be written so that it raises any error.
            raise FormatError(f"its pickle cannot be read: {error or type(error).__name__}", file=self._path) from error

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
            "torch._utils._rebuild_tensor_v2": self._tensor, "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": _with_name, "_codecs.encode": _encoded, "numpy.dtype": _dtype,
            # Its first argument is a class that is not known here, so the error names that class.
            "torch._utils._rebuild_wrapper_subclass": lambda *_: None,
        }  # fmt: skip
        if path in functions:
            return _Call(functions[path])
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
            hint="if you trust the checkpoint, load it into an engine after zckpt.attach(engine), which reads "
            "DeepSpeed's checkpoints too, and write it with zckpt.write",
        )  # fmt: skip

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int or type(key) is not str:
            raise FormatError("its pickle describes a storage in an unknown way", file=self._path)
        if (key, dtype) not in self._storages:
            self._storages[key, dtype] = self._record(f"data/{key}", dtype, numel)
        return self._storages[key, dtype]

    def _record(self, name: str, dtype: torch.dtype, numel: int) -> _Storage:
        """Returns a record of a storage. Raises FormatError if it is missing, compressed, or shorter than ``numel``
        elements."""
        info = self._names.get(name)
        if info is None:
            raise FormatError(f"its record {name} is missing", file=self._path, hint=COPY_AGAIN)
        offset = info.header_offset
        header = _LOCAL_HEADER.unpack(bytes(self._mapped[offset : offset + _LOCAL_HEADER.size].tolist()))
        start = offset + _LOCAL_HEADER.size + header[-2] + header[-1]
        nbytes = numel * dtype.itemsize
        whole = _is_plain(info) and 0 <= nbytes <= info.file_size
        if header[0] != _ZIP or not whole or start + nbytes > self._mapped.nbytes() or start % dtype.itemsize:
            raise FormatError(
                f"its record {name} is damaged or cut off", file=self._path, start=start, stop=start + nbytes,
                hint=COPY_AGAIN,
            )  # fmt: skip
        return _Storage(self._mapped[start : start + nbytes], dtype, numel)

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any, *more: Any) -> torch.Tensor:
        """Returns the tensor that ``torch._utils._rebuild_tensor_v2`` would return. Raises FormatError if it would have
        elements outside of its storage, and UnsupportedError if it would have other values than its storage."""
        if not isinstance(storage, _Storage):
            raise FormatError("its pickle describes a tensor in an unknown way", file=self._path)
        if len(more) > 2 and more[2]:  # {"conj": True} or {"neg": True}
            raise UnsupportedError(
                f"{self._path} has a conjugated or negated view of a tensor, which zckpt does not read",
                hint="in the training script, keep the resolve_conj() or resolve_neg() of it, and save again",
            )
        sizes, strides = tuple(size), tuple(stride)
        numbers = (offset, *sizes, *strides)
        last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if 0 not in sizes else -1
        natural = all(type(number) is int and number >= 0 for number in numbers)
        if not natural or last >= storage.numel or len(sizes) > NDIM_MAX:
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
        """Puts a new tuple on the stack. Raises FormatError for a tuple that, together with the tuples inside it, has
        too many values or too many levels. If such a tuple became a key of a dict, it would be hashed with everything
        inside it, which would take endless time if the same tuple is in many places."""
        inner = [self._nested.get(id(item), (item, len(item), 1)) for item in made if type(item) is tuple]
        if inner:
            values = len(made) + sum(inner_values for _, inner_values, _ in inner)
            depth = 1 + max(inner_depth for _, _, inner_depth in inner)
            if values > self._values_max or depth > TREE_DEPTH_MAX:
                raise self._too_many()
            self._nested[id(made)] = made, values, depth
        self.append(made)  # type: ignore[attr-defined]

    def _tuple_of(self, count: int) -> None:
        """Puts a new tuple of the last ``count`` values of the stack in their place."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        made = tuple(stack[-count:])
        del stack[-count:]
        self._append_tuple(made)

    dispatch[pickle.TUPLE[0]] = lambda self: self._append_tuple(tuple(self.pop_mark()))
    dispatch[pickle.TUPLE1[0]] = lambda self: self._tuple_of(1)
    dispatch[pickle.TUPLE2[0]] = lambda self: self._tuple_of(2)
    dispatch[pickle.TUPLE3[0]] = lambda self: self._tuple_of(3)

    def _copies(self, args: Any) -> Any:
        """Counts the values that a call may copy, and returns the arguments of the call. A pickle may give the same
        list or text to many calls."""
        self._copied_values += sum(len(argument) for argument in args if isinstance(argument, Sized))
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
        """Returns ``value`` with NumPy's arrays instead of the objects that stand for them. Containers are changed in
        place if that is possible. ``known``: for the id of each container, the container and what it has become."""
        if isinstance(value, _Array):
            return value.value
        if not isinstance(value, (dict, list, tuple, Inert)):
            return value
        if id(value) in known:
            return known[id(value)][1]
        known[id(value)] = value, value  # Keeps the container alive, so that no other object can get its id.
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
    """Returns the sum of ``of`` over all values of a tree. A container that is in two places counts twice. ``again``:
    what a container counts for where it is inside itself. ``known``: the sums of containers by id."""
    if isinstance(value, _Array) or not isinstance(value, (dict, list, tuple, set, frozenset, Inert)):
        return of(value)
    if id(value) not in known:
        known[id(value)] = again
        inner = vars(value) if isinstance(value, Inert) else value
        items = (*inner, *inner.values()) if isinstance(inner, dict) else inner
        known[id(value)] = of(value) + sum(_sum(item, of, again, known) for item in items)
    return known[id(value)]


def _values(value: Any) -> int:
    """Returns the number of values for which a value of a tree counts. An array counts for each of its bytes."""
    return int(value.value.nbytes) + 1 if isinstance(value, _Array) and value.value is not None else 1


def _copied_bytes(value: Any) -> int:
    """Returns the number of bytes of a tensor that must be copied when it is used, and 0 for any other value."""
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
        """The dtype, with the byte order that the pickle has set."""
        return self.dtype.newbyteorder(">") if self.swapped else self.dtype


def _dtype(name: object, *_: object) -> _Dtype:
    if not isinstance(name, str):
        raise TypeError("a dtype without a name")
    return _Dtype(name)


def _scalar(dtype: _Dtype, raw: object) -> Any:
    return np.frombuffer(_bytes(raw), dtype.value, 1)[0]


def _array(state: Any) -> Any:
    _, shape, dtype, in_columns, raw = state
    array = np.frombuffer(_bytes(raw), dtype.value).reshape(shape, order="F" if in_columns else "C")
    return array.astype(dtype.dtype.newbyteorder("="))


def _bytes(raw: object) -> bytes:
    if not isinstance(raw, bytes):
        raise TypeError("an array of objects")
    return raw


def _with_name(make: object, kind: object, args: Any, state: object) -> torch.Tensor:
    """Returns a tensor that was saved with attributes. Of these, only the name that DeepSpeed gives to an offloaded
    tensor (``ds_id``) is kept."""
    made = make(*args) if isinstance(make, _Call) else None
    if not isinstance(made, torch.Tensor):
        raise TypeError("a tensor of an unknown kind")
    if isinstance(state, dict) and isinstance(state.get("ds_id"), str):
        made.ds_id = state["ds_id"]  # type: ignore[attr-defined]
    return made


def _encoded(text: object, encoding: object) -> bytes:
    """Returns bytes that Python has pickled as text, because pickles of protocol 2 and lower cannot contain bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("text in an unknown encoding")
    return text.encode("latin1")
