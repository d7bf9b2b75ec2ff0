"""Prints the results of commands: tables, trees, sizes and ages for people, and JSON for scripts.

Only this module prints. Within ``guarded``, nothing else can print what is not printable either, such as warnings,
argparse and tracebacks.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

from zckpt.errors import ZckptError, count, printable
from zckpt.progress import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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
    """Returns an age as text, such as ``3 hours``, or an empty text if it is not known. The unit is the largest one
    that is not longer than the age, and the number is rounded down."""
    if seconds is None:
        return ""
    units = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    name, unit_seconds = next((unit for unit in units if seconds >= unit[1]), units[-1])
    return count(int(seconds // unit_seconds), name)


def print_json(value: Any) -> None:
    """Prints a value as one line of JSON."""
    print(json.dumps(value, allow_nan=False))


class _Guard(io.TextIOBase):
    """Passes text on to a stream, as far as it is printable and the stream can encode it. Everything else becomes
    escape sequences. ``original`` is the stream, or None if it is closed, as Python has it, and ``closed`` is what
    refuses all text then. ``is_needed``: whether it is an error if the stream does not take the text."""

    def __init__(self, original: TextIO | None, closed: TextIO, is_needed: bool) -> None:
        self.original, self._is_needed = original, is_needed
        self.stream = original or closed

    def write(self, text: str) -> int:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with self._refused():
            self.stream.write(printable(text, keep="\n").encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        if not self.stream.closed:
            with self._refused():
                self.stream.flush()

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "w") as devnull:
                # Python flushes the stream once more when it exits, which must not fail.
                os.dup2(devnull.fileno(), self.stream.fileno())
            if not self._is_needed:
                return
            if isinstance(error, BrokenPipeError):  # The program that read the output, such as `head`, has ended.
                raise
            reason = "it is closed" if self.original is None else error.strerror or str(error)
            raise ZckptError(f"cannot write the output: {reason}") from error

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def close(self) -> None:
        """Does nothing, because the stream belongs to somebody else."""


@contextmanager
def guarded() -> Iterator[None]:
    """Lets stdout and stderr take only printable text, whoever prints."""
    with (
        open(os.devnull) as closed,
        redirect_stdout(_Guard(sys.stdout, closed, is_needed=True)),
        redirect_stderr(_Guard(sys.stderr, closed, is_needed=False)),
    ):
        yield


@contextmanager
def unguarded() -> Iterator[None]:
    """Within ``guarded``, gives a script the streams as they are."""
    out, err = sys.stdout, sys.stderr
    assert isinstance(out, _Guard) and isinstance(err, _Guard)  # noqa: PT018
    with redirect_stdout(out.original), redirect_stderr(err.original):
        yield


@contextmanager
def launched() -> Iterator[int]:
    """Yields the rank of this process, which is 0 without a launcher. Under a launcher, the process group exists until
    the block ends. Only rank 0 may print."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def progress_bar() -> ProgressBar:
    """Returns a progress bar. It has no text of a checkpoint, and draws its line with characters that are not
    printable, so it is not guarded."""
    return ProgressBar(sys.stderr.stream if isinstance(sys.stderr, _Guard) else sys.stderr)


def print_text(text: object, file: TextIO | None = None) -> None:
    """Prints a text of one line or several, with characters that are not printable replaced as by ``printable``."""
    print(printable(str(text), keep="\n"), file=file)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Prints one line for each name and value. The values are aligned in a column."""
    rows = list(fields)
    width = max(len(printable(name)) for name, _ in rows)
    for name, value in rows:
        print(f"{printable(name):{width}}  {printable(str(value))}")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Prints a table. ``numbers``: the headings of the columns that are aligned to the right."""
    # A table of rich would take a second for three thousand rows.
    table = [headings, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if heading in numbers else cell.ljust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def print_tree(tree: Tree) -> None:
    """Prints a tree without wrapping long lines. A terminal wraps them by itself, and other programs need whole
    lines."""
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
