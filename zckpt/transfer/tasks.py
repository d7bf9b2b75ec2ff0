"""Runs tasks, which read, write or compare, on several threads."""

from __future__ import annotations

import threading
from collections.abc import Sized
from typing import TYPE_CHECKING

from zckpt.ranks.heartbeat import sign_of_life
from zckpt.system.threads import Worker, stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def run_tasks(
    tasks: Iterable[Callable[[], object]], threads: int, interrupted: Callable[[], None] = lambda: None
) -> None:
    """Runs tasks on up to ``threads`` worker threads, and returns once all of them have ended. Each worker that is free
    takes the next task. Only one worker at a time takes a task from the iterable. If the system cannot start as many
    threads, this thread does tasks, too.

    ``interrupted`` is called if this thread is interrupted while it waits for the tasks, for instance by Ctrl-C. It
    should make long tasks end soon. Further interrupts do not shorten the wait, because the caller closes the files
    that the tasks use. Raises what a task has raised. If several tasks have failed, this is the error of the first of
    them in ``tasks``."""
    numbered = enumerate(tasks)
    lock = threading.Lock()
    failures: dict[int, BaseException] = {}

    def work() -> None:
        number = -1
        while not failures:
            try:
                with lock:
                    number, task = next(numbered, (number, None))
                if task is None:
                    return
                task()
            except BaseException as error:  # raised below
                failures.setdefault(number, error)  # it must not replace an interrupt, whose number is -1
            sign_of_life()

    # A ThreadPoolExecutor takes no more tasks once the interpreter exits, but a background write goes on then.
    count = min(threads, len(tasks)) if isinstance(tasks, Sized) else threads
    workers = [Worker(work, f"zckpt-{i}") for i in range(count)]
    try:
        try:
            for worker in workers:
                worker.start_or_run()
            for worker in workers:
                worker.wait()
        except BaseException as error:  # raised below
            failures[-1] = error
            interrupted()
        finally:
            stop(workers)
        if failures:
            raise failures[min(failures)]
    finally:
        # The tracebacks of the errors refer to this dictionary. The cycle would keep buffers and open files alive.
        failures.clear()
