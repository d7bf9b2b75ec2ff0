"""Prints what commands have found: tables, trees by means of rich, sizes and ages for people, JSON for scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TextIO

from zckpt.errors import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.tree import Tree

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: float | None) -> str:
    """Returns a size as text, such as ``47.8 MiB``, or an empty text if it is not known."""
    if nbytes is None:
        return ""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:,.1f} {_UNITS[unit]}" if unit else f"{nbytes:,} {_UNITS[0]}"


def age(seconds: float | None) -> str:
    """Returns an age as text, in the largest unit that it has a whole one of, such as ``3 hours``, or an empty text if
    it is not known."""
    if seconds is None:
        return ""
    units = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, length = next((one for one in units if seconds >= one[1]), units[-1])
    return count(int(seconds // length), unit)


def print_json(value: Any) -> None:
    """Prints a value as one line of JSON."""
    print(json.dumps(value, allow_nan=False))


def printable(text: str) -> str:
    """Returns a text with all that a terminal would not show as it is, such as line breaks, escape sequences and bytes
    that are no text, in the notation of Python. Checkpoints come from others, who choose the names that are in them."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def print_text(text: object, file: TextIO | None = None) -> None:
    """Prints a text of several lines."""
    for line in str(text).splitlines():
        print(printable(line), file=file)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Prints a line for each name and value, with the values below each other."""
    found = list(fields)
    width = max(len(printable(name)) for name, _ in found)
    for name, value in found:
        print(f"{printable(name):{width}}  {printable(str(value))}")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Prints a table. ``numbers``: the headings of the columns that are aligned to the right. It does not use a table
    of rich's, because that takes a second for three thousand rows."""
    table = [headings, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if heading in numbers else cell.ljust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def print_tree(tree: Tree) -> None:
    """Prints lines without wrapping them: a terminal wraps long lines by itself, and other programs want whole ones."""
    from rich.console import Console
    from rich.text import Text

    nodes = [tree]
    for node in nodes:
        node.label = Text(printable(str(node.label)))
        nodes += node.children
    console = Console(width=100_000, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(tree)
    for line in captured.get().splitlines():
        print(line.rstrip())
