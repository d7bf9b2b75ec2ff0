"""Reads files of ``torch.save`` without running any code that is in them, and without reading their tensors.

A pickle is a program. Here it may make only plain values and containers, tensors, NumPy's numbers and arrays, and
objects of a few classes of DeepSpeed and of torch's distributed checkpoints. Instead of the last of these it gets inert
objects, which have the same class name, but only attributes and no code. If the pickle asks for anything else, a
FormatError is raised that names it.

A file from a stranger can be written so that a few bytes of its pickle describe very much: objects that take far more
memory than bytes in the file, or numbers that all have the same hash, so that a dict of them takes endless time. So
each opcode is charged with about the memory that it takes, and the pickle is refused once all of them together exceed a
multiple of its length. The lengths of long keys, which are hashed and compared, are charged too.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter, OrderedDict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from zckpt.engines.tensors import dtype_name
from zckpt.errors import FormatError, UnsupportedError, ZckptError
from zckpt.format.limits import NDIM_MAX
from zckpt.tools.converting.pickle_objects import (
    FUNCTIONS,
    INERT,
    MANY,
    PLAIN_TYPES,
    SIZED,
    UNSUPPORTED,
    VALUES,
    Dtype,
    Inert,
    set_array,
)
from zckpt.tools.converting.source import COPY_AGAIN
from zckpt.tools.converting.torch_archive import opened
from zckpt.transfer.stored import GAP_BYTES, read_strided, stored_storage, with_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zckpt.plan.inventory import FileRange
    from zckpt.tools.converting.torch_archive import Archive

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
_LEFT_OUT = (
    pickle.NEWOBJ_EX + pickle.OBJ + pickle.INST + pickle.EXT1 + pickle.EXT2 + pickle.EXT4 + pickle.BYTEARRAY8
    + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER
)  # fmt: skip
"""The opcodes that a pickle may not use. torch does not use them, and they make objects in other ways, or allocate
memory before they read."""
_SHORT = 256
"""The most characters of a text that costs no more than any other key."""
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


def load(path: str, place: FileRange | None = None) -> Any:
    """Returns what was saved in a file, or in the range ``place`` of the file. Its tensors of more than one element
    have no memory, except for those whose values torch changes when it reads them. See transfer/stored.py for how to
    get their values. Raises MissingFileError, FormatError, UnsupportedError and StorageError."""
    with opened(path, place) as archive:
        return _Unpickler(archive).load()


def load_pickle(path: str) -> Any:
    """Returns the value of a file that has nothing but a pickle without tensors. Raises the errors of ``load``."""
    with opened(path, only_pickle=True) as archive:
        return _Unpickler(archive).load()


def loads(raw: bytes | memoryview) -> Any:
    """Returns what was saved in the bytes of a file, with all tensors in memory. Raises FormatError, and
    UnsupportedError."""
    with os.fdopen(os.memfd_create("zckpt"), "wb") as file:
        file.write(raw)
        file.flush()
        return tree_map_only(torch.Tensor, with_values, load(f"/proc/self/fd/{file.fileno()}"))


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

    def __init__(self, archive: Archive) -> None:
        super().__init__(io.BytesIO(archive.pickle), encoding="utf-8")
        self._archive, self._raw = archive, archive.pickle
        self._memory_max = MEMORY_BYTES_MIN + MEMORY_GROWTH_MAX * (len(self._raw) + ENTRY_BYTES * archive.records)
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
            error.file = error.file or self._archive.path
            raise
        except OSError:
            raise
        except Exception as error:  # A pickle can be written so that it raises any error.
            raise FormatError(
                f"its pickle cannot be read: {error or type(error).__name__}", file=self._archive.path
            ) from error

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
        if path in VALUES:
            return VALUES[path]
        if path in INERT:
            return type(name, (Inert,), {})  # Each file gets a new class, which no other pickle can have changed.
        functions = FUNCTIONS | {
            "torch._utils._rebuild_tensor_v2": self._tensor, "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._tensor._rebuild_from_type_v2": self._with_name,
        }  # fmt: skip
        if path in functions:
            return _Call(functions[path])
        if path in UNSUPPORTED:
            raise UnsupportedError(
                f"its pickle has {UNSUPPORTED[path]}, which zckpt cannot keep",
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
            self._storages[key] = _Storage(self._archive.record(f"data/{key}", numel * dtype.itemsize), dtype, numel)
        storage = self._storages[key]
        if (storage.dtype, storage.numel) != (dtype, numel):
            raise FormatError(f"its pickle describes the storage {key} in two ways")
        return storage

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
            if self._copied_bytes > self._archive.nbytes + COPIED_BYTES_MAX:
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
        lengths = sum(len(argument) for argument in args if isinstance(argument, SIZED))
        self._charge((32 if make in MANY else 4) * lengths)
        if isinstance(make, _Call):
            return make.make(*args)
        self._charge(192)
        if make in PLAIN_TYPES:
            kinds = (dict,) if issubclass(make, dict) else (list,) if issubclass(make, (set, frozenset)) else SIZED
            for argument in args:
                if not isinstance(argument, (*kinds, int, float, type, type(None))):
                    raise TypeError(f"a {make.__name__} that is made of a {type(argument).__name__}")
                if isinstance(argument, kinds) and kinds is not SIZED:
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
            self._charge(set_array(made, state))
        elif isinstance(made, Dtype):
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
