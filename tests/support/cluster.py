"""Runs a test's function on real ranks, without paying for their imports each time.

Importing torch, DeepSpeed and transformers takes seconds. So one server process imports them once per session, and
forks the ranks of every run from itself. The server has one thread and has run nothing else, so the forked ranks are as
good as fresh processes. This file has both sides: ``Cluster`` is the side of a test, and ``serve`` is the main loop of
the server.
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
import pkgutil
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
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 7200  # if `make` has not compiled DeepSpeed's ops, the server does, which takes long on a busy machine
LATE_IMPORTS = (
    "transformers.trainer",
    "accelerate.utils.deepspeed",
    "torchdata.stateful_dataloader",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
)
"""Modules that an engine imports when it is made. That of Muon imports torch's whole compiler. Without the server, they
would take two processor seconds for each rank."""
OUTPUT_LINES = 20
STACKS_SECONDS = 10
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    """The value that the function has returned."""
    error: str | None = None
    """A traceback, or the reason for which the rank was ended; None if the function has returned."""
    signal: int | None = None
    """The number of the signal that the rank died of."""
    output: str = ""
    """What the rank has printed on stdout and stderr."""

    @property
    def failed(self) -> bool:
        return self.error is not None


class ClusterError(Exception):
    """At least one rank failed. ``outcomes`` has the outcomes of all ranks."""

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
    """The client side. The server starts with the first run and ends with the client's process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, function: str | Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Calls a function on every rank and returns the values of all ranks, in their order.

        ``function`` is the function itself or its name, as "module:name". A run that hangs is ended after ``timeout``
        seconds (600 by default), or ``grace`` seconds (60 by default) after a rank has failed. Only a run that hangs
        takes as long, and a run on a busy machine may take many times as long as usual. ``init=False`` leaves out
        ``deepspeed.init_distributed``. All other keywords go to the function. Raises ClusterError if a rank fails.
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
        timeout: float = 600,
        grace: float = 60,
        init: bool = True,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Does what ``run`` does, for runs that are meant to fail, and returns the outcome of each rank."""
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
            self._server.kill()  # the kernel kills its ranks, too
            self._server.wait()
            self._server = None
            self._connection.close()
            self._directory.cleanup()

    def _start(self) -> None:
        self._connection, server_end = Pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="zckpt-cluster-")
        self._log = Path(self._directory.name) / "server.log"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        # No import may start a thread: neither that of pyarrow, which comes with datasets, nor that of the compiler of
        # older versions of torch.
        environment |= {"JE_ARROW_MALLOC_CONF": "background_thread:false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with self._log.open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.cluster", str(server_end.fileno())],
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that only pytest gets Ctrl-C
            )
        server_end.close()
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


# All below runs in the server's process.


def serve(connection: Connection) -> None:
    """Imports all slow modules, and then forks the ranks of one run after the other, until the client is gone."""
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # each rank inherits this until it can write its stacks
    import cpuinfo
    import deepspeed  # noqa: F401
    import pytest  # noqa: F401
    import torch
    from transformers import GPT2LMHeadModel  # noqa: F401

    import zckpt
    from tests.support import ops, runs  # noqa: F401

    # Most modules of zckpt are imported by the first call that needs them, which took a quarter of the time of a rank.
    of_zckpt = [module.name for module in pkgutil.walk_packages(zckpt.__path__, "zckpt.")]
    for name in (*LATE_IMPORTS, *of_zckpt):
        # Not every module is in every version of DeepSpeed, and zckpt.torchtitan needs torchtitan.
        with contextlib.suppress(ImportError):
            if not name.endswith(".__main__"):  # which runs a command
                importlib.import_module(name)
    # DeepSpeed's C++ Adam asks for the processor's vendor whenever it is made. Without the cache, that starts another
    # Python each time.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    ops.load()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that no collection in a rank touches, and thereby copies, the pages that it shares with the server
    others = {*os.listdir("/proc/self/task")} - {str(os.getpid())}
    if others:
        names = [Path(f"/proc/self/task/{other}/comm").read_text().strip() for other in others]
        raise RuntimeError(f"imports have started the threads {', '.join(names)}: forking is no longer safe")
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
    """Runs a job on its ranks and returns the outcome of each rank, pickled.

    Only the client unpickles an outcome, because only the client imports the classes of its value.
    """
    with held_port() as port:
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
    """Waits until every rank has an outcome, ends the ranks that take too long, and reaps all of them.

    A rank whose function has returned lives on until all have returned, because its peers may still talk to it.
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
            write_stacks(directory, {rank: pids[rank] for rank in set(range(len(pids))) - set(outcomes)})
            overdue = True
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # kills the processes that the rank has started, too
        if rank not in statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [outcomes[rank] for rank in range(len(pids))]


def write_stacks(directory: Path, pids: dict[int, int]) -> None:
    """Lets each of these ranks write its stacks to its output, and waits until each has written something. Does not
    wait for ranks that have ended or are stopped."""
    outputs = {rank: directory / f"{rank}.out" for rank in pids}
    before = {rank: output.stat().st_size if output.exists() else 0 for rank, output in outputs.items()}
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)  # faulthandler then writes the stacks
    deadline = time.monotonic() + STACKS_SECONDS
    for rank, pid in pids.items():
        while time.monotonic() < deadline and state_of(pid) not in "TZX":
            if outputs[rank].exists() and outputs[rank].stat().st_size > before[rank]:
                break
            time.sleep(0.01)
    time.sleep(0.5)  # until each has written the rest


def state_of(pid: int) -> str:
    """Returns the letter by which Linux says what a child of this process does: T if it is stopped, Z if it has
    ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def died(rank: int, status: int) -> Outcome:
    """Returns the outcome of a rank whose process has ended with ``status``, without a value."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Outcome(rank, error=f"died of {signal.Signals(-code).name}", signal=-code)
    return Outcome(rank, error=f"left by exit status {code}")


def run_rank(directory: Path, rank: int, world_size: int, port: int, job: bytes, init: bool) -> None:
    """Runs a job as one rank. Never returns, because a rank must not run the server's loop or the server's exit."""
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


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yields the number of a free port. Inside of the block, nobody gets this port who asks for any free port.

    A server that asks for this port, such as the store of the ranks, gets it, because the socket here does not listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        yield port


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    # The import makes pickle find Outcome in this module, and not in __main__.
    from tests.support.cluster import serve as serve_as_module

    serve_as_module(Connection(int(sys.argv[1])))
