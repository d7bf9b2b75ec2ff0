"""Selects the keys that a caller asks for. A key is ``<part>/<name>``."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from zckpt.errors import KeyNotFoundError

Keys = str | Iterable[str] | Callable[[str], bool] | None
"""A key, a glob such as ``"master/*"``, several of these, a function that returns whether it wants a key, or None for
all keys."""

_Names = TypeVar("_Names")

COMPARED_MAX = 10_000
"""The number of keys that are compared to find the nearest ones. This takes about a second."""


def several(names: _Names) -> _Names | tuple[str]:
    """Returns the names that a caller has given as a collection. A single string is one name, and not a collection of
    letters. Raises TypeError for a value that is neither None nor a collection of names."""
    if isinstance(names, str):
        return (names,)
    if names is not None and not isinstance(names, Iterable):
        raise TypeError(f"names must be a str or a collection of them, got {names!r}")
    if isinstance(names, Collection) and (others := [name for name in names if not isinstance(name, str)]):
        raise TypeError(f"a name must be a str, got {others[0]!r}")
    return names


def select(keys: Sequence[str], wanted: Keys, aliases: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Returns the keys that ``wanted`` asks for, each once. First come those of ``keys``, in their order, then those
    that contain an alias.

    ``aliases`` maps each further name of a tensor to the name that it has in ``keys``. A key with a further name is
    selected if it is asked for literally, or by a glob that does not match the key in ``keys`` too. So ``master/*``
    selects no tensor twice. A predicate gets only ``keys``.

    Raises KeyNotFoundError if a key, a glob or the predicate matches nothing. The error names some keys.
    """
    if wanted is None:
        return list(keys)
    if callable(wanted):
        chosen = [key for key in keys if wanted(key)]
        if not chosen:
            raise KeyNotFoundError("the predicate is true of no key", hint=nearest(keys, ""))
        return chosen
    known, selected = set(keys), set()
    further: dict[str, None] = {}
    for pattern in several(wanted):
        part, _, name = pattern.partition("/")
        if pattern in known:
            selected.add(pattern)
        elif name in aliases and f"{part}/{aliases[name]}" in known:
            further[pattern] = None
        else:
            matches = set(fnmatch.filter(keys, pattern))
            others = fnmatch.filter(_of_others(pattern, known - matches, aliases), pattern)
            if not matches and not others:
                raise KeyNotFoundError(f"no key matches {pattern!r}", key=pattern, hint=nearest(keys, pattern))
            selected |= matches
            further |= dict.fromkeys(others)
    return [*(key for key in keys if key in selected), *further]


def _of_others(pattern: str, others: set[str], aliases: Mapping[str, str]) -> Iterator[str]:
    """Yields the keys that contain an alias of the tensors with the keys ``others``, in the part of ``pattern``, or in
    all parts if the part of ``pattern`` is itself a glob."""
    part = part_of(pattern)
    parts = set(map(part_of, others)) if any(sign in part for sign in "*?[") else {part}
    for name_of_part in sorted(parts):
        tied = (alias for alias, name in aliases.items() if f"{name_of_part}/{name}" in others)
        yield from (f"{name_of_part}/{alias}" for alias in tied)


def nearest(keys: Sequence[str], wanted: str) -> str:
    """Returns a hint that names the keys that are most like ``wanted``. It names all parts as well if ``wanted`` is in
    a part that does not exist. If ``wanted`` is a part, the hint is the glob of all keys of this part."""
    if any(key.startswith(f"{wanted}/") for key in keys):
        return f"all keys of this part: {f'{wanted}/*'!r}"
    parts = dict.fromkeys(map(part_of, keys))
    others = f"its parts are: {', '.join(parts)}; " if "/" in wanted and part_of(wanted) not in parts else ""
    near = difflib.get_close_matches(wanted, keys[:COMPARED_MAX], n=3, cutoff=0.3) or keys[:3]
    which = "nearest are" if wanted else "first ones are"
    return f"{others}the {which}: {', '.join(near)}" if near else "the checkpoint holds no tensors"


def by_part(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the names of the tensors with these keys, by part."""
    names: dict[str, list[str]] = {}
    for key in keys:
        part, _, name = key.partition("/")
        names.setdefault(part, []).append(name)
    return {part: tuple(of_part) for part, of_part in names.items()}


def part_of(key: str) -> str:
    """Returns the part of a key."""
    return key.partition("/")[0]
