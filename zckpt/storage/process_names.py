"""Names of temporary files and directories that tell which process has made them.

By these names, leftovers of dead processes are told apart from files that live processes are using.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING

import xxhash

from zckpt.format import names
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCRATCH = "zckpt-scratch-"
"""How the names of scratch files begin."""
_NAME = re.compile(rf"(?s)(?:{SCRATCH}|.+\.)([0-9a-f]{{16}})-([0-9]{{1,10}})-([0-9]{{1,20}})-[0-9a-f]{{8}}(?:\.tmp)?")
"""Matches a name with the text of ``process_name``. The four groups of digits are a digest of the place in which the
process id is valid, such as the machine and its boot; the process id; the time at which the process started; and random
digits."""


def process_name() -> str | None:
    """Returns a text that identifies this process, for the name of a temporary file. Each call returns another text.
    Returns None if the system gives no information about processes."""
    place, started = _place(), linux.started(os.getpid())
    if place is None or started is None:
        return None
    return f"{place}-{os.getpid()}-{started}-{secrets.token_hex(4)}"


def own_temporary(path: str) -> str:
    """Returns a temporary path, in the same directory as ``path``, for a file or directory that this process is going
    to rename to ``path``. It tells which process has made it, if the system gives information about processes."""
    return names.temporary(path, process_name() or secrets.token_hex(4))


def left_over(entries: Iterable[str]) -> Iterator[str]:
    """Yields those of the names that belong to dead processes: scratch files, and temporary files and directories of
    exports, reports and converted checkpoints. Names from another machine or boot are not among them, because this
    process cannot know whether their processes are alive."""
    for name in entries:
        match = _NAME.fullmatch(name)
        if match and match[1] == _place() and not linux.is_running(int(match[2]), int(match[3])):
            yield name


def _place() -> str | None:
    space = linux.pid_space()
    return None if space is None else xxhash.xxh3_64_hexdigest(space.encode())
