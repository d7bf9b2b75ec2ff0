"""Runs a test's function on real ranks, without paying for their imports each time.

Importing torch, DeepSpeed and transformers takes seconds. So one server process imports them once per session, and
forks the ranks of every run from itself. It has one thread and has run nothing, so they are as good as fresh processes.
This file is both sides: ``Cluster`` is what a test sees, ``serve`` the server's main loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 600  # the server compiles the ops where no `make` has done so
LATE_IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "zckpt.engines.deepspeed.adapter",
)
"""What an engine imports when it is made, Muon's with torch's whole compiler: two processor seconds per rank."""
OUTPUT_LINES = 20
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """How one rank ended: with a value, with an error (a traceback, or why it was ended), or by a signal of its own."""

    rank: int
    value: Any = None
    error: str | None = None
    signal: int | None = None
    output: str = ""

    @property
    def failed(self) -> bool:
        return self.error is not None


class ClusterError(Exception):
    """A rank failed. ``outcomes`` has all of them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome for outcome in outcomes if outcome.failed]
        cause = str(failed[0].error).splitlines()[-1]
        lines = [f"{len(failed)} of {len(outcomes)} ranks failed; rank {failed[0].rank}: {cause}"]
        for outcome in failed:
            tail = outcome.output.splitlines()[-OUTPUT_LINES:]
            lines += [
                f"--- rank {outcome.rank}: {outcome.error}",
                f"--- rank {outcome.rank}, end of its output:",
                *tail,
            ]
        super().__init__("\n".join(lines))


class Cluster:
    """The client side. The server starts with the first run and ends with this process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, function: str | Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Calls ``function``, itself or as "module:name", on every rank; returns their values in rank order.

        ``timeout`` (120 s) and ``grace`` (5 s, what the others get once a rank has failed) end runs that hang.
        ``init=False`` leaves out ``deepspeed.init_distributed``. All other keywords go to the function. Raises
        ClusterError when any rank fails.
        """
        outcomes = self.outcomes(function, world_size, *args, **options)
        if any(outcome.failed for outcome in outcomes):
            raise ClusterError(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: str | Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120,
        grace: float = 5,
        init: bool = True,
        **kwargs: Any,
    ) -> list[Outcome]:
        """As ``run``, for runs that are meant to fail: returns how each rank ended."""
        if self._server is None:
            self._start()
        job = pickle.dumps((function, args, kwargs))
        with tempfile.TemporaryDirectory(prefix="zckpt-cluster-") as directory:
            self._connection.send((Path(directory), world_size, job, init, timeout, grace))
            outcomes = [pickle.loads(outcome) for outcome in self._receive(timeout + grace + 60)]
            for outcome in outcomes:
                outcome.output = (Path(directory) / f"{outcome.rank}.out").read_text(errors="replace")
        return outcomes

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()  # its ranks die with it
            self._server.wait()
            self._server = None
            self._connection.close()
            self._directory.cleanup()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="zckpt-cluster-")
        self._log = Path(self._directory.name) / "server.log"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with self._log.open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.cluster", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is pytest's
            )
        theirs.close()
        self._receive(START_SECONDS)

    def _receive(self, timeout: float) -> Any:
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
        except EOFError:
            pass
        log = self._log.read_text()
        self.close()
        raise RuntimeError(f"the server of the ranks has died or hangs; its output:\n{log}")


# Below: the server's process.


def serve(connection: Connection) -> None:
    """Imports what is slow, then forks the ranks of one run after the other, until the client is gone."""
    die_with_parent()
    import cpuinfo
    import deepspeed  # noqa: F401
    import pytest  # noqa: F401
    import torch
    from transformers import GPT2LMHeadModel  # noqa: F401

    from tests.support import ops, runs  # noqa: F401

    for name in LATE_IMPORTS:
        with contextlib.suppress(ImportError):  # not in every version of DeepSpeed
            importlib.import_module(name)
    # DeepSpeed's C++ Adam asks for the processor's vendor whenever it is made, which starts another Python.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    ops.load()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no collection in a rank touches, and so copies, the pages that it shares with the server
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"an import has started {threads - 1} threads: forking is no longer safe")
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(run_ranks(connection, *request))


def run_ranks(
    connection: Connection, directory: Path, world_size: int, job: bytes, init: bool, timeout: float, grace: float
) -> list[bytes]:
    """One run. Returns each rank's Outcome, pickled: only the client imports what its value is made of."""
    port = free_port()
    pids: list[int] = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            connection.close()
            run_rank(directory, rank, world_size, port, job, init)
        pids.append(pid)
    try:
        return watch(directory, pids, timeout, grace)
    finally:
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            leftover.unlink()


def watch(directory: Path, pids: list[int], timeout: float, grace: float) -> list[bytes]:
    """Waits until every rank has an outcome, ends those that take too long, and reaps them all.

    A rank that has returned stays until all have: its peers may still talk to it.
    """
    outcomes: dict[int, bytes] = {}
    statuses: dict[int, int] = {}
    deadline, reason = time.monotonic() + timeout, f"still running after {timeout:g} s"
    overdue = False
    while missing := set(range(len(pids))) - set(outcomes):
        for rank in missing:
            if rank not in statuses:
                pid, status = os.waitpid(pids[rank], os.WNOHANG)
                if pid:
                    statuses[rank] = status
            returned, raised = directory / f"{rank}.returned", directory / f"{rank}.raised"
            if returned.exists():
                outcomes[rank] = returned.read_bytes()
                continue
            if raised.exists():
                outcomes[rank] = raised.read_bytes()
            elif rank in statuses:
                outcomes[rank] = pickle.dumps(died(rank, statuses[rank]))
            elif overdue:
                outcomes[rank] = pickle.dumps(Outcome(rank, error=reason))
            else:
                continue
            if time.monotonic() + grace < deadline:
                deadline, reason = time.monotonic() + grace, f"still running {grace:g} s after rank {rank} had failed"
        if not overdue and time.monotonic() > deadline:
            for rank in set(range(len(pids))) - set(outcomes):
                os.kill(pids[rank], signal.SIGUSR1)  # its stacks, into its output
            time.sleep(0.5)
            overdue = True
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it may have started
        if rank not in statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [outcomes[rank] for rank in range(len(pids))]


def died(rank: int, status: int) -> Outcome:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Outcome(rank, error=f"died of {signal.Signals(-code).name}", signal=-code)
    return Outcome(rank, error=f"left by exit status {code}")


def run_rank(directory: Path, rank: int, world_size: int, port: int, job: bytes, init: bool) -> None:
    """A rank's whole life. Never returns: neither the server's loop nor what it runs at its exit is for a rank."""
    try:
        os.setsid()
        die_with_parent()
        output = os.open(directory / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        warnings.filterwarnings("error", module=r"zckpt\b")
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        outcome = Outcome(rank)
        try:
            if init:
                import deepspeed

                deepspeed.init_distributed("gloo")
            function, args, kwargs = pickle.loads(job)
            if isinstance(function, str):
                module, name = function.split(":")
                function = getattr(importlib.import_module(module), name)
            outcome.value = function(*args, **kwargs)
            written = pickle.dumps(outcome)
        except BaseException:
            outcome = Outcome(rank, error=traceback.format_exc())
            written = pickle.dumps(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
        partial = directory / f"{rank}.partial"
        partial.write_bytes(written)
        partial.rename(directory / f"{rank}.{'raised' if outcome.failed else 'returned'}")
        while not outcome.failed:
            signal.pause()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    # Outcomes are pickled as this module's own, not as __main__'s.
    from tests.support.cluster import serve as serve_as_module

    serve_as_module(Connection(int(sys.argv[1])))
