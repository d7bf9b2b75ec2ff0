"""``beside`` runs a thread beside a context, and waits for its end. The end of the process waits for ``Watcher``."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster import ROOT
from tests.support.forks import fork, result_of
from tests.support.no_threads import no_further_threads
from zckpt.storage import contract
from zckpt.system.threads import Worker, beside, stop

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_thread_runs_beside_the_context_and_has_ended_after_it() -> None:
    inside, seen = threading.Event(), list[str]()

    def act() -> None:
        assert inside.wait(60)
        seen.append(threading.current_thread().name)

    with beside(act, "helper") as start:
        start()
        assert not seen
        inside.set()
    assert seen == ["helper"]


def test_without_a_further_thread_the_caller_acts() -> None:
    seen: list[str] = []
    with no_further_threads(), beside(lambda: seen.append(threading.current_thread().name), "helper") as start:
        start()
    assert seen == [threading.current_thread().name]


def test_an_error_of_the_thread_is_raised_at_the_end() -> None:
    def act() -> None:
        raise MemoryError("in the thread")

    reached: list[bool] = []

    def run() -> None:
        with beside(act, "helper") as start:
            start()
            reached.append(True)

    with pytest.raises(MemoryError, match="in the thread"):
        run()
    assert reached


def test_an_error_of_the_context_before_the_start_prevents_the_call() -> None:
    called: list[bool] = []
    starts: list[Callable[[], None]] = []

    def fail() -> None:
        with beside(lambda: called.append(True), "helper") as start:
            starts.append(start)
            raise ValueError("of the context")

    with pytest.raises(ValueError, match="of the context"):
        fail()
    starts[0]()
    assert not called


def test_a_thread_that_nobody_starts_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="helper was not started"), beside(lambda: None, "helper"):
        pass


def test_an_error_of_the_context_comes_first_and_waits_for_the_thread() -> None:
    begun, inside, ended = threading.Event(), threading.Event(), list[bool]()

    def act() -> None:
        begun.set()
        assert inside.wait(60)
        ended.append(True)
        raise MemoryError("in the thread")

    def fail() -> None:
        with beside(act, "helper") as start:
            start()
            assert begun.wait(60)
            threading.Timer(0.05, inside.set).start()
            raise ValueError("of the context")

    with pytest.raises(ValueError, match="of the context"):
        fail()
    assert ended == [True]


WATCHER_AT_EXIT = """
import sys
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event

from torch.distributed import HashStore

from zckpt.system.threads import Watcher

store, inside = HashStore(), Event()


def watch():
    inside.set()
    with suppress(RuntimeError):
        store.wait(["a key that nobody sets"], timedelta(seconds=2))


class SlowToDelete:
    def __del__(self):
        time.sleep(4)


sys.modules["slow"] = SlowToDelete()  # so that the interpreter takes longer to end than the watcher
Watcher(watch, "watcher").start()
inside.wait()
"""


@pytest.mark.linux
def test_the_end_of_the_process_waits_for_a_watcher_inside_compiled_code() -> None:
    ended = subprocess.run([sys.executable, "-c", WATCHER_AT_EXIT], cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.linux
def test_in_a_forked_process_a_worker_of_the_parent_has_ended() -> None:
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait()

    running, done = Worker(wait, "running"), Worker(lambda: None, "done")
    for worker in (running, done):
        worker.start()
    assert done.wait(60)
    try:

        def look() -> list[bool]:
            signal.alarm(60)
            stop([running])
            return [running.wait(), running.ended, running.in_parent, done.ended, done.in_parent]

        assert result_of(fork(look)) == [True, True, True, True, False]
        assert not running.ended
    finally:
        go_on.set()
        stop([running])
    assert not running.in_parent


@pytest.mark.linux
def test_a_forked_process_can_count_what_it_reads() -> None:
    """A thread of the parent holds the lock of all counters at the time of the fork."""
    held = threading.Event()

    def hold() -> None:
        with contract._COUNTING:
            held.set()
            time.sleep(0.5)

    def count() -> int:
        signal.alarm(60)
        counter = contract.IOCount()
        counter.add(reads=1)
        return counter.reads

    with beside(hold, "holder") as start:
        start()
        assert held.wait(60)
        assert result_of(fork(count)) == 1


WATCHER_IN_PARENT = """
import os

from zckpt.system import threads

threads.EXIT_SECONDS = 300
watcher = threads.Watcher(lambda: watcher.closed.wait(), "watcher")
watcher.start()
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.linux
def test_a_child_process_does_not_wait_for_the_watchers_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", WATCHER_IN_PARENT], cwd=ROOT, check=True, timeout=120)
