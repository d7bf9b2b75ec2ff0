"""Finds out how much memory this process may still take, by the machine and by every control group that limits it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator


# The files of a control group, of version 1 and of version 2. A group has those of one version.
_LIMITS = ("memory.limit_in_bytes", "memory.max", "memory.high")
_USED = ("memory.usage_in_bytes", "memory.current")


def available_bytes(root: str = "/") -> int:
    """Returns how many bytes of memory this process could still take. This is the free memory of the machine, or less
    if a control group of this process, or a group above it, has a lower limit. Containers, Slurm and services of
    systemd set such limits.

    ``root`` is the directory that contains ``/proc`` and ``/sys``. Raises UnsupportedError if there is none, as on
    systems other than Linux.
    """
    meminfo = _table(Path(root, "proc/meminfo"))
    if "MemAvailable:" not in meminfo:
        raise UnsupportedError(
            "this system does not tell how much memory is available",
            hint="say how much a write in the background may take: snapshot_bytes=",
        )
    available = 1024 * meminfo["MemAvailable:"]
    for group in _groups(Path(root)):
        with suppress(OSError, ValueError):  # the topmost group has no such files
            (used,) = map(int, _texts(group, _USED))
            stat = _table(group / "memory.stat")
            # Inside a container, the groups above it cannot be seen. This is the smallest of their limits in version 1.
            limits = [stat.get("hierarchical_memory_limit", available + used)]
            limits += [int(text) for text in _texts(group, _LIMITS) if text != "max"]
            # The kernel frees these cached files before it refuses memory. That of version 1 includes groups below.
            inactive = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            available = min(available, max(min(limits) - used + inactive, 0))
    return available


def _groups(root: Path) -> Iterator[Path]:
    """Yields the directories of the control groups whose memory limits apply to this process, from the innermost on."""
    with suppress(OSError):  # the kernel has no control groups
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield from _ancestors(root, "cgroup2", "", path)
            elif "memory" in controllers.split(","):
                yield from _ancestors(root, "cgroup", "memory", path)


def _ancestors(root: Path, kind: str, controller: str, path: str) -> Iterator[Path]:
    """Yields the directories of the group ``path`` of a hierarchy and of all visible groups above it."""
    for mounted, top in _mounts(root, kind, controller):
        # In a container, the mounted hierarchy may begin at the container's own group. `path` begins at the top.
        path_below_top = os.path.relpath(path, mounted) if _is_below(path, mounted) else "."
        group = top / path_below_top
        while True:
            yield group
            if group == top or not _is_hierarchical(group.parent):
                return
            group = group.parent


def _mounts(root: Path, kind: str, controller: str) -> Iterator[tuple[str, Path]]:
    """Yields the first mount of a hierarchy: the group at its top, and the directory where it is mounted."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted_kind, _, options = after.split(" ", 2)
        if mounted_kind == kind and (not controller or controller in options.split(",")):
            top, place = (_unescaped(field) for field in before.split(" ")[3:5])
            yield top, root / place.lstrip("/")
            return


def _is_below(path: str, top: str) -> bool:
    return ".." not in path.split("/") and os.path.commonpath([path, top]) == top


def _is_hierarchical(group: Path) -> bool:
    """Returns whether the group's limit also applies to the groups below it. In version 1, a switch decides this. In
    version 2, it always applies."""
    with suppress(OSError):
        return (group / "memory.use_hierarchy").read_text().strip() != "0"
    return True


def _texts(group: Path, files: tuple[str, ...]) -> Iterator[str]:
    for file in files:
        with suppress(FileNotFoundError):
            yield (group / file).read_text().strip()


def _table(path: Path) -> dict[str, int]:
    """Returns the number behind the first word of each line, by this word."""
    with suppress(FileNotFoundError):
        return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines() if line.strip()}
    return {}


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
