"""The store for a directory of a local or mounted file system."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zckpt.errors import StorageError, from_os_error
from zckpt.format import names
from zckpt.progress import logger
from zckpt.storage.contract import Entry
from zckpt.storage.files import BINARY, UNSUPPORTED, free_bytes, is_impossible_name, is_link, sync_data
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.storage.location import Location
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

RENAME_WAIT_SECONDS = 5.0
"""How long a rename waits on Windows for other processes that have the file open, in seconds."""
_AS_IT_IS: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""The flags by which a file is opened so that no link is followed, and nothing blocks."""
_NO_SYNC = UNSUPPORTED | {errno.EBADF}
"""The error numbers by which a system says that a directory cannot be synced. Some systems sync only files that are
open for writing, and report EBADF."""
_NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EACCES, errno.EMLINK}
"""The error numbers by which a file system says that it has no hard links."""


class LocalStore:
    """A store whose directory is a directory of a file system."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._root = location.path

    @property
    def parent(self) -> LocalStore:
        return LocalStore(self.location.parent)

    def child(self, path: str) -> LocalStore:
        return LocalStore(self.location.child(path))

    def reader(self) -> LocalReader:
        return LocalReader(self._root)

    def entry(self, path: str) -> Entry | None:
        full = self._full(path)

        def look() -> Entry:
            status = os.lstat(full) if path else os.stat(full)
            if stat.S_ISREG(status.st_mode):
                # The time of an open file is from the server, not from this host's cache. Only a lack of permission is
                # ignored: after any other error, an old time could make the lock of a live writer look dead.
                with suppress(PermissionError):
                    fd = os.open(full, os.O_RDONLY | BINARY | _AS_IT_IS)
                    status = os.fstat(fd)
                    os.close(fd)
            return _entry(path, status)

        return _unless_absent(full, look)

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        entries = self._listed(path)
        if entries is None or not deep:
            return entries
        files, directories = [], [""]
        while directories:
            above = directories.pop()
            for entry in self._listed(f"{path}/{above}".strip("/")) or ():
                entry = entry._replace(path=f"{above}/{entry.path}".lstrip("/"))
                if entry.is_directory:
                    directories.append(entry.path)
                else:
                    files.append(entry)
        return files

    def _listed(self, path: str) -> list[Entry] | None:
        def listed() -> list[Entry]:
            entries = []
            with os.scandir(self._full(path)) as found:
                for one in found:
                    with suppress(FileNotFoundError):
                        entries.append(_entry(one.name, os.lstat(one.path)))
            return entries

        return _unless_absent(self._full(path), listed)

    def free_bytes(self) -> int | None:
        return free_bytes(self._root)

    def make_directories(self, path: str) -> list[Location]:
        made: list[str] = []
        try:
            while not _make_missing(self._full(path), made):
                pass
        except BaseException:
            for directory in made:
                _quietly(os.rmdir, directory)
            raise
        return [Location("", directory) for directory in made]

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> LocalWriter:
        return LocalWriter(self._full(path), reserved_bytes, direct)

    def share(self, path: str, source: Location) -> bool:
        full = self._full(path)
        try:
            status = os.lstat(source.path)
            if source.scheme or not stat.S_ISREG(status.st_mode) or is_link(status):
                return False
            if not _share_blocks(full, source.path):
                logger.debug("%s: a hard link, since the file system shares no blocks with %s", full, source.path)
                os.link(source.path, full)
        # The files are on two file systems, or the file system has no links, or too many of them. The caller writes the
        # bytes.
        except OSError as error:
            logger.debug("%s: written, not shared with %s: %s", full, source.path, error)
            return False
        return True

    def may_share(self, directory: Location) -> bool:
        existing = self._root
        while not os.path.isdir(existing):
            existing = os.path.dirname(existing) or "."
        try:
            return not directory.scheme and os.stat(existing).st_dev == os.stat(directory.path).st_dev
        except OSError:
            return False

    def put(self, path: str, data: bytes) -> None:
        path = self._full(path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                sync_data(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, "write", path, 0, len(data)) from error

    def sync_names(self, path: str) -> None:
        _fsync_directory(self._full(path))

    def prepare(self, path: str, data: bytes, digits: str = "") -> str:
        prepared = _temporary(path, digits)
        try:
            self.put(prepared, data)
        except BaseException:
            _quietly(os.unlink, self._full(prepared))
            raise
        return prepared

    def commit(self, path: str, prepared: str) -> None:
        try:
            _retry_while_open(lambda: os.replace(self._full(prepared), self._full(path)))
        except OSError as error:
            raise from_os_error(error, "rename", self._full(prepared)) from error
        _fsync_directory(os.path.dirname(self._full(path)))

    def remove(self, path: str) -> None:
        _quietly(os.unlink, self._full(path))
        shutil.rmtree(self._full(path), ignore_errors=True)

    def remove_if_empty(self, path: str) -> None:
        _quietly(os.rmdir, self._full(path))

    def claim(self, path: str, data: bytes) -> bool:
        prepared = _temporary(path)
        try:
            self.put(prepared, data)
            return self._put_where_none_is(path, data, self._full(prepared))
        except StorageError as error:
            # Another process has claimed the path, and has removed the directory since.
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        finally:
            _quietly(os.unlink, self._full(prepared))

    def withdraw(self, path: str, data: bytes) -> bool:
        # A rename decides who withdraws the file: of several processes that rename it, only one finds it.
        moved = self._full(_temporary(path))
        try:
            _retry_while_open(lambda: os.rename(self._full(path), moved))
            content = Path(moved).read_bytes()
            # The file belongs to somebody else, so it is put back. If a third process has claimed the path in between,
            # the owner of the file finds this out before it commits.
            if content != data:
                self._put_where_none_is(path, content, moved)
            _retry_while_open(lambda: os.unlink(moved))
        except FileNotFoundError:
            return False
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise from_os_error(error, "remove", self._full(path)) from error
        return content == data

    def _put_where_none_is(self, path: str, data: bytes, same: str) -> bool:
        """Puts ``data`` at ``path`` if nothing is there. Returns whether it did. The file ``same`` has these bytes
        already."""
        try:
            # link(2) is the only call that network file systems either do once or do not do at all.
            os.link(same, self._full(path))
        except FileExistsError:
            # The file may be the one of this very call: if the server's answer is lost, the client asks again.
            return os.stat(same).st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise from_os_error(error, "link", self._full(path)) from error
            return self._create(path, data)
        return True

    def _create(self, path: str, data: bytes) -> bool:
        """Does the same as ``_put_where_none_is`` on a file system without links. Other processes may see the file
        before it has its content."""
        try:
            self.put(path, data)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def touch(self, path: str) -> None:
        try:
            os.utime(self._full(path))
        except OSError as error:
            raise from_os_error(error, "touch", self._full(path)) from error

    def now(self) -> float:
        probe = self._full(_temporary(names.LOCK))
        try:
            with open(probe, "xb") as file:
                # utime sets the time by the file server's clock, not by this host's. On Windows it takes only a path.
                os.utime(file.fileno() if os.utime in os.supports_fd else probe)
                return os.fstat(file.fileno()).st_mtime
        except OSError as error:
            raise from_os_error(error, "create", probe) from error
        finally:
            _quietly(os.unlink, probe)

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root


def _unless_absent(path: str, action: Callable[[], T]) -> T | None:
    """Returns what ``action`` returns, or None if nothing is at the path."""
    try:
        return action()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have such a name
        return None
    except OSError as error:
        if is_impossible_name(error):
            return None
        raise from_os_error(error, "look at", path) from error


def _entry(path: str, status: os.stat_result) -> Entry:
    link = is_link(status)
    nbytes = status.st_size if stat.S_ISREG(status.st_mode) and not link else None
    is_directory = stat.S_ISDIR(status.st_mode) and not link
    return Entry(path, nbytes, status.st_mtime, is_directory, status.st_nlink, (status.st_dev, status.st_ino))


def _make_missing(path: str, made: list[str]) -> bool:
    """Makes a directory and those above it that do not exist, and adds those that it has made to the front of ``made``.
    Returns False if another process, whose write has failed, has removed one of them meanwhile."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path) or "."
    # A writer that died may have made the deepest existing directory without syncing its name.
    if os.access(os.path.dirname(path) or ".", os.R_OK):
        _fsync_directory(os.path.dirname(path) or ".")
    for directory in reversed(missing):
        above = os.path.dirname(directory) or "."
        try:
            os.mkdir(directory)
            made.insert(0, directory)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not os.path.isdir(above):
                return False
            if not (isinstance(error, FileExistsError) and os.path.isdir(directory)):
                raise from_os_error(error, "create the directory", directory) from error
        _fsync_directory(above)
    return True


def _share_blocks(path: str, source: str) -> bool:
    """Makes a new file of the blocks of ``source``. The file is durable except for its name. Returns False, and leaves
    nothing, if the file system cannot share blocks. Raises OSError."""
    shared = False
    source_fd = os.open(source, os.O_RDONLY | BINARY)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        try:
            if linux.share_blocks(fd, source_fd, 0, 0, 0):
                sync_data(fd)
                shared = True
        finally:
            os.close(fd)
            if not shared:
                os.unlink(path)
    finally:
        os.close(source_fd)
    return shared


def _temporary(path: str, digits: str = "") -> str:
    """Returns the path of a temporary file for ``path``, with random digits if none are given."""
    return names.temporary(path, digits or secrets.token_hex(4))


def _retry_while_open(rename: Callable[[], None]) -> None:
    """Calls ``rename``. On Windows, tries again for up to ``RENAME_WAIT_SECONDS`` while another process has the file
    open."""
    deadline = time.monotonic() + (RENAME_WAIT_SECONDS if sys.platform == "win32" else 0)
    while True:
        try:
            return rename()
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.001)


def _fsync_directory(path: str) -> None:
    """Makes the names in a directory durable, if the system and the file system let a program ask for this."""
    if sys.platform == "win32":  # Windows opens no directories
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise from_os_error(error, "open", path) from error
    try:
        sync_data(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise from_os_error(error, "fsync", path) from error
    finally:
        os.close(fd)


def _quietly(action: Callable[[str], None], path: str) -> None:
    """Does ``action``, and ignores an OSError."""
    with suppress(OSError):  # a path that cannot be removed stays, and the first error is the one to report
        action(path)
