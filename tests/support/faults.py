"""A store that fails on purpose: it counts what is done to it, and at one operation does what its fault says.

For one process, a rank for instance: ``with faulty(fault) as operations`` puts it in the place of the local store.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from zckpt.errors import from_os_error
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_store import LocalStore
from zckpt.storage.local_writer import LocalWriter
from zckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Fault:
    """``act`` takes the place of the operation with number ``at``, of those whose name is in ``names`` (all if it is
    empty) and whose path has ``path`` in it. It is given what would be done, and the file."""

    act: Callable[[Callable[[], Any], str], Any]
    at: int = 0
    names: tuple[str, ...] = ()
    path: str = ""
    lasting: bool = False
    """Of every one after it too: what dies does nothing any more."""


@dataclass
class Operations:
    """What was done to the stores of a process, in order: (method, file)."""

    fault: Fault | None
    done: list[tuple[str, str]] = field(default_factory=list)
    matching: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, name: str, file: str, operation: Callable[[], Any]) -> Any:
        with self.lock:
            self.done.append((name, file))
            fault, acts = self.fault, False
            if fault is not None and (not fault.names or name in fault.names) and fault.path in file:
                acts = self.matching == fault.at or (fault.lasting and self.matching > fault.at)
                self.matching += 1
        return fault.act(operation, file) if fault is not None and acts else operation()


class Watched:
    """A store, reader or writer with every call of a method counted."""

    def __init__(self, target: Any, operations: Operations, file: str) -> None:
        self._target, self._operations, self._file = target, operations, file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if found is self._target:  # what it can do beside the contract
            return self
        if isinstance(found, LocalStore):  # the parent
            return Watched(found, self._operations, str(found.location))
        if not callable(found) or name == "close":
            return found
        if name == "child":
            return lambda path: Watched(found(path), self._operations, os.path.join(self._file, path))

        def call(*args: Any, **kwargs: Any) -> Any:
            of_a_file = args and isinstance(args[0], str)
            file = os.path.join(self._file, args[0]) if of_a_file else self._file
            result = self._operations.run(name, file, lambda: found(*args, **kwargs))
            return Watched(result, self._operations, file) if isinstance(result, (LocalReader, LocalWriter)) else result

        return call


@contextmanager
def faulty(fault: Fault | None = None) -> Iterator[Operations]:
    """Every store that is opened meanwhile is watched, and has this fault."""
    operations = Operations(fault)
    watched = {"": lambda location: Watched(LocalStore(location), operations, str(location))}
    with mock.patch.dict(SCHEMES, watched):
        yield operations


# What may happen in the place of an operation


def fail(number: int) -> Callable[[Callable[[], Any], str], Any]:
    """The operating system refuses, with this errno."""

    def act(operation: Callable[[], Any], file: str) -> Any:
        error = OSError(number, os.strerror(number))
        raise from_os_error(error, "do", file) from error

    return act


NO_SPACE, NO_QUOTA, BROKEN, READ_ONLY, FORBIDDEN = map(
    fail, (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
)


def kill(operation: Callable[[], Any], file: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def remove(operation: Callable[[], Any], file: str) -> Any:
    """While it may be open."""
    os.unlink(file)
    return operation()


def replace(operation: Callable[[], Any], file: str) -> Any:
    """By another one, as long and with other bytes, while it may be open."""
    nbytes = os.path.getsize(file)
    os.unlink(file)
    with open(file, "wb") as new:
        new.write(b"\x5a" * nbytes)
    return operation()


@contextmanager
def short(nbytes: int) -> Iterator[None]:
    """The operating system reads and writes no more than so many bytes at once, as it may."""

    def few(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def call(fd: int, views: Any, offset: int) -> int:
            return int(real(fd, [views[0][:nbytes]], offset))

        return call

    with mock.patch.multiple(os, preadv=few("preadv"), pwritev=few("pwritev")):
        yield
