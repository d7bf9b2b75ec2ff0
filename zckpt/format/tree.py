"""Trees of non-tensor state in msgpack (spec, "State trees"). Plain values are kept as they are, others as extensions:

ext 1   reference   the name of a tensor in the part ``state``, for a torch tensor
ext 2   reference   the same for a numpy array
ext 3   tuple       a packed array of its items
ext 4   integer     an integer beyond 64 bits, in decimal
ext 5   dict type   a packed [name, map] for collections.OrderedDict or collections.Counter
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from zckpt.errors import FormatError, StateError
from zckpt.format import packed
from zckpt.format.limits import CONTAINERS_MAX, TREE_BYTES_MAX, TREE_DEPTH_MAX, TREE_INTEGER_DIGITS_MAX
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

TENSOR, NDARRAY, TUPLE, INTEGER, DICT_TYPE = 1, 2, 3, 4, 5
_DICT_TYPES: dict[str, type] = {"OrderedDict": OrderedDict, "Counter": Counter}
_I64 = range(-(1 << 63), 1 << 64)
_INTEGER_MAX = 10**TREE_INTEGER_DIGITS_MAX - 1
_INTEGER = re.compile(rf"-?[1-9][0-9]{{0,{TREE_INTEGER_DIGITS_MAX - 1}}}", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


PLAIN_TYPES = (bool, int, float, str, bytes, list, tuple, dict)
_KEPT = (
    f"keep None, plain values ({', '.join(kind.__name__ for kind in PLAIN_TYPES)}), tensors and arrays; in "
    "client_state, rank_state and state dicts also numpy scalars, paths and what else the docstring of zckpt.write "
    "names; of other objects, keep their state_dict()"
)


class Plain(NamedTuple):
    """A value that is packed in the place of another one."""

    value: object
    """The value to pack."""


def pack(
    value: object,
    path: str,
    put: Callable[[str, object], tuple[int, str] | Plain | None],
    put_key: Callable[[str, object], str | int | None] = lambda path, key: None,
) -> bytes:
    """Returns the bytes of the tree whose root is ``value``. Errors call the root ``path``.

    ``put`` is called with the path and the value of everything that is not a plain value. It stores a tensor or array
    and returns its extension type and name, or returns a plain value to pack instead, or None if the value cannot be
    kept. ``put_key`` is called with the path of a map and each key in it that is not a plain one. It returns a plain
    key to pack instead, or None if the key cannot be kept. Raises StateError, which names the path, if a tree cannot
    contain a value.
    """
    encoder = _Encoder(put, put_key)
    return encoder.packed(encoder.encode(value, path, 0), path)


class _Encoder:
    """Packs one tree, and counts what it takes."""

    def __init__(
        self,
        put: Callable[[str, object], tuple[int, str] | Plain | None],
        put_key: Callable[[str, object], str | int | None],
    ) -> None:
        self.put, self.put_key = put, put_key
        self.nbytes = self.encoded_bytes = self.containers = 0
        self.around: set[int] = set()
        """The ids of the values around the one that is encoded now."""

    def packed(self, value: object, path: str) -> bytes:
        """Packs a value that has been encoded. Raises StateError if the tree has too many bytes now."""
        raw: bytes = msgpack.packb(value, strict_types=True)
        self.nbytes += len(raw)
        self.check(self.nbytes, path)
        return raw

    def check(self, nbytes: int, path: str) -> None:
        """Raises StateError if the tree has more than ``TREE_BYTES_MAX`` bytes or too many lists and maps."""
        if nbytes > TREE_BYTES_MAX or self.containers > CONTAINERS_MAX:
            raise StateError(
                f"{path or 'the tree'} is too large: a tree has at most {TREE_BYTES_MAX} bytes and {CONTAINERS_MAX} "
                "lists and maps",
                key=path, rule="T004", hint="keep what is large in tensors or arrays",
            )  # fmt: skip

    def encode(self, value: object, path: str, depth: int) -> object:
        """Returns a value as msgpack can pack it. ``depth`` is its level in the tree."""
        if depth > TREE_DEPTH_MAX:
            raise StateError(f"{path} is nested more than {TREE_DEPTH_MAX} levels deep", key=path, rule="T002")
        kind = type(value)
        # A list that is in many places of a tree is in memory once, but is encoded for each place. This is checked
        # early, because the encoded values could take all memory.
        self.encoded_bytes += len(value) if isinstance(value, (str, bytes)) else 1
        self.check(self.encoded_bytes, path)
        if value is None or kind in (bool, float, bytes):
            return value
        if kind is str:
            assert isinstance(value, str)
            try:
                value.encode()
            except UnicodeEncodeError:
                raise StateError(f"{path} is a string that is not valid Unicode", key=path) from None
            return value
        if isinstance(value, int) and kind is int:
            if abs(value) > _INTEGER_MAX:
                raise StateError(f"{path} is an integer of more than {TREE_INTEGER_DIGITS_MAX} digits", key=path)
            return value if value in _I64 else msgpack.ExtType(INTEGER, str(value).encode())
        if id(value) in self.around:
            raise StateError(f"{path} is a value that contains itself", key=path)
        self.around.add(id(value))
        try:
            return self.encode_composed(value, path, depth)
        finally:
            self.around.discard(id(value))

    def encode_composed(self, value: object, path: str, depth: int) -> object:
        """Does the work of ``encode`` for a value that is not a single plain one."""
        kind = type(value)
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            self.containers += 1
            items = [self.encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if kind is list else msgpack.ExtType(TUPLE, self.packed(items, path))
        if isinstance(value, dict) and kind in (dict, *_DICT_TYPES.values()):
            self.containers += 1
            items_by_key: dict[str | int, object] = {}
            for key, item in value.items():
                kept = kept_key(key, path, self.put_key, items_by_key, value)
                self.encode(kept, path, depth)
                items_by_key[kept] = self.encode(item, below(path, key), depth + 1)
            if kind is dict:
                return items_by_key
            self.containers += 1
            return msgpack.ExtType(DICT_TYPE, self.packed([kind.__name__, items_by_key], path))
        stored = self.put(path, value)
        if isinstance(stored, Plain):
            return self.encode(stored.value, path, depth)
        if stored is None:
            base = next((above.__name__ for above in kind.__mro__ if above in PLAIN_TYPES), None)
            raise StateError(
                f"{path}: {kind.__name__}{f', a subclass of {base},' if base else ''} cannot be kept",
                key=path,
                hint=f"its own type would be lost: make it a plain {base}" if base else _KEPT,
            )
        return msgpack.ExtType(stored[0], stored[1].encode())


def with_entry(packed: bytes, key: str, value: object) -> bytes:
    """Returns a packed map with one entry more, without unpacking the others. ``packed``: a map that does not have this
    key, as ``pack`` returns it, or nil, which counts as an empty map. Raises StateError (T004) if the tree is too large
    then."""
    packer = msgpack.Packer()
    if packed == packer.pack(None):
        packed = packer.pack_map_header(0)
    unpacker = msgpack.Unpacker()
    unpacker.feed(packed)
    header = packer.pack_map_header(unpacker.read_map_header() + 1)
    raw: bytes = header + packed[unpacker.tell() :] + packer.pack(key) + packer.pack(value)
    _Encoder(lambda path, leaf: None, lambda path, key: None).check(len(raw), "")
    return raw


def below(path: str, key: object) -> str:
    """Returns the path of the value of ``key`` in the map at ``path``."""
    if isinstance(key, str) and _IDENTIFIER.fullmatch(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def unpack(raw: bytes, get: Callable[[int, str], object], file: str) -> Any:
    """Returns the root value of the packed tree ``raw``. ``get`` returns the tensor (extension type 1) or the array
    (type 2) of a name. Errors call the tree ``file``. Raises FormatError (T001 to T004)."""
    return _Decoder(get, file).decode(raw, 0)


class _Decoder:
    """Unpacks one tree. It bounds what the whole tree takes, and asks for each tensor once."""

    def __init__(self, get: Callable[[int, str], object], file: str) -> None:
        self.get = get
        self.file = file
        self.nbytes = 0
        self.containers = packed.Containers(CONTAINERS_MAX)
        self.referenced: set[str] = set()

    def decode(self, raw: bytes, depth: int) -> Any:
        """Returns the value in ``raw``: the tree, or the payload of an extension with ``depth`` payloads around it."""
        if depth > TREE_DEPTH_MAX:
            raise broken("T002", "the tree is nested too deep", file=self.file)
        self.nbytes += len(raw)
        if self.nbytes > TREE_BYTES_MAX:
            raise broken("T004", f"the tree has more than {TREE_BYTES_MAX} bytes", file=self.file)
        try:
            value = packed.unpack(raw, self.containers, is_key=is_key, ext_hook=partial(self._extension, depth))
        except FormatError:
            raise
        except packed.TooManyError as error:
            raise broken("T004", f"the tree has more than {CONTAINERS_MAX} arrays and maps", file=self.file) from error
        except msgpack.StackError as error:
            raise broken("T002", "the tree is nested deeper than the parser goes", file=self.file) from error
        except packed.ERRORS as error:
            raise broken("T001", f"cannot be parsed: {error or type(error).__name__}", file=self.file) from error
        if depth == 0:
            _check_depth(value, self.file)
        return value

    def _extension(self, depth: int, code: int, data: bytes) -> object:
        """Returns the value of an extension in a payload at ``depth``."""
        if code in (TENSOR, NDARRAY):
            name = _text(data, self.file)
            if name in self.referenced:
                raise broken("T003", f"the tensor {name!r} is referenced twice", file=self.file)
            self.referenced.add(name)
            return self.get(code, name)
        if code == INTEGER:
            text = _text(data, self.file)
            if not _INTEGER.fullmatch(text) or int(text) in _I64:
                raise broken("T001", f"the integer {text[:40]!r}", file=self.file)
            return int(text)
        inner = self.decode(data, depth + 1)
        if code == TUPLE and isinstance(inner, list):
            return tuple(inner)
        if code == DICT_TYPE and isinstance(inner, list) and len(inner) == 2 and isinstance(inner[1], dict):
            kind = _DICT_TYPES.get(inner[0]) if isinstance(inner[0], str) else None
            if kind is not None:
                return kind(inner[1])
        raise broken("T001", f"extension type {code}", file=self.file)


def kept_key(
    key: object,
    path: str,
    put_key: Callable[[str, object], str | int | None],
    taken: Collection[object],
    keys: Collection[object],
) -> str | int:
    """Returns the plain key that ``key`` of the map at ``path`` is packed as. ``put_key``: as for ``pack``. ``taken``:
    the plain keys of the entries before it. ``keys``: all keys of the map. Raises StateError if there is no such key,
    or if another entry has it."""
    kept = key if is_key(key) else put_key(path, key)
    if kept is None or kept in taken or (kept != key and kept in keys):
        raise StateError(f"{path} has the key {key!r}: only strings and 64-bit integers can be kept", key=path)
    return kept  # type: ignore[return-value]


def is_key(key: object) -> bool:
    """Whether ``key`` may be the key of a map in a tree."""
    return type(key) is str or (type(key) is int and key in _I64)


def _check_depth(value: object, file: str) -> None:
    """Raises FormatError (T001) for a timestamp in a tree, and (T002) for a value at too high a level."""
    level = [value]
    for _ in range(TREE_DEPTH_MAX + 1):
        if any(isinstance(node, msgpack.Timestamp) for node in level):
            raise broken("T001", "a timestamp", file=file)
        level = [
            item
            for node in level
            if isinstance(node, (dict, list, tuple))
            for item in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise broken("T002", f"the tree is nested more than {TREE_DEPTH_MAX} levels deep", file=file)


def _text(data: bytes, file: str) -> str:
    """Returns the text of a payload. Raises FormatError (T001) if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise broken("T001", "a reference or an integer that is not UTF-8", file=file) from error
