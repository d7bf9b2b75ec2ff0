"""From what a caller asks for to keys."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Sequence

from zckpt.errors import KeyNotFoundError

Keys = str | Iterable[str] | Callable[[str], bool] | None
"""One key, a glob (``"master/*"``), several of either, a predicate over keys, or None for all."""

COMPARED_MAX = 10_000
"""Keys that are compared to find the nearest: about a second."""


def select(keys: Sequence[str], wanted: Keys, aliases: Collection[str] = ()) -> list[str]:
    """The keys that ``wanted`` asks for, each once, in the order of ``keys``; then ``aliases`` asked for by name.

    Raises KeyNotFoundError if a key or glob matches nothing; the error names the nearest keys.
    """
    if wanted is None:
        return list(keys)
    if callable(wanted):
        return [key for key in keys if wanted(key)]
    found: set[str] = set()
    known = {*keys, *aliases}
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        matches = {pattern} & known or set(fnmatch.filter(keys, pattern))
        if not matches:
            raise KeyNotFoundError(f"no key matches {pattern!r}", key=pattern, hint=nearest(keys, pattern))
        found |= matches
    return [key for key in (*keys, *aliases) if key in found]


def nearest(keys: Sequence[str], wanted: str) -> str:
    """A sentence that names the keys most like ``wanted``."""
    near = difflib.get_close_matches(wanted, keys[:COMPARED_MAX], n=3, cutoff=0.3) or keys[:3]
    return f"the nearest are: {', '.join(near)}" if near else "the checkpoint holds no tensors"
