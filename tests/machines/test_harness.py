"""The machines that other tests run on: what is their own, how they are disturbed, and that nothing of them is left."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.machine_ranks import outcomes_on
from tests.support.machines import BOOT_ID, Machines, command, why_no_machines
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.machines import Machine


def reaches(node: Machine, other: Machine) -> bool:
    """Returns whether a connection from one machine to the other is refused, which the other has to do itself."""
    code = f"import socket; socket.create_connection(('{other.name}', 9), timeout=1)"
    process = node.popen(["python3", "-c", code], stderr=subprocess.PIPE, text=True)
    return "ConnectionRefusedError" in process.communicate()[1]


def test_each_machine_has_its_own_name_disk_memory_and_processes(machines: Machines) -> None:
    first, second, _ = machines.nodes
    assert [node.shell("hostname") for node in machines.nodes] == ["node-0\n", "node-1\n", "node-2\n"]
    boot_ids = [node.shell(f"cat {BOOT_ID}") for node in machines.nodes]
    assert len({*boot_ids, Path(BOOT_ID).read_text()}) == 4
    first.shell(f"echo first > {first.disk}/file; echo first > /dev/shm/file")
    assert first.path(first.disk / "file").read_text() == "first\n"
    assert not second.path(second.disk / "file").exists()
    assert not second.path("/dev/shm/file").exists()
    assert int(first.shell("ls -d /proc/[0-9]* | wc -l")) < 10


def test_machines_reach_each_other_while_their_links_are_up(machines: Machines) -> None:
    first, second, third = machines.nodes
    assert reaches(first, second)
    second.cut()
    assert not reaches(first, second)
    assert not reaches(second, third)
    assert reaches(first, third)
    second.mend()
    assert reaches(first, second)


def test_a_server_on_a_further_machine_is_reached_by_its_name(machines: Machines) -> None:
    server = machines.add("objects")
    server.shell(f"echo hello > {server.disk}/object")
    server.popen(["python3", "-m", "http.server", "9000", "--directory", server.disk], stderr=subprocess.DEVNULL)
    wait_until(lambda: ":9000" in server.shell("ss --listening --tcp --numeric"))
    read = "import urllib.request; print(urllib.request.urlopen('http://objects:9000/object').read())"
    assert [node.run(["python3", "-c", read]) for node in machines.nodes] == ["b'hello\\n'\n"] * 3


def test_a_slow_link_lets_only_so_many_bytes_through(machines: Machines, files: Machine) -> None:
    node = machines.nodes[0]
    node.slow(1_000_000)
    began = time.monotonic()
    node.shell(f"head -c 2000000 /dev/zero > {node.common}/file")
    assert time.monotonic() - began > 1.5


def test_a_late_link_delivers_everything_later(machines: Machines, files: Machine) -> None:
    node, other, _ = machines.nodes
    node.slow(100_000_000, delay_seconds=0.2)
    connect = (
        "import socket, sys, time; began = time.monotonic(); connection = socket.socket();"
        f"print(connection.connect_ex(('{other.name}', 9)), time.monotonic() - began)"
    )
    refused, seconds = node.run(["python3", "-c", connect]).split()
    assert int(refused) == errno.ECONNREFUSED
    assert 0.4 <= float(seconds) < 5
    node.shell(f"head -c 2000000 /dev/urandom > {node.disk}/file; cp {node.disk}/file {node.common}/file")
    assert (files.exported / "file").read_bytes() == node.path(node.disk / "file").read_bytes()
    node.kill()
    node.start()
    assert reaches(node, other)


def test_a_killed_machine_is_gone_and_can_start_again(machines: Machines) -> None:
    node = machines.nodes[1]
    boot_id = node.shell(f"cat {BOOT_ID}")
    node.shell(f"cd {node.disk}; echo synced > synced; sync synced; sync .; echo lost > lost")
    process = node.popen(["sleep", "600"])
    node.kill()
    assert process.wait(10) == -9
    assert not reaches(machines.nodes[0], node)
    node.start()
    assert reaches(machines.nodes[0], node)
    assert node.shell(f"cd {node.disk}; cat synced; ls lost 2>&1 || true").startswith("synced\nls: ")
    assert node.shell(f"cat {BOOT_ID}") != boot_id
    node.kill(keep_disk=False)
    node.start()
    assert not node.path(node.disk / "synced").exists()


def test_a_full_disk_has_no_space_left(machines: Machines) -> None:
    node = machines.nodes[0]
    node.fill_disk(free_bytes=100_000)
    assert 0 < node.free_bytes() <= 100_000
    file = node.path(node.disk / "file")
    with pytest.raises(OSError, match="No space left"):
        file.write_bytes(bytes(200_000))
    assert machines.nodes[1].free_bytes() > 100_000_000


def test_a_common_file_is_seen_by_every_machine_but_its_attributes_late(machines: Machines, files: Machine) -> None:
    first, second, _ = machines.nodes
    first.shell(f"echo 1 > {first.common}/file")
    assert second.shell(f"cat {second.common}/file; stat --format=%s {second.common}/file") == "1\n2\n"
    first.shell(f"echo 12345 >> {first.common}/file")
    assert second.shell(f"stat --format=%s {second.common}/file") == "2\n"
    assert (files.exported / "file").read_text() == "1\n12345\n"


@pytest.mark.usefixtures("clocks")
def test_a_clock_is_shifted_for_processes_and_common_files(machines: Machines, files: Machine) -> None:
    first, second, _ = machines.nodes
    first.shift_clock(600)
    assert float(first.shell("date +%s")) - float(second.shell("date +%s")) == pytest.approx(600, abs=5)
    assert float(second.shell("date +%s")) == pytest.approx(time.time(), abs=5)
    for name, ahead in (("by the server", 0), ("by the client", 600)):
        first.shell(f"touch '{first.common}/{name}'")
        assert (files.exported / name).stat().st_mtime - time.time() == pytest.approx(ahead, abs=5)
        first.remount_common()


def look_around() -> tuple[str, str, int, float]:
    total = torch.tensor([float(os.environ["RANK"])])
    torch.distributed.all_reduce(total)
    return socket.gethostname(), os.environ["LOCAL_RANK"], os.getpid(), total.item()


def test_ranks_run_on_the_machines(machines: Machines, cluster: Cluster) -> None:
    outcomes = outcomes_on(cluster, machines.nodes, look_around, ranks_per_node=2)
    names, local_ranks, pids, totals = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert names == ("node-0", "node-0", "node-1", "node-1", "node-2", "node-2")
    assert local_ranks == ("0", "1") * 3
    assert max(pids) < 100, "of a pid namespace of its own"
    assert totals == (15.0,) * 6


def test_nothing_is_left_even_after_an_error() -> None:
    if reason := why_no_machines():
        pytest.skip(reason)

    def left() -> tuple[str, str, int]:
        processes = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\0infinity" in path.read_bytes()]
        return command("losetup", "--all"), Path("/proc/self/mountinfo").read_text(), len(processes)

    before = left()
    machines = Machines(2)

    def fail_on_machines() -> None:
        with machines:
            machines.nodes[0].popen(["sleep", "600"])
            machines.nodes[1].kill()
            assert left()[2] == before[2] + 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_machines()
    assert left() == before
    assert not machines.directory.exists()
