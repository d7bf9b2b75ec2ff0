"""A control group of Linux that leaves the processes in it little memory, of version 1 or 2.

The kernel counts for it what they have allocated and the pages of files that they have read or written. What exceeds
its limit is taken from the page cache, and if that is not enough, it kills a process of the group, and no other one.
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
REMOVE_SECONDS = 10.0
_numbers = itertools.count()


class NoGroupError(Exception):
    """No control group for memory can be made here, and why."""


@dataclass(frozen=True, slots=True)
class _Version:
    """How the files of a group are called."""

    top: Path
    limit: str
    with_swap: str
    """The limit of memory and swap together, or of swap alone."""
    used: str
    peak: str
    reclaim: str
    """What is written there has the kernel give up cached pages of files, and other memory that nobody needs."""
    kills: str


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
    """``enter``, ``open`` and ``close`` are called by the process that is to be limited, or by any other of root's."""

    path: Path
    version: _Version

    def enter(self) -> None:
        """Puts this process in. What it takes from now on is counted, and what its children take."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def open(self) -> None:
        """Takes the limit away."""
        unlimited = "-1" if self.version == _V1 else "max"
        for name in (self.version.with_swap, self.version.limit):
            with suppress(FileNotFoundError):  # a kernel without swap
                self._write(name, unlimited)

    def close(self, headroom_bytes: int) -> None:
        """Leaves ``headroom_bytes`` more than what is used now, cached files not counted, and no swap."""
        self.open()
        with suppress(OSError):  # not all could be given up; before Linux 5.19, version 2 has no such file
            self._write(self.version.reclaim, str(1 << 40) if self.version == _V2 else "0")
        limit = self.used_bytes() + headroom_bytes
        self._write(self.version.limit, str(limit))
        with suppress(FileNotFoundError):
            self._write(self.version.with_swap, str(limit) if self.version == _V1 else "0")
        with suppress(OSError):  # Linux before 6.12 cannot start it anew in version 2
            self._write(self.version.peak, "0")

    def used_bytes(self) -> int:
        return int((self.path / self.version.used).read_text())

    def peak_bytes(self) -> int:
        """The most that was used since the last ``close``, cached files included."""
        return int((self.path / self.version.peak).read_text())

    def kills(self) -> int:
        """How many processes have been killed, since there was no more memory for them."""
        found = re.search(r"^oom_kill (\d+)$", (self.path / self.version.kills).read_text(), re.MULTILINE)
        assert found, "Linux 4.13 counts them"
        return int(found[1])

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new group without a limit. It is removed at the end, when the processes in it must have ended. So are groups
    whose makers were killed. Raises NoGroupError."""
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
    """Once the last process, which may have been killed just now, is gone."""
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
            with suppress(OSError):  # somebody is still in it, or another one has just removed it
                path.rmdir()
