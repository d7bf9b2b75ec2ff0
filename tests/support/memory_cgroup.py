"""A control group of Linux, of version 1 or 2, that limits the memory of the processes in it.

For the group, the kernel counts the memory that its processes have allocated, and the pages of files that they have
read or written. When the group exceeds its limit, the kernel takes pages from the page cache. If that is not enough, it
kills a process of the group, and never another process.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "zckpt-test-{pid}-{number}"
REMOVE_SECONDS = 60.0
_numbers = itertools.count()


class NoGroupError(Exception):
    """No control group for memory can be made here. The message has the reason."""


@dataclass(frozen=True, slots=True)
class _Version:
    """The names of the files of a group in one version of control groups."""

    top: Path
    """The directory of all groups."""
    limit: str
    with_swap: str
    """The file with the limit of memory and swap together (version 1) or of swap alone (version 2)."""
    used: str
    peak: str
    reclaim: str
    """The file whose writing makes the kernel give up cached pages of files, and other memory that nobody needs."""
    kills: str
    """The file with the number of processes that the kernel has killed."""


_V1 = _Version(
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.force_empty",
    "memory.oom_control",
)
_V2 = _Version(
    Path("/sys/fs/cgroup"),
    "memory.max",
    "memory.swap.max",
    "memory.current",
    "memory.peak",
    "memory.reclaim",
    "memory.events",
)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group. Any process of root may call ``open`` and ``close``; ``enter`` is for the limited process."""

    path: Path
    version: _Version

    def enter(self) -> None:
        """Puts this process into the group. From now on, its memory and that of its children is counted."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def open(self) -> None:
        """Removes the limit."""
        unlimited = "-1" if self.version == _V1 else "max"
        for name in (self.version.with_swap, self.version.limit):
            with suppress(FileNotFoundError):  # a kernel without swap
                self._write(name, unlimited)

    def close(self, headroom_bytes: int) -> None:
        """Limits the memory to what is used now, without cached files, and ``headroom_bytes`` more, without swap."""
        self.open()
        with suppress(OSError):  # raised if not all could be given up; before Linux 5.19, version 2 has no such file
            self._write(self.version.reclaim, str(1 << 40) if self.version == _V2 else "0")
        limit = self.used_bytes() + headroom_bytes
        self._write(self.version.limit, str(limit))
        with suppress(FileNotFoundError):
            self._write(self.version.with_swap, str(limit) if self.version == _V1 else "0")
        with suppress(OSError):  # Linux before 6.12 cannot reset the peak in version 2
            self._write(self.version.peak, "0")

    def used_bytes(self) -> int:
        return int((self.path / self.version.used).read_text())

    def peak_bytes(self) -> int:
        """Returns the most bytes that were used since the last ``close``, including cached files."""
        return int((self.path / self.version.peak).read_text())

    def kills(self) -> int:
        """Returns the number of processes that the kernel has killed because there was no more memory for them."""
        count = re.search(r"^oom_kill (\d+)$", (self.path / self.version.kills).read_text(), re.MULTILINE)
        assert count, "Linux counts them since version 4.13"
        return int(count[1])

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Yields a new group without a limit, and removes it at the end.

    The processes in the group must have ended by then. Groups of makers that were killed are removed, too. Raises
    NoGroupError.
    """
    version = _V1 if (_V1.top / _V1.limit).exists() else _V2
    _remove_leftovers(version.top)
    group = MemoryGroup(version.top / NAME.format(pid=os.getpid(), number=next(_numbers)), version)
    try:
        group.path.mkdir()
    except OSError as error:
        raise NoGroupError(f"no control group can be made here: {error}") from error
    try:
        if not (group.path / version.limit).exists():
            raise NoGroupError(f"the control groups in {version.top} do not limit memory")
        entered = subprocess.run(["sh", "-c", f"echo $$ > {group.path}/cgroup.procs"], capture_output=True, check=False)
        if entered.returncode:
            raise NoGroupError("this process may not put others into a control group")
        yield group
    finally:
        _remove(group.path)


def _remove(path: Path) -> None:
    """Removes a group, once its last process is gone, which may have been killed just now."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            return path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _remove_leftovers(top: Path) -> None:
    for path in top.glob(NAME.format(pid="*", number="*")):
        pid = path.name.split("-")[2]
        if not Path("/proc", pid).exists():
            with suppress(OSError):  # a process is still in it, or another process has just removed it
                path.rmdir()
