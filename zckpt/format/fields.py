"""Typed access to the fields of the manifest's body."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zckpt.format import names, packed
from zckpt.format.dtypes import DTYPE_IDS, DTYPES
from zckpt.format.limits import CONTAINERS_MAX, PARTS_MAX, TENSOR_BYTES_MAX
from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from zckpt.geometry import Ints

T = TypeVar("T")


def unpack_body(raw: memoryview) -> dict[Any, Any]:
    """Returns the map that ``raw``, the body of the manifest, consists of. Raises FormatError (M005) for anything else
    than one msgpack map without duplicate keys."""
    try:
        containers = packed.Containers(CONTAINERS_MAX)
        value = packed.unpack_map(raw, containers, {"parts": partial(_parts, containers=containers)})
    except packed.TooManyError as error:
        raise broken("M005", f"more than {CONTAINERS_MAX} arrays and maps", file=names.MANIFEST) from error
    except packed.ERRORS as error:
        raise broken("M005", f"cannot be parsed: {error or type(error).__name__}", file=names.MANIFEST) from error
    if not isinstance(value, dict):
        raise broken("M005", f"a {type(value).__name__} where a map is due", file=names.MANIFEST)
    return value


def _parts(raw: memoryview, containers: packed.Containers) -> list[Any] | None:
    """Returns the parts, with their columns as arrays of numbers, or None if there are too many parts."""
    if not 0 <= packed.array_header(raw)[0] <= PARTS_MAX:
        return None
    columns = dict.fromkeys(("names", "shapes", "grids"), packed.integers) | {
        "dtypes": partial(packed.words, known=DTYPES)
    }
    return [packed.unpack_map(part, containers, columns) for part in packed.items(raw)]


class Fields:
    """The fields of one map. Each method returns the field of a name, and raises FormatError (M005) if it is missing or
    of another type."""

    def __init__(self, values: Mapping[Any, Any], where: str) -> None:
        """``where`` names the map in errors."""
        self.values = values
        self.where = where

    def get(self, name: str, kind: type[T]) -> T:
        """Returns a field of exactly the type ``kind``. A bool is no int here, and the items of a list may be of any
        type."""
        value = self.values.get(name)
        if type(value) is not kind:
            raise broken("M005", f"field {name!r} is {type(value).__name__}, not {kind.__name__}", file=names.MANIFEST)
        return value

    def map(self, name: str) -> Fields:
        """Returns a map as ``Fields``."""
        return Fields(self.get(name, dict), name)

    def integer(self, name: str, low: int, high: int) -> int:
        """Returns an integer. Raises FormatError (M005), too, unless it is at least ``low`` and at most ``high``."""
        value = self.get(name, int)
        if not low <= value <= high:
            raise broken("M005", f"field {name!r} is {value}, not in [{low}, {high}]", file=names.MANIFEST)
        return value

    def integers(self, name: str) -> list[int]:
        """Returns an array of integers of 0 to ``TENSOR_BYTES_MAX``."""
        self.column(name)
        return self.get(name, list)

    def column(self, name: str) -> Ints:
        """Returns what ``integers`` returns, as a column."""
        column = self.values.get(name)
        if not isinstance(column, np.ndarray):
            values, column = self.get(name, list), np.array([-1])  # is refused below, unless the values are integers
            if {*map(type, values)} <= {int}:
                with suppress(OverflowError):
                    column = np.fromiter(values, np.int64, len(values))
        if column.min(initial=0) >= 0 and column.max(initial=0) <= TENSOR_BYTES_MAX:
            return column
        raise broken("M005", f"field {name!r} holds something else than sizes", file=names.MANIFEST)

    def dtype_ids(self, name: str) -> NDArray[np.uint8]:
        """Returns an array of dtypes as a column of their ids. Raises FormatError (M009), too, for other strings."""
        column = self.values.get(name)
        if isinstance(column, np.ndarray):
            return column
        try:
            return np.array([*map(DTYPE_IDS.__getitem__, self.strings(name))], np.uint8)
        except KeyError as error:
            what = f"part {self.get('name', str)} has the dtype {error.args[0]!r}"
            raise broken("M009", what, file=names.MANIFEST) from None

    def strings(self, name: str) -> list[str]:
        """Returns an array of strings."""
        values = self.get(name, list)
        try:
            "".join(values)  # This takes a third of the time of looking at the type of each item.
        except TypeError:
            raise broken("M005", f"field {name!r} holds something else than strings", file=names.MANIFEST) from None
        return values

    def string_map(self, name: str) -> dict[str, str]:
        """Returns a map from strings to strings."""
        values = self.get(name, dict)
        if not all(type(key) is str and type(value) is str for key, value in values.items()):
            raise broken("M005", f"field {name!r} holds something else than strings", file=names.MANIFEST)
        return values

    def columns(self, *columns: str) -> list[list[int]]:
        """Returns several arrays as ``integers`` does. Raises FormatError (M005), too, if they differ in length."""
        arrays = [self.integers(column) for column in columns]
        if len({len(array) for array in arrays}) > 1:
            raise broken("M005", f"the columns of {self.where!r} differ in length", file=names.MANIFEST)
        return arrays
