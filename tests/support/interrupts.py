"""Interrupts at chosen moments, and a check that they leave no threads behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.support.waiting import WAIT_SECONDS, wait_until

if TYPE_CHECKING:
    from types import FrameType

# `interrupt_in` sends this signal. Only the main thread may set a handler, so it is set here.
signal.signal(signal.SIGUSR2, lambda *_: None)


def interrupt_in(*functions: Any) -> None:
    """Sends SIGINT, as Ctrl-C does, to this process, while its main thread is inside of calls of all these functions.

    Another thread calls this. It returns once the main thread has left the innermost of these calls, so the interrupt
    was raised there.
    """
    frame = wait_until_main_is_in(*functions)
    os.kill(os.getpid(), signal.SIGINT)

    def has_left() -> bool:
        # Python raises the interrupt once a system call ends. If SIGINT came just before the main thread began to wait
        # for a lock, only another signal ends this wait.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
        return all(frame is not other for other in _frames_of_main())

    wait_until(has_left)


def wait_until_main_is_in(*functions: Any) -> FrameType:
    """Waits until the main thread is inside of calls of all these functions. Another thread calls this.

    Returns the frame of the innermost of these calls."""
    codes = {function.__code__ for function in functions}
    found: list[FrameType] = []

    def is_in() -> bool:
        found[:] = [frame for frame in _frames_of_main() if frame.f_code in codes]
        return {frame.f_code for frame in found} == codes

    wait_until(is_in)
    return found[0]


def threads_left(seconds: float = WAIT_SECONDS) -> list[str]:
    """Returns the names of zckpt's threads that still run after ``seconds``.

    Daemon threads do not count, because they change no data.
    """
    deadline = time.monotonic() + seconds
    while True:
        names = [t.name for t in threading.enumerate() if t.name.startswith("zckpt-") and not t.daemon]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


def _frames_of_main() -> list[FrameType]:
    """Returns the frames of the main thread, the innermost first."""
    frames = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
