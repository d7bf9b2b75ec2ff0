"""Messages which say that a checkpoint and an engine do not fit. They are short, whatever the size of the model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from zckpt.errors import first_few
from zckpt.plan.select import part_of
from zckpt.state.inventory import MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

SHOWN_MAX = 5
"""The largest number of similar lines or names that a message shows."""


class Mismatch(NamedTuple):
    """Why one tensor of the engine cannot be restored. ``kind`` is a key of ``KINDS``, and ``line`` is a line of
    text."""

    kind: str
    line: str


MISSING, SHAPE, DTYPE = "missing", "shape", "dtype"
KINDS = {
    MISSING: "tensors of the engine are missing in the checkpoint",
    SHAPE: "tensors differ in shape",
    DTYPE: "tensors differ in dtype",
}


def told(lines: Sequence[str], what: str, total: int = 0) -> list[str]:
    """Returns all lines if there are at most ``SHOWN_MAX``. Otherwise returns a line with their number (and ``total``,
    if it is given), and then the first ``SHOWN_MAX`` lines."""
    if len(lines) <= SHOWN_MAX:
        return list(lines)
    number = f"all {total}" if len(lines) == total else f"{len(lines)} of {total}" if total else str(len(lines))
    return [f"{number} {what}; the first {SHOWN_MAX}:", *(f"  {line}" for line in lines[:SHOWN_MAX])]


def told_differences(differences: Mapping[str, Mismatch], keys: Collection[str]) -> list[str]:
    """Returns the lines that describe ``differences``, which are given by key. ``keys`` has the keys of all tensors of
    the engine."""
    lines: list[str] = []
    for kind, what in KINDS.items():
        lines += told(
            [difference.line for difference in differences.values() if difference.kind == kind], what, len(keys)
        )
    weights = [key for key in keys if part_of(key) in (MASTER, PARAM)]
    if weights and differences.keys() >= set(weights):
        there = any(differences[key].kind != MISSING for key in weights)
        other = "a model of another size" if there else "another model, or its parameters have other names"
        lines.append(f"no parameter fits: this looks like {other}")
    return lines


def summary(what: str, keys: Sequence[str]) -> str:
    """Returns a line that says how many tensors there are, to which parts they belong, and the first few of their
    names."""
    if not keys:
        return f"0 {what}"
    parts = ", ".join(f"{count} of {part}" for part, count in Counter(map(part_of, keys)).items())
    names = list(dict.fromkeys(key.partition("/")[2] for key in keys))
    return f"{len(keys)} {what} ({parts}: {first_few(names, SHOWN_MAX, ', ...')})"
