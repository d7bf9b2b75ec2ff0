"""Plain values that stand for others in a tree of state: what readers of the format do not know by its own type."""

from __future__ import annotations

from collections import defaultdict
from datetime import date, datetime, time
from pathlib import PurePath

import numpy as np
import torch


def plain(value: object) -> object | None:
    """What is kept in the place of ``value``; None if it is to be kept as it is, or cannot be kept.

    A numpy scalar becomes Python's number, string or bytes; ``torch.Size`` a tuple; a path a string; a date or time a
    string in ISO 8601; a set a sorted list; a ``defaultdict`` a dict.
    """
    if isinstance(value, np.generic):
        found = value.item()  # a long double, a date or a record comes back as something else
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
    """In an order that is the same in every process, which that of a set of strings is not."""
    try:
        return sorted(values)  # type: ignore[type-var]
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))
