"""Values of optimizers: compared, copied to where they belong, and numpy scalars as numbers of Python and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from zckpt.engines.tensors import set_in_place
from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")
NARROW: dict[str, type[np.generic]] = {"float16": np.float16, "float32": np.float32}
"""The types of numpy scalars with which arithmetic is less precise than with numbers of Python."""


def placed(value: Any, present: Any, device: torch.device) -> Any:
    """Returns a copy of ``value`` whose tensors are on ``device``. If ``present`` is a tensor of the same shape and
    dtype, its memory is used for the copy.

    A function stands for a tensor or an array that has not been read yet. If ``present`` is a numpy scalar that can
    have the value of a number of Python, so is the copy.
    """
    if callable(value):
        value = value()
    if isinstance(value, torch.Tensor):
        if isinstance(present, torch.Tensor) and present.shape == value.shape and present.dtype == value.dtype:
            set_in_place(present, value)
            return present
        return value.clone() if value.device == device else value.to(device)
    if isinstance(value, (list, tuple)):
        alike = isinstance(present, (list, tuple)) and len(present) == len(value)
        items = zip(value, present if alike else [None] * len(value), strict=True)
        return type(value)(placed(*pair, device) for pair in items)
    if isinstance(value, dict):
        copied = copy(value)  # The copy has the same class, such as OrderedDict.
        copied.update({key: placed(item, None, device) for key, item in value.items()})
        return copied
    return like(value, present)


def has_tensor(value: Any) -> bool:
    """Returns whether the value is a tensor, or a list or tuple with a tensor."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(has_tensor, value)))


def narrow_dtype(value: Any) -> Any:
    """Returns the name of the dtype if the value is a numpy scalar of ``NARROW``, a list of such names if it is a list
    or tuple with such scalars, and otherwise None."""
    if isinstance(value, (list, tuple)):
        dtypes = [*map(narrow_dtype, value)]
        return dtypes if any(dtypes) else None
    return type(value).__name__ if type(value) in NARROW.values() else None


def narrowed(value: Any, dtype: Any) -> Any:
    """Returns a saved value as the numpy scalars that it was. ``dtype``: what ``narrow_dtype`` has returned. Raises
    FormatError if it cannot have returned this."""
    if dtype is None:
        return value
    if isinstance(dtype, list) and isinstance(value, (list, tuple)) and len(dtype) == len(value):
        return type(value)(map(narrowed, value, dtype))
    if isinstance(dtype, str) and dtype in NARROW and type(value) is float:
        return NARROW[dtype](value)
    raise FormatError(f"state: optimizer.numpy has {dtype!r} for {value!r}")


def like(value: Any, present: Any) -> Any:
    """Returns a number of Python as a numpy scalar, if ``present`` is one and its type has an equal number. Returns all
    other values unchanged."""
    if isinstance(present, (np.bool_, np.number)) and type(value) in (bool, int, float):
        with suppress(OverflowError), np.errstate(all="ignore"):
            same = type(present)(value)
            if equal(same.item(), value):
                return same
    return value


def equal(a: Any, b: Any) -> bool:
    """Returns whether two values, and all values inside of them, have the same types and are equal. NaN counts as equal
    to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or (a != a and b != b)


def identity(value: Any) -> tuple[object, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, repr(value.tolist())
    return type(value), repr(value)


def distinct(items: Iterable[T]) -> list[T]:
    """Returns each object once."""
    return list({id(item): item for item in items}.values())
