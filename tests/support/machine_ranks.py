"""Runs a test's function on real ranks, each of them on a machine of ``machines``.

The ranks are forked from the server of ``cluster``, so they start quickly. A process cannot change its own pid
namespace. So a rank forks once more, and the process in between passes the result on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import threading
import traceback
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from tests.support.cluster import ROOT, ClusterError, die_with_parent
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from tests.support.cluster import Cluster, Outcome
    from tests.support.machines import Machine

NAMESPACES = ("net", "uts", "ipc", "mnt")


def outcomes_on(
    cluster: Cluster,
    nodes: Sequence[Machine],
    function: Callable[..., Any],
    *args: Any,
    ranks_per_node: int = 1,
    **options: Any,
) -> list[Outcome]:
    """Calls a function on ``ranks_per_node`` ranks of each machine and returns the outcome of each rank.

    ``options`` are those of ``Cluster.outcomes``. A rank on a machine that is killed has died of SIGKILL.
    """
    pids = [node.pid for node in nodes for _ in range(ranks_per_node)]
    local = (nodes[0].address, ranks_per_node)
    return cluster.outcomes(run_on_a_machine, len(pids), pids, *local, function, *args, init=False, **options)


def values_on(cluster: Cluster, nodes: Sequence[Machine], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Does what ``outcomes_on`` does with one rank on each machine, and returns their values. Fails if a rank fails."""
    outcomes = outcomes_on(cluster, nodes, function, *args)
    if any(outcome.failed for outcome in outcomes):
        raise ClusterError(outcomes)
    return [outcome.value for outcome in outcomes]


def run_on_a_machine(
    pids: Sequence[int], master: str, ranks_per_node: int, function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function as this rank, on the machine whose first process is the one of ``pids`` for this rank."""
    namespaces = f"/proc/{pids[int(os.environ['RANK'])]}/ns"
    receiver, sender = Pipe(duplex=False)
    enter(f"{namespaces}/pid")
    pid = os.fork()
    if pid == 0:
        receiver.close()
        for name in NAMESPACES:
            enter(f"{namespaces}/{name}")
        os.chdir(ROOT)  # the mount namespace has set it to /
        os.environ.update(
            MASTER_ADDR=master,
            GLOO_SOCKET_IFNAME="eth0",
            LOCAL_RANK=str(int(os.environ["RANK"]) % ranks_per_node),
            LOCAL_SIZE=str(ranks_per_node),
        )
        run_inside(sender, lambda: function(*args, **kwargs))
    sender.close()
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(pid, number))  # the rank writes its stacks
    try:
        value, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            os.kill(os.getpid(), -status)
        raise RuntimeError(f"left by exit status {status}") from None
    if error:
        raise RuntimeError(f"on the machine:\n{error}")
    return value


def enter(namespace: str) -> None:
    with open(namespace) as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


def run_inside(sender: Connection, action: Callable[[], Any]) -> None:
    """Sends the value that ``action`` returns, or the traceback of its error. Never returns, because other ranks may
    still talk to this one."""
    try:
        die_with_parent()
        try:
            import deepspeed

            deepspeed.init_distributed("gloo")
            result = pickle.dumps((action(), None))
        except BaseException:
            result = pickle.dumps((None, traceback.format_exc()))
        sender.send_bytes(result)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def assert_told(outcomes: Sequence[Outcome], who: int, within_seconds: float) -> None:
    """Checks that every other rank was told in time that rank ``who`` is gone. Each value is the name of the error's
    class, its text, the rank that it names, and after how many seconds it has come."""
    for outcome in outcomes:
        if outcome.rank != who:
            assert not outcome.failed, outcome
            kind, message, named, seconds = outcome.value
            assert (kind, named) == ("RankError", who), message
            assert "has shown no sign of life" in message
            assert seconds < within_seconds


@contextmanager
def cut_until_told(node: Machine, marks: Path, ranks: Collection[int]) -> Iterator[None]:
    """Cuts the link of a machine once the file ``in-the-middle`` is there, and makes the file ``disturbed``. Mends the
    link when each of ``ranks`` has made a file ``told-<rank>``."""

    def cut_for_a_while() -> None:
        node.cut()
        (marks / "disturbed").touch()
        wait_until(lambda: all((marks / f"told-{rank}").exists() for rank in ranks))
        node.mend()

    with meanwhile((marks / "in-the-middle").exists, cut_for_a_while):
        yield


@contextmanager
def meanwhile(condition: Callable[[], bool], action: Callable[[], object]) -> Iterator[None]:
    """Waits in a thread until ``condition`` returns true, and then calls ``action``, while the ``with`` block runs.

    Fails if the block ends before."""
    errors: list[BaseException] = []
    over = threading.Event()

    def wait_and_act() -> None:
        try:
            wait_until(lambda: condition() or over.is_set())
            assert not over.is_set(), f"{condition} has not returned true"
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
