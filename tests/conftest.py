from __future__ import annotations

import signal
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import accelerator
from tests.support.cluster import Cluster
from tests.support.interrupts import threads_left

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

settings.register_profile("tests", deadline=None)  # machines are shared: a slow example is no failure
settings.load_profile("tests")

# A shell has what it starts in the background ignore Ctrl-C; the tests of interrupts would then interrupt nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Real ranks, with torch.distributed and DeepSpeed on the CPU: ``cluster.run(function, world_size, ...)``."""
    accelerator.compiled()  # here, not in a rank, whose time is limited
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def engines_are_adapters() -> Iterator[None]:
    """Each write of the test may be of a ``plain_engine.Engine``."""
    from tests.support import plain_engine

    with plain_engine.engines_are_adapters():
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """One directory further down than pytest's: beside a checkpoint that a test writes there lies its ``latest``, which
    makes a run of the directory above, and that is this test's alone.
    """
    directory = tmp_path / "t"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """After a test, failed and interrupted calls in it included, no thread of zckpt's goes on in this process."""
    yield
    assert threads_left() == []


@pytest.fixture(autouse=True)
def _sim(request: pytest.FixtureRequest) -> None:
    """Runs a test with this marker in a process of its own, which has the simulated accelerator. What its fixtures give
    it is pickled.
    """
    if request.node.get_closest_marker("sim"):
        cluster: Cluster = request.getfixturevalue("cluster")
        test = request.node.obj

        def in_a_rank(**kwargs: object) -> None:
            cluster.run(accelerator.run, 1, test, init=False, **kwargs)

        request.node.obj = in_a_rank


@pytest.fixture(autouse=True)
def _nvme(request: pytest.FixtureRequest) -> None:
    """Skips the tests of engines that offload to NVMe where they cannot: by their marker, or by their parameters."""
    node = request.node
    wanted = node.get_closest_marker("nvme") or any(word in node.name for word in ("nvme", "disk"))
    if wanted and "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        if not cluster.run("tests.support.ops:async_io", 1, init=False)[0]:
            pytest.skip("no NVMe offload on the CPU: needs libaio (install libaio-dev) and DeepSpeed 0.19")


def pytest_runtest_setup(item: pytest.Item) -> None:
    wants_linux = any(map(item.get_closest_marker, ("linux", "sim"))) or "cluster" in getattr(item, "fixturenames", ())
    if wants_linux and sys.platform != "linux":
        pytest.skip("needs Linux")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One table of what was skipped and why; the marker ``matrix`` leaves tests out, which pytest calls deselected."""
    where = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        where[reason.removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0])
    if where:
        total = sum(map(len, where.values()))
        terminalreporter.write_sep("=", f"{total} {'test was' if total == 1 else 'tests were'} skipped")
        for reason, files in sorted(where.items(), key=lambda entry: -len(entry[1])):
            terminalreporter.write_line(f"{len(files):5}  {', '.join(sorted(set(files)))}: {reason}")
