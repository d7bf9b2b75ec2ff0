"""Scratch files: they hold state of an engine for as long as its process lives, and nobody else sees them.

A file has no name from its first instant where the file system can make such a file, or loses it once it is open. So
a process that dies leaves nothing. Where neither can be, as on some network file systems, the name says which process
it belongs to; the next offload into that directory and ``zckpt gc`` remove those of processes that are gone.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from zckpt.errors import UnsupportedError, ZckptError, from_os_error
from zckpt.format.rules import broken
from zckpt.state.inventory import FileSpan
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.storage.location import Location
from zckpt.system import linux
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zckpt.storage.location import StrPath

_NAME = re.compile(r"zckpt-scratch-([0-9a-f]{16})-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{8}")
"""The name of a file that has one: a digest of the place where its process id has a meaning, such as the machine and
its boot; that id; when the process started; and random digits."""
_closing: list[Worker] = []
"""The threads that close files. Some may have ended."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_closing.clear)  # a forked process has none of these threads


class ScratchFile:
    """One open file, without a name or with one that is removed at the end. When it is closed, its space is free at
    once, even if a forked process has the file open too."""

    def __init__(self, directory: str) -> None:
        """A new file in ``directory``, which exists. Raises StorageError."""
        self.directory = directory
        """The directory in which it was made."""
        self._name: str | None = None
        self._fd, self._process = -1, os.getpid()
        self._identity: tuple[int, int] | None = None
        try:
            self._open()
            self._identity = _identity(self._fd)
        except OSError as error:
            self.close()
            raise from_os_error(error, "create a scratch file", directory) from error

    def _open(self) -> None:
        with suppress(OSError):  # the file system has no such files, or the next call tells what is wrong
            self._fd = os.open(self.directory, os.O_TMPFILE | os.O_RDWR, 0o600)
            return
        path = os.path.join(self.directory, _own_name())
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._name = path
        try:
            os.unlink(path)
            os.close(os.open(self.path, os.O_RDONLY))
        except OSError:  # here, a file that is open needs its name
            os.close(self._fd)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        else:
            self._name = None

    @property
    def path(self) -> str:
        """The path by which this process can open it again."""
        return f"/proc/self/fd/{self._fd}"

    def open(self, flags: int) -> int:
        """A new file descriptor. Raises MissingFileError if somebody has closed the file, and StorageError; both name
        the directory."""
        with suppress(OSError):  # no such file descriptor
            if _identity(self._fd) == self._identity:
                try:
                    return os.open(self.path, flags)
                except OSError as error:
                    raise from_os_error(error, "open a scratch file", self.directory) from error
        raise broken("F001", "the scratch file is gone", file=self.directory)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        own = os.getpid() == self._process
        with suppress(OSError):  # somebody has closed it
            if self._identity in (None, _identity(fd)):
                if own:
                    os.ftruncate(fd, 0)
                os.close(fd)
        if self._name is not None and own:
            with suppress(OSError):  # somebody has removed it
                os.unlink(self._name)

    def __del__(self) -> None:
        self.close()


def close_in_background(files: Iterable[ScratchFile]) -> None:
    """Has a thread close these files, since it takes long to free the space of large ones. The end of the process waits
    for it."""
    own = {*files}
    if not own:
        return

    def close() -> None:
        for file in own:
            file.close()

    worker = Worker(close, "zckpt-close")
    with suppress(RuntimeError):  # where there is no thread, they are closed with the last reference to them
        worker.start()
        _closing.append(worker)


def wait_for_closing() -> None:
    """Waits until the space of all files that are being closed in the background is free."""
    while _closing:
        _closing[-1].wait()
        _closing.pop()


@dataclass(frozen=True, slots=True)
class ScratchSpan(FileSpan):
    """Bytes of a scratch file, which is open for as long as somebody has them."""

    file: ScratchFile


class ScratchStore:
    """Makes the files of a write as scratch files. ``files`` has them by their paths in the plan of the write."""

    def __init__(self, directory: str) -> None:
        self.files: dict[str, ScratchFile] = {}
        self._directory = directory

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> LocalWriter:
        file = self.files[path] = ScratchFile(self._directory)
        return _ScratchWriter(file.path, reserved_bytes, direct, os.O_RDWR)


class _ScratchWriter(LocalWriter):
    def sync(self) -> None:
        """Nothing is made durable: no scratch file outlives the system."""
        self._complete()


class ScratchReader(LocalReader):
    """Reads scratch files by their paths in the plan of the write that made them."""

    def __init__(self, files: Mapping[str, ScratchFile]) -> None:
        super().__init__("")
        self._files = files

    def _open(self, path: str, more_flags: int) -> int:
        return self._files[path].open(os.O_RDONLY | more_flags)

    def _full(self, path: str) -> str:
        return self._files[path].directory


def scratch_directory(directory: StrPath) -> str:
    """Makes a directory, if it does not exist, and removes the scratch files of dead processes from it. Returns its
    absolute path. Raises StorageError; ValueError for an empty path, and UnsupportedError for one with a scheme."""
    location = Location.of(directory)
    if location.scheme:
        raise UnsupportedError(
            f"scratch files need a disk of this machine, not one behind the scheme {location.scheme!r}",
            file=str(location),
            hint=f"give a path of a file system, without a scheme; a directory of this name is './{location}'",
        )
    path = location.absolute().path
    try:
        os.makedirs(path, exist_ok=True)
        entries = os.listdir(path)
    except OSError as error:
        raise from_os_error(error, "use the directory", path) from error
    for name in left_over(entries):
        with suppress(OSError):  # another rank may have been as quick
            os.unlink(os.path.join(path, name))
    return path


def left_over(entries: Iterable[str]) -> Iterator[str]:
    """The scratch files among these names that dead processes have left. The files of another machine or boot are left
    alone, for nobody can tell here whether their processes are alive."""
    for name in entries:
        found = _NAME.fullmatch(name)
        if found and found[1] == _place() and not linux.is_running(int(found[2]), int(found[3])):
            yield name


def _own_name() -> str:
    place, started = _place(), linux.started(os.getpid())
    if place is None or started is None:
        raise ZckptError(
            "scratch files need a name here, and this system does not tell which process is which",
            hint="offload to a local file system, such as ext4 or XFS, and mount /proc",
        )
    return f"zckpt-scratch-{place}-{os.getpid()}-{started}-{secrets.token_hex(4)}"


def _place() -> str | None:
    space = linux.pid_space()
    return None if space is None else xxhash.xxh3_64_hexdigest(space.encode())


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
