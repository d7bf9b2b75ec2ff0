"""Replaces values that the format has no type for (numpy scalars, paths, dates, sets) by plain Python values."""

from __future__ import annotations

from collections import defaultdict
from datetime import date, datetime, time
from pathlib import PurePath

import numpy as np
import torch


def plain(value: object) -> object | None:
    """The value that replaces ``value``. None if the format has a type for ``value``, or if nothing can replace it.

    A numpy scalar becomes Python's number, string or bytes; ``torch.Size`` a tuple; a path a string; a date or time a
    string in ISO 8601; a set a sorted list; a ``defaultdict`` a dict.
    """
    if isinstance(value, np.generic):
        found = value.item()  # A long double, a date or a record becomes none of the types below.
        return found if type(found) in (bool, int, float, str, bytes) else None
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
    """The values in an order that is the same in every process. The order of a set of strings is not."""
    try:
        return sorted(values)  # type: ignore[type-var]
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))
