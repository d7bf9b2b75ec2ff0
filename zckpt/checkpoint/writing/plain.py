"""Replaces values that the format has no type for, such as numpy scalars, configurations and enums, by plain ones."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import torch

from zckpt.format import tree

if TYPE_CHECKING:
    from collections.abc import Callable

_AS_TEXT = (PurePath, Decimal, UUID, torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype)
_USUAL = (np.generic, PurePath, date, time, set, frozenset)
_BASES: dict[type, Callable[[Any], object]] = {
    bytearray: bytes,
    bytes: bytes.__bytes__,
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    tuple: tuple,
    list: list,
    deque: list,
}
"""For types whose subclasses are replaced: the function that returns the plain value of an object of a subclass."""


def number(value: object) -> tree.Plain | None:
    """Returns the value of Python that equals a numpy scalar. Returns None for all other values, and for a scalar that
    no value of Python equals, such as a long double."""
    item = value.item() if isinstance(value, np.generic) else None
    return tree.Plain(item) if type(item) in (bool, int, float, str, bytes) else None


def plain(value: object) -> tree.Plain | None:
    """Returns a plain value that replaces ``value``, and in which there may be other values to replace. Returns None if
    the format has a type for ``value``, or if nothing can replace it. The docstring of ``zckpt.write`` says which
    values are replaced."""
    if value is None or type(value) in tree.PLAIN_TYPES:
        return None
    if isinstance(value, np.generic):
        return number(value)
    if isinstance(value, Enum):
        return tree.Plain(value.value)
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return tree.Plain(omegaconf.OmegaConf.to_container(value))  # Interpolations stay as they were written.
    if isinstance(value, Mapping):
        return tree.Plain(dict(value))
    if isinstance(value, (Namespace, SimpleNamespace)):
        return tree.Plain(dict(vars(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return tree.Plain({name: getattr(value, name) for name in names if hasattr(value, name)})
    if isinstance(value, _AS_TEXT):
        return tree.Plain(str(value))
    if isinstance(value, (datetime, date, time)):
        return tree.Plain(value.isoformat())
    if isinstance(value, timedelta):
        return tree.Plain(value.total_seconds())
    if isinstance(value, (set, frozenset)):
        return tree.Plain(_sorted(value))
    if type(value) is np.ndarray and value.dtype.kind in "OSU":
        return tree.Plain(value.tolist())
    return next((tree.Plain(convert(value)) for base, convert in _BASES.items() if isinstance(value, base)), None)


def number_key(key: object) -> str | int | None:
    """Returns the plain key that equals a numpy scalar, or None for every other key."""
    kept = number(key)
    return kept.value if kept is not None and tree.is_key(kept.value) else None  # type: ignore[return-value]


def plain_key(key: object) -> str | int | None:
    """Returns a plain key that replaces ``key``, or None if nothing can replace it."""
    while (kept := plain(key)) is not None:
        key = kept.value
    if tree.is_key(key):
        return key  # type: ignore[return-value]
    return repr(key) if _has_text(key) else None


def _has_text(key: object) -> bool:
    """Whether the ``repr`` of a key is short, and always the same for an equal key."""
    if type(key) is tuple:
        return all(map(_has_text, key))
    return key is None or type(key) in (bool, float, str) or tree.is_key(key)


def _sorted(values: set[object] | frozenset[object]) -> list[object]:
    """Returns the values in an order that is the same in every process. Python iterates over a set of strings in
    another order in each process."""
    try:
        return sorted(values)  # type: ignore[type-var]
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def is_told(kept: object, value: object) -> bool:
    """Returns whether a warning says that the plain value ``kept`` replaces ``value``: if the two are not equal, except
    for values that are usual in a state and have one usual plain form."""
    try:
        return not isinstance(value, _USUAL) and not bool(kept == value)
    except Exception:  # The comparison is that of the value's class, which may raise anything.
        return True
