"""Keys, which are ``<part>/<name>``: which ones a caller asks for, and of which parts they are."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from zckpt.errors import KeyNotFoundError

Keys = str | Iterable[str] | Callable[[str], bool] | None
"""One key, a glob (``"master/*"``), several of either, a predicate over keys, or None for all."""

_Names = TypeVar("_Names")

COMPARED_MAX = 10_000
"""Keys that are compared to find the nearest: about a second."""


def several(given: _Names) -> _Names | tuple[str]:
    """The names that a caller gives: a string is one of them, and no collection of letters."""
    return (given,) if isinstance(given, str) else given


def select(keys: Sequence[str], wanted: Keys, aliases: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The keys that ``wanted`` asks for, each once: those of ``keys`` in their order, then those with an alias.

    ``aliases``: from each further name of a tensor to the name that it has in ``keys``. A key with a further name is
    found by itself; or by a glob that does not match the tensor's key in ``keys`` too, so that ``master/*`` has no
    tensor twice. A predicate is over ``keys`` alone.

    Raises KeyNotFoundError if a key, glob or predicate matches nothing; the error names some keys.
    """
    if wanted is None:
        return list(keys)
    if callable(wanted):
        chosen = [key for key in keys if wanted(key)]
        if not chosen:
            raise KeyNotFoundError("the predicate is true of no key", hint=nearest(keys, ""))
        return chosen
    known, found = set(keys), set()
    further: dict[str, None] = {}
    for pattern in several(wanted):
        part, _, name = pattern.partition("/")
        if pattern in known:
            found.add(pattern)
        elif name in aliases and f"{part}/{aliases[name]}" in known:
            further[pattern] = None
        else:
            matches = set(fnmatch.filter(keys, pattern))
            others = fnmatch.filter(_of_others(pattern, known - matches, aliases), pattern)
            if not matches and not others:
                raise KeyNotFoundError(f"no key matches {pattern!r}", key=pattern, hint=nearest(keys, pattern))
            found |= matches
            further |= dict.fromkeys(others)
    return [*(key for key in keys if key in found), *further]


def _of_others(pattern: str, others: set[str], aliases: Mapping[str, str]) -> Iterator[str]:
    """The keys under which tied tensors are also known: every alias of the tensors in ``others``, within the part that
    ``pattern`` names. If the name of the part is itself a pattern, the aliases in all parts."""
    part = part_of(pattern)
    parts = set(map(part_of, others)) if any(sign in part for sign in "*?[") else {part}
    for one in sorted(parts):
        yield from (f"{one}/{alias}" for alias, name in aliases.items() if f"{one}/{name}" in others)


def nearest(keys: Sequence[str], wanted: str) -> str:
    """A sentence that names the keys most like ``wanted``, and the parts if it asks for a part that is not there."""
    if any(key.startswith(f"{wanted}/") for key in keys):
        return f"all keys of this part: {f'{wanted}/*'!r}"
    parts = dict.fromkeys(map(part_of, keys))
    others = f"its parts are: {', '.join(parts)}; " if "/" in wanted and part_of(wanted) not in parts else ""
    near = difflib.get_close_matches(wanted, keys[:COMPARED_MAX], n=3, cutoff=0.3) or keys[:3]
    which = "nearest are" if wanted else "first ones are"
    return f"{others}the {which}: {', '.join(near)}" if near else "the checkpoint holds no tensors"


def by_part(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The names of the tensors with these keys, by part."""
    names: dict[str, list[str]] = {}
    for key in keys:
        part, _, name = key.partition("/")
        names.setdefault(part, []).append(name)
    return {part: tuple(found) for part, found in names.items()}


def part_of(key: str) -> str:
    return key.partition("/")[0]
