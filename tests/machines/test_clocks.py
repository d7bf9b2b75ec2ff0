"""Machines whose clocks differ by minutes write to one file system."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

import zckpt
from tests.support.slow_writes import slow_write, value
from tests.support.states import write_through
from tests.support.waiting import wait_until
from zckpt.storage import lock

if TYPE_CHECKING:
    from tests.support.machines import Machines

HEARTBEAT_SECONDS = 0.5


def write_slowly(path: str, begun: str, go_on: str) -> None:
    def wait() -> None:
        Path(begun).touch()
        wait_until(Path(go_on).exists)

    with mock.patch.object(lock, "HEARTBEAT_SECONDS", HEARTBEAT_SECONDS):
        slow_write(Path(path), wait, 1)


def write_too(path: str) -> None:
    """Tries to write, and prints how this ends."""
    try:
        write_through(Path(path), value(2), overwrite=True)
    except zckpt.ZckptError as error:
        print(type(error).__name__)
    else:
        print("written")


def call(function: str, *arguments: object) -> list[object]:
    """Returns the command that calls a function of this module."""
    code = f"import sys; from tests.machines.test_clocks import {function}; {function}(*sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def of_a_writer_and_another(machines: Machines, *, own_time: bool, seconds: tuple[int, int]) -> tuple[str, int]:
    """Lets one machine write, and a second one try to write to the same path meanwhile. Their clocks are so many
    seconds ahead. Returns how the second write ends, and the exit status of the first one."""
    for node, ahead in zip(machines.nodes, seconds, strict=False):
        node.shift_clock(ahead)
        if own_time:
            node.remount_common()
    first, second, _ = machines.nodes
    path, begun, go_on = first.common / "c", machines.directory / "begun", machines.directory / "go-on"
    writer = first.popen(call("write_slowly", path, begun, go_on))
    wait_until(lambda: begun.exists() or writer.poll() is not None)
    time.sleep(4 * HEARTBEAT_SECONDS)
    ending = second.run(call("write_too", path)).strip()
    go_on.touch()
    return ending, writer.wait(60)


@pytest.mark.usefixtures("clocks", "files")
@pytest.mark.parametrize("seconds", [(-600, 0), (600, -600)])
def test_a_writer_is_alive_whatever_its_clock_says(machines: Machines, seconds: tuple[int, int]) -> None:
    """As with NFS, the file server's clock sets the times of files."""
    assert of_a_writer_and_another(machines, own_time=False, seconds=seconds) == ("LockedError", 0)


@pytest.mark.usefixtures("clocks", "files")
@pytest.mark.parametrize("seconds", [(-600, 0), (600, -600)])
def test_a_writer_is_alive_where_clients_set_the_times_of_files(machines: Machines, seconds: tuple[int, int]) -> None:
    """A client of SFTP sets the time of a file that is touched by the clock of its own machine."""
    assert of_a_writer_and_another(machines, own_time=True, seconds=seconds) == ("LockedError", 0)
