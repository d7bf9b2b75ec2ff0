"""The manifest's body as typed fields: whatever is missing, doubled or of another type breaks M005."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.format import names, packed
from zckpt.format.limits import CONTAINERS_MAX, TENSOR_BYTES_MAX
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Mapping


def unpack_map(raw: bytes) -> dict[Any, Any]:
    """One msgpack map without duplicate keys. Raises FormatError (M005)."""
    try:
        value = packed.unpack(raw, packed.Containers(CONTAINERS_MAX))
    except packed.TooManyError as error:
        raise broken("M005", f"more than {CONTAINERS_MAX} arrays and maps", file=names.MANIFEST) from error
    except packed.ERRORS as error:
        raise broken("M005", f"cannot be parsed: {error or type(error).__name__}", file=names.MANIFEST) from error
    if not isinstance(value, dict):
        raise broken("M005", f"a {type(value).__name__} where a map is due", file=names.MANIFEST)
    return value


class Fields:
    """Typed access to the fields of one map; whatever is missing or of another type breaks M005."""

    def __init__(self, values: Mapping[Any, Any], where: str) -> None:
        self.values = values
        self.where = where

    def _get(self, name: str, kind: type) -> Any:
        value = self.values.get(name)
        if type(value) is not kind:
            raise broken("M005", f"field {name!r} is {type(value).__name__}, not {kind.__name__}", file=names.MANIFEST)
        return value

    def array(self, name: str) -> list[Any]:
        value: list[Any] = self._get(name, list)
        return value

    def binary(self, name: str) -> bytes:
        value: bytes = self._get(name, bytes)
        return value

    def string(self, name: str) -> str:
        value: str = self._get(name, str)
        return value

    def map(self, name: str) -> Fields:
        return Fields(self._get(name, dict), name)

    def integer(self, name: str, low: int, high: int) -> int:
        value: int = self._get(name, int)
        if not low <= value <= high:
            raise broken("M005", f"field {name!r} is {value}, not in [{low}, {high}]", file=names.MANIFEST)
        return value

    def integers(self, name: str) -> list[int]:
        values = self.array(name)
        if not all(type(value) is int and 0 <= value <= TENSOR_BYTES_MAX for value in values):
            raise broken("M005", f"field {name!r} holds something else than sizes", file=names.MANIFEST)
        return values

    def strings(self, name: str) -> list[str]:
        values = self.array(name)
        if not all(type(value) is str for value in values):
            raise broken("M005", f"field {name!r} holds something else than strings", file=names.MANIFEST)
        return values

    def string_map(self, name: str) -> dict[str, str]:
        values: dict[Any, Any] = self._get(name, dict)
        if not all(type(key) is str and type(value) is str for key, value in values.items()):
            raise broken("M005", f"field {name!r} holds something else than strings", file=names.MANIFEST)
        return values

    def columns(self, *columns: str) -> list[list[int]]:
        found = [self.integers(column) for column in columns]
        if len({len(column) for column in found}) > 1:
            raise broken("M005", f"the columns of {self.where!r} differ in length", file=names.MANIFEST)
        return found
