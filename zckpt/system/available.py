"""How much memory this process may still take: of the machine, and of every control group that limits it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class _Version:
    """The names of the files and fields in which a control group tells about its memory."""

    limits: tuple[str, ...]
    used: str
    inactive: str
    """The field of ``memory.stat`` with the bytes of cached files that the kernel gives up before it refuses memory."""


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def available_bytes(root: str = "/") -> int:
    """The bytes of memory that this process could still take: what the machine has free, or less if a control group of
    this process, or one above it, has a lower limit, as in containers, under Slurm and in systemd's services.

    ``root``: the directory that has ``/proc`` and ``/sys``. Raises UnsupportedError where there is none, as on another
    system than Linux.
    """
    meminfo = _table(Path(root, "proc/meminfo"))
    if "MemAvailable:" not in meminfo:
        raise UnsupportedError(
            "this system does not tell how much memory is available",
            hint="say how much a write in the background may take: snapshot_bytes=",
        )
    available = 1024 * meminfo["MemAvailable:"]
    for group, version in _groups(Path(root)):
        with suppress(OSError, ValueError):  # the root of all groups has no such files
            used = int((group / version.used).read_text())
            stat = _table(group / "memory.stat")
            # Inside a container, the groups above it cannot be seen. Version 1 tells the smallest of their limits here.
            limits = [stat.get("hierarchical_memory_limit", available + used)]
            limits += [int(text) for text in _texts(group, version.limits) if text != "max"]
            available = min(available, max(min(limits) - used + stat.get(version.inactive, 0), 0))
    return available


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """The directories of the control groups whose memory limits hold for this process, the innermost group first."""
    with suppress(OSError):  # a kernel without control groups
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield from _ancestors(root, "cgroup2", "", path, _V2)
            elif "memory" in controllers.split(","):
                yield from _ancestors(root, "cgroup", "memory", path, _V1)


def _ancestors(root: Path, kind: str, controller: str, path: str, version: _Version) -> Iterator[tuple[Path, _Version]]:
    """The directories of the group ``path`` of a hierarchy and of the groups above it, as far as they can be seen."""
    for mounted, top in _mounts(root, kind, controller):
        # In a container, the mounted hierarchy may begin at the container's own group, while `path` begins at the top.
        below = os.path.relpath(path, mounted) if _is_below(path, mounted) else "."
        group = top / below
        while True:
            yield group, version
            if group == top or not _is_hierarchical(group.parent):
                return
            group = group.parent


def _mounts(root: Path, kind: str, controller: str) -> Iterator[tuple[str, Path]]:
    """The first mount of a hierarchy: the group at its top, and the directory where it is mounted."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        found, _, options = after.split(" ", 2)
        if found == kind and (not controller or controller in options.split(",")):
            top, place = (_unescaped(field) for field in before.split(" ")[3:5])
            yield top, root / place.lstrip("/")
            return


def _is_below(path: str, top: str) -> bool:
    return ".." not in path.split("/") and os.path.commonpath([path, top]) == top


def _is_hierarchical(group: Path) -> bool:
    """Whether the group's limit also holds for the groups below it. In version 1 a switch decides; in version 2 it
    always does."""
    with suppress(OSError):
        return (group / "memory.use_hierarchy").read_text().strip() != "0"
    return True


def _texts(group: Path, files: tuple[str, ...]) -> Iterator[str]:
    for file in files:
        with suppress(FileNotFoundError):
            yield (group / file).read_text().strip()


def _table(path: Path) -> dict[str, int]:
    """Maps the first word of each line to the number behind it."""
    with suppress(FileNotFoundError):
        return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines() if line.strip()}
    return {}


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
