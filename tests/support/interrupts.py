"""Interrupts at chosen moments, and what they may not leave behind."""

from __future__ import annotations

import os
import signal
import threading
import time


def interrupt_after(*seconds: float) -> None:
    """Sends Ctrl-C to this process, once after each of these times."""
    for delay in seconds:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()


def threads_left(seconds: float = 10) -> list[str]:
    """The names of zckpt's threads that are still there after so long. Daemons do not count: they change no data."""
    deadline = time.monotonic() + seconds
    while True:
        left = [one.name for one in threading.enumerate() if one.name.startswith("zckpt-") and not one.daemon]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
