"""A store that fails on purpose. It counts its operations, and one of them is replaced by a fault.

``with faulty(fault) as operations`` puts it in the place of the local store, in one process, such as a rank.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from zckpt.errors import from_os_error
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_store import LocalStore, Temporary
from zckpt.storage.local_writer import LocalWriter
from zckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Fault:
    """What takes the place of an operation on a store."""

    act: Callable[[Callable[[], Any], str], Any]
    """The function that is called instead. Its arguments are the operation and the path of the file."""
    at: int = 0
    """The number of the operation, counted from 0 among those that ``names`` and ``path`` select."""
    names: tuple[str, ...] = ()
    """The names of the methods that are counted, or () for all methods."""
    path: str = ""
    """Text that the path of the file has to contain."""
    lasting: bool = False
    """Whether ``act`` also takes the place of every later operation, as after a death."""


@dataclass
class Operations:
    """The operations on the stores of a process."""

    fault: Fault | None
    done: list[tuple[str, str]] = field(default_factory=list)
    """The name of the method and the path of the file of each operation, in order."""
    matching: int = 0
    """The number of operations so far that the fault selects by name and path."""
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
    """A store, reader or writer that counts every call of a method."""

    def __init__(self, target: Any, operations: Operations, file: str) -> None:
        self._target, self._operations, self._file = target, operations, file

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        if attribute is self._target:  # a capability, such as ``Reader.direct``
            return self
        if isinstance(attribute, LocalStore):  # the parent
            return Watched(attribute, self._operations, str(attribute.location))
        if not callable(attribute) or name in ("close", "discard", "remove_made"):
            return attribute
        if name == "child":
            return lambda path: Watched(attribute(path), self._operations, os.path.join(self._file, path))

        if name == "remove":  # one operation for each path, because another process may see what is between them
            return lambda *paths: [
                self._operations.run(name, os.path.join(self._file, path), partial(attribute, path)) for path in paths
            ]

        def call(*args: Any, **kwargs: Any) -> Any:
            of_a_file = args and isinstance(args[0], str)
            file = os.path.join(self._file, args[0]) if of_a_file else self._file
            result = self._operations.run(name, file, lambda: attribute(*args, **kwargs))
            is_part = isinstance(result, (LocalReader, LocalWriter, Temporary))
            return Watched(result, self._operations, file) if is_part else result

        return call


@contextmanager
def faulty(fault: Fault | None = None) -> Iterator[Operations]:
    """Watches every store that is opened within the ``with`` block, and gives it this fault."""
    operations = Operations(fault)
    watched = {"": lambda location: Watched(LocalStore(location), operations, str(location))}
    with mock.patch.dict(SCHEMES, watched):
        yield operations


# Functions that take the place of an operation


def fail(number: int) -> Callable[[Callable[[], Any], str], Any]:
    """Returns an ``act`` for which the operating system refuses the operation with the errno ``number``."""

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
    """Removes the file, which may be open, and does the operation."""
    os.unlink(file)
    return operation()


def replace(operation: Callable[[], Any], file: str) -> Any:
    """Replaces the file, which may be open, by one of the same length with other bytes, and does the operation."""
    nbytes = os.path.getsize(file)
    os.unlink(file)
    with open(file, "wb") as new:
        new.write(b"\x5a" * nbytes)
    return operation()


@contextmanager
def short(nbytes: int) -> Iterator[None]:
    """Lets the operating system read and write at most ``nbytes`` in each call, which it is allowed to do."""

    def few(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def call(fd: int, views: Any, offset: int) -> int:
            return int(real(fd, [views[0][:nbytes]], offset))

        return call

    with mock.patch.multiple(os, preadv=few("preadv"), pwritev=few("pwritev")):
        yield
