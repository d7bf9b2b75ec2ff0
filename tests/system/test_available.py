"""The available memory is that of the machine, or less if a control group of any version sets a limit."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.support.memory_cgroup import NoGroupError, memory_group
from zckpt.system.available import available_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
MOUNTS = {
    1: "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n",
    2: "31 23 0:28 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n",
}
LINES = {1: "9:cpu,cpuacct:/elsewhere\n4:memory:{path}\n1:name=systemd:/elsewhere\n", 2: "0::{path}\n"}
PLACES = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}


def make(root: Path, version: int, path: str, groups: dict[str, dict[str, object]], top: str = "/") -> str:
    """Makes the files of a machine with 1000 MiB of available memory, and returns their root.

    ``groups`` has the files of each control group, by its path below the mount point of the hierarchy. ``path`` is the
    group of the process, and ``top`` the group that is mounted.
    """
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {1000 << 10} kB\nHugepagesize: 2048 kB\n")
    (root / "proc/self/cgroup").write_text(LINES[version].format(path=path))
    (root / "proc/self/mountinfo").write_text(
        "23 1 8:1 / / rw - ext4 /dev/vda rw\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        + MOUNTS[version].format(top=top)
    )
    for group, files in groups.items():
        directory = root / PLACES[version] / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_text(f"{content}\n")
    return str(root)


def v2(limit: object, used: int, **more: object) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used, **{name.replace("_", "."): v for name, v in more.items()}}


def v1(limit: int, used: int, **more: object) -> dict[str, object]:
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.use_hierarchy": 1}
    return {**files, **{f"memory.{name}": value for name, value in more.items()}}


NO_LIMIT = 9223372036854771712


def test_without_a_limit_of_a_group_the_memory_of_the_machine_is_available(tmp_path: Path) -> None:
    assert available_bytes(make(tmp_path, 2, "/user.slice", {"user.slice": v2("max", 7 * MIB)})) == 1000 * MIB
    for file in ("cgroup", "mountinfo"):
        (tmp_path / "proc/self" / file).unlink()
        assert available_bytes(str(tmp_path)) == 1000 * MIB
    assert 0 < available_bytes() < 1 << 50


def test_the_group_with_the_least_memory_left_counts(tmp_path: Path) -> None:
    """Slurm puts a limit on the job, and systemd on a slice. The group of the process itself has no limit."""
    groups: dict[str, dict[str, object]] = {
        "": {"cgroup.procs": ""},
        "system.slice": v2(900 * MIB, 100 * MIB),
        "system.slice/slurm": v2(500 * MIB, 50 * MIB),
        "system.slice/slurm/job 7": v2(600 * MIB, 50 * MIB),
        "system.slice/slurm/job 7/step": v2("max", 10 * MIB),
    }
    path = "/system.slice/slurm/job 7/step"
    assert available_bytes(make(tmp_path / "a", 2, path, groups)) == 450 * MIB
    groups["system.slice"] = v2("max", 600 * MIB, memory_high=1000 * MIB)
    assert available_bytes(make(tmp_path / "b", 2, path, groups)) == 400 * MIB
    groups["system.slice/slurm/job 7"] = v2(100 * MIB, 300 * MIB)
    assert available_bytes(make(tmp_path / "c", 2, path, groups)) == 0
    groups["system.slice/slurm/job 7"] = v2(100 * MIB, 90 * MIB, memory_stat=f"anon 1\ninactive_file {30 * MIB}")
    assert available_bytes(make(tmp_path / "d", 2, path, groups)) == 40 * MIB, "the cached files go first"


def test_the_limit_counts_in_a_container_where_the_group_has_another_name(tmp_path: Path) -> None:
    limited = {"": v2(300 * MIB, 100 * MIB)}
    assert available_bytes(make(tmp_path / "namespace", 2, "/", limited)) == 200 * MIB
    assert available_bytes(make(tmp_path / "mounted", 2, "/docker/0a", limited, top="/docker/0a")) == 200 * MIB
    assert available_bytes(make(tmp_path / "elsewhere", 2, "/../other", limited)) == 200 * MIB
    inner = {"": v2("max", 0), "init": v2(50 * MIB, 0)}
    assert available_bytes(make(tmp_path / "inner", 2, "/docker/0a/init", inner, top="/docker/0a")) == 50 * MIB


def test_limits_of_groups_of_version_1_count(tmp_path: Path) -> None:
    groups = {"": v1(NO_LIMIT, 5), "slurm": v1(400 * MIB, 100 * MIB), "slurm/job": v1(NO_LIMIT, 100 * MIB)}
    assert available_bytes(make(tmp_path / "a", 1, "/slurm/job", groups)) == 300 * MIB
    groups["slurm"]["memory.use_hierarchy"] = 0  # then the limit counts only for the group's own processes
    assert available_bytes(make(tmp_path / "b", 1, "/slurm/job", groups)) == 1000 * MIB
    stat = f"cache 9\nhierarchical_memory_limit {350 * MIB}\ntotal_inactive_file {10 * MIB}"
    container = {"": v1(NO_LIMIT, 100 * MIB, stat=stat)}
    assert available_bytes(make(tmp_path / "c", 1, "/docker/0a", container, top="/docker/0a")) == 260 * MIB


def test_groups_with_missing_or_strange_files_are_ignored(tmp_path: Path) -> None:
    groups: dict[str, dict[str, object]] = {"a": v2(500 * MIB, 0)}
    groups |= {"a/b": {"memory.max": "what", "memory.current": 0}, "a/b/c": {"memory.max": 7}}
    assert available_bytes(make(tmp_path, 2, "/a/b/c", groups)) == 500 * MIB


def test_the_limit_of_a_real_group_counts_in_a_group_below_it() -> None:
    # The imports come first, so that the pages of the imported files do not count as used by the group.
    program = "import pathlib, os, sys; from zckpt.system.available import available_bytes\n"
    program += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); print(available_bytes())"
    try:
        with memory_group() as group:
            with suppress(OSError):  # only version 1 has this file, and newer kernels do not let it change
                (group.path / "memory.use_hierarchy").write_text("1")
            group.close(512 * MIB)
            below = group.path / "below"
            below.mkdir()
            try:
                command = [sys.executable, "-c", program, str(below / "cgroup.procs")]
                out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            finally:
                below.rmdir()
    except NoGroupError as error:
        pytest.skip(str(error))
    assert 256 * MIB < int(out) <= 512 * MIB
