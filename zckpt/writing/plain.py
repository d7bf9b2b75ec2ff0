"""Replaces values that the format has no type for (numpy scalars, paths, dates, sets) by plain Python values."""

from __future__ import annotations

from collections import defaultdict
from datetime import date, datetime, time
from pathlib import PurePath

import numpy as np
import torch


def plain(value: object) -> object | None:
    """Returns a plain Python value that replaces ``value``. Returns None if the format has a type for ``value``, or if
    nothing can replace it.

    A numpy scalar becomes a number, a string or bytes of Python, ``torch.Size`` a tuple, a path a string, a date or
    time a string in ISO 8601, a set a sorted list, and a ``defaultdict`` a dict.
    """
    if isinstance(value, np.generic):
        item = value.item()  # A long double, a date or a record becomes none of the types below.
        return item if type(item) in (bool, int, float, str, bytes) else None
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if type(value) in (set, frozenset):
        return _sorted(value)  # type: ignore[arg-type]
    if type(value) is defaultdict:
        return dict(value)
    return None


def _sorted(values: set[object] | frozenset[object]) -> list[object]:
    """Returns the values in an order that is the same in every process. Python iterates over a set of strings in
    another order in each process."""
    try:
        return sorted(values)  # type: ignore[type-var]
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))
