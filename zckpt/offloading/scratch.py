"""Scratch files. They hold state of an engine while its process lives, and other processes do not see them.

If the file system can make files without names, a scratch file never has a name. Otherwise, its name is removed as soon
as the file is open. So a process that dies leaves nothing. On some network file systems neither is possible. Then the
name says which process the file belongs to, and the next offload into the directory, or ``zckpt gc``, removes the files
of dead processes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError, ZckptError, from_os_error
from zckpt.format.rules import broken
from zckpt.plan.inventory import FileRange
from zckpt.storage.contract import Creator
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.storage.location import Location
from zckpt.storage.process_names import SCRATCH, left_over, process_name
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zckpt.storage.location import StrPath

_closing: list[Worker] = []
"""The threads that close files in the background. Some may have ended."""


class ScratchFile:
    """An open file that has no name, or a name that is removed when the file is closed. Closing the file frees its
    space at once, even if a forked process has the file open too."""

    def __init__(self, directory: str) -> None:
        """Makes a new file in ``directory``, which exists. Raises StorageError."""
        self.directory = directory
        """The directory in which the file was made."""
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
        # The file system may not support files without names. If anything else is wrong, the next call fails too.
        with suppress(OSError):
            self._fd = os.open(self.directory, os.O_TMPFILE | os.O_RDWR, 0o600)
            return
        path = os.path.join(self.directory, _name_with_process())
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._name = path
        try:
            os.unlink(path)
            os.close(os.open(self.path, os.O_RDONLY))
        except OSError:  # this file system keeps an open file only as long as it has its name
            os.close(self._fd)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        else:
            self._name = None

    @property
    def path(self) -> str:
        """The path by which this process can open the file again."""
        return f"/proc/self/fd/{self._fd}"

    def open(self, flags: int) -> int:
        """Returns a new file descriptor. Raises MissingFileError if other code has closed the file, and StorageError.
        Both name the directory."""
        with suppress(OSError):  # the file descriptor is closed
            if _identity(self._fd) == self._identity:
                try:
                    return os.open(self.path, flags)
                except OSError as error:
                    raise from_os_error(error, "open a scratch file", self.directory) from error
        raise broken("F001", "the scratch file is gone", file=self.directory)

    def close(self) -> None:
        """Closes the file and frees its space. May be called several times. In a forked process, only closes the
        file."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        is_owner = os.getpid() == self._process
        with suppress(OSError):  # other code has closed the file descriptor
            if self._identity in (None, _identity(fd)):
                if is_owner:
                    os.ftruncate(fd, 0)
                os.close(fd)
        if self._name is not None and is_owner:
            with suppress(OSError):  # the file has been removed already
                os.unlink(self._name)

    def __del__(self) -> None:
        if os is not None:  # At its end, Python sets a module's names to None. Then the file is left to the system.
            self.close()


def close_in_background(files: Iterable[ScratchFile]) -> None:
    """Closes these files in a thread, because freeing the space of large files takes long. The process does not end
    before this is done."""
    unique_files = {*files}
    if not unique_files:
        return

    def close() -> None:
        for file in unique_files:
            file.close()

    worker = Worker(close, "zckpt-close")
    with suppress(ZckptError):  # If no thread can be started, each file is closed when the last reference to it goes.
        worker.start()
        _closing.append(worker)


def wait_for_closing() -> None:
    """Waits until the space of all files that are being closed in the background is free."""
    while _closing:
        _closing[-1].wait()
        _closing.pop()


@dataclass(frozen=True, slots=True)
class ScratchRange(FileRange):
    """A range of bytes of a scratch file. The file stays open as long as the range exists."""

    file: ScratchFile


class ScratchStore(Creator):
    """Makes the files of a write as scratch files. ``files`` maps their paths in the plan of the write to them."""

    def __init__(self, directory: str) -> None:
        self.files: dict[str, ScratchFile] = {}
        self._directory = directory

    def create(self, path: str, nbytes: int, *, direct: bool, reserve: bool = True) -> LocalWriter:
        file = self.files[path] = ScratchFile(self._directory)
        return _ScratchWriter(file.path, nbytes if reserve else 0, direct, os.O_RDWR)


class _ScratchWriter(LocalWriter):
    def sync(self) -> None:
        """Writes the incomplete pages. Makes nothing durable, because no scratch file outlives the system."""
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
    """Makes a directory if it does not exist, and removes scratch files of dead processes from it. Returns its absolute
    path. Raises StorageError, ValueError for an empty path, and UnsupportedError for a path with a scheme."""
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
        with suppress(OSError):  # another rank may have removed the file already
            os.unlink(os.path.join(path, name))
    return path


def _name_with_process() -> str:
    owner = process_name()
    if owner is None:
        raise ZckptError(
            "scratch files need a name here, and this system does not tell which process is which",
            hint="offload to a local file system, such as ext4 or XFS, and mount /proc",
        )
    return f"{SCRATCH}{owner}"


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
