"""Trees of non-tensor state as msgpack: plain values as they are, the rest as extension types (spec, "State trees").

ext 1   reference   the name of a tensor in the part ``state``; a torch tensor
ext 2   reference   the same, for a numpy array
ext 3   tuple       a packed array of its elements
ext 4   integer     beyond 64 bits, in decimal
ext 5   dict type   packed [name, map]: collections.OrderedDict, collections.Counter
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import msgpack

from zckpt.errors import FormatError, StateError
from zckpt.format.limits import TREE_DEPTH_MAX, TREE_INTEGER_DIGITS_MAX
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Callable

TENSOR, NDARRAY, TUPLE, INTEGER, DICT_TYPE = 1, 2, 3, 4, 5
_DICT_TYPES: dict[str, type] = {"OrderedDict": OrderedDict, "Counter": Counter}
_I64 = range(-(1 << 63), 1 << 64)
_INTEGER_MAX = 10**TREE_INTEGER_DIGITS_MAX - 1
_INTEGER = re.compile(rf"-?[1-9][0-9]{{0,{TREE_INTEGER_DIGITS_MAX - 1}}}", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def pack(value: object, path: str, put: Callable[[str, object], tuple[int, str] | None]) -> bytes:
    """The bytes of a tree. ``path`` names it in errors.

    ``put(path, leaf)`` is called for what is not a plain value: it stores a tensor or array and returns its extension
    type and name, or returns None. Raises StateError, naming the path, for what cannot be represented.
    """
    return _packb(_encode(value, path, put, 0))


def _packb(value: object) -> bytes:
    raw: bytes = msgpack.packb(value, strict_types=True)
    return raw


def _encode(value: object, path: str, put: Callable[[str, object], tuple[int, str] | None], depth: int) -> object:
    if depth > TREE_DEPTH_MAX:
        raise StateError(f"{path} is nested more than {TREE_DEPTH_MAX} levels deep", key=path, rule="T002")
    kind = type(value)
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
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [_encode(item, f"{path}[{i}]", put, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else msgpack.ExtType(TUPLE, _packb(items))
    if isinstance(value, dict) and kind in (dict, *_DICT_TYPES.values()):
        items_by_key = {}
        for key, item in value.items():
            if not (type(key) is str or (type(key) is int and key in _I64)):
                raise StateError(f"{path} has the key {key!r}: only strings and 64-bit integers can be kept", key=path)
            _encode(key, path, put, depth)
            items_by_key[key] = _encode(item, _below(path, key), put, depth + 1)
        return items_by_key if kind is dict else msgpack.ExtType(DICT_TYPE, _packb([kind.__name__, items_by_key]))
    reference = put(path, value)
    if reference is None:
        raise StateError(
            f"{path}: {kind.__name__} cannot be kept",
            key=path,
            hint="keep plain values (None, bool, int, float, str, bytes, list, tuple, dict), tensors and arrays only",
        )
    return msgpack.ExtType(reference[0], reference[1].encode())


def _below(path: str, key: object) -> str:
    if isinstance(key, str) and _IDENTIFIER.fullmatch(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def unpack(raw: bytes, get: Callable[[int, str], object], file: str) -> Any:
    """The tree in ``raw``. ``get(ext, name)`` supplies tensors (1) and arrays (2); ``file`` names it in errors.

    Raises FormatError (T001 to T003).
    """
    return _decode(raw, get, file, 0)


def _decode(raw: bytes, get: Callable[[int, str], object], file: str, depth: int) -> Any:
    if depth > TREE_DEPTH_MAX:
        raise broken("T002", "the tree is nested too deep", file=file)

    def distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        if not all(type(key) is str or (type(key) is int and key in _I64) for key, _ in pairs):
            raise broken("T001", "a map key that is neither a string nor a 64-bit integer", file=file)
        found = dict(pairs)
        if len(found) != len(pairs):
            raise broken("T001", "a map has a duplicate key", file=file)
        return found

    def extension(code: int, data: bytes) -> object:
        if code in (TENSOR, NDARRAY):
            return get(code, _text(data, file))
        if code == INTEGER:
            text = _text(data, file)
            if not _INTEGER.fullmatch(text):
                raise broken("T001", f"the integer {text[:40]!r}", file=file)
            return int(text)
        inner = _decode(data, get, file, depth + 1)
        if code == TUPLE and isinstance(inner, list):
            return tuple(inner)
        if code == DICT_TYPE and isinstance(inner, list) and len(inner) == 2 and isinstance(inner[1], dict):
            kind = _DICT_TYPES.get(inner[0]) if isinstance(inner[0], str) else None
            if kind is not None:
                return kind(inner[1])
        raise broken("T001", f"extension type {code}", file=file)

    try:
        value = msgpack.unpackb(raw, raw=False, strict_map_key=False, object_pairs_hook=distinct, ext_hook=extension)
    except FormatError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise broken("T001", f"cannot be parsed: {error or type(error).__name__}", file=file) from error
    _check_depth(value, file)
    return value


def _check_depth(value: object, file: str) -> None:
    level = [value]
    for _ in range(TREE_DEPTH_MAX + 2):
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
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise broken("T001", "a reference that is not UTF-8", file=file) from error
