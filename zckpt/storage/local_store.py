"""The store for a directory of a local or mounted file system."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zckpt.errors import NoSpaceError, StorageError, from_os_error
from zckpt.format import names
from zckpt.progress import logger
from zckpt.storage.contract import ANYTHING, Entry, Store, changed_meanwhile
from zckpt.storage.files import BINARY, UNSUPPORTED, free_bytes, is_impossible_name, is_link, sync_data
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_writer import LocalWriter
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.storage.contract import Condition
    from zckpt.storage.location import Location

T = TypeVar("T")

RENAME_WAIT_SECONDS = 5.0
"""How long a rename waits on Windows for other processes that have the file open, in seconds."""
_AS_IT_IS: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""The flags by which a file is opened so that no link is followed, and nothing blocks."""
_NO_SYNC = UNSUPPORTED | {errno.EBADF}
"""The error numbers by which a system says that a directory cannot be synced. Some systems sync only files that are
open for writing, and report EBADF."""
_ATTEMPTS = 5
"""How often a directory is made for a new file while other processes remove it."""
_NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EACCES, errno.EMLINK}
"""The error numbers by which a file system says that it has no hard links."""


class LocalStore(Store):
    """A store whose directory is a directory of a file system."""

    stops_commits = True
    divides_files = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._root = location.path
        self._made: list[str] = []
        """The directories that this object has made, the innermost first."""

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
        return free_bytes(_existing(self._root))

    def create(self, path: str, nbytes: int, *, direct: bool, reserve: bool = True) -> LocalWriter:
        full = self._full(path)
        return self._in_directory(full, lambda: LocalWriter(full, nbytes if reserve else 0, direct))

    def make(self, path: str, nbytes: int, *, reserve: bool) -> None:
        self.create(path, nbytes, direct=False, reserve=reserve).close()
        full = self._full(path)
        try:
            os.truncate(full, nbytes)
        except OSError as error:
            raise from_os_error(error, "lengthen", full) from error

    def open_range(self, path: str, *, direct: bool) -> LocalWriter:
        return LocalWriter(self._full(path), 0, direct, os.O_RDWR)

    def _in_directory(self, full: str, make: Callable[[], T]) -> T:
        """Returns what ``make`` returns, which makes a new file. Makes the directory of the file if it is missing."""
        for _ in range(_ATTEMPTS):
            try:
                return make()
            except OSError as error:
                # The directory does not exist yet, or another process, whose write has failed, has removed it.
                if not isinstance(error.__cause__ or error, FileNotFoundError):
                    raise
                self._make_directories(os.path.dirname(full))
        return make()

    def _make_directories(self, path: str) -> None:
        made: list[str] = []
        try:
            make_directories(path, made)
        finally:
            self._made = [*made, *self._made]

    def remove_made(self) -> None:
        while self._made:
            _quietly(os.rmdir, self._made.pop(0))

    def share(self, path: str, source: Location) -> bool:
        full = self._full(path)
        try:
            status = os.lstat(source.path)
            if source.scheme or not stat.S_ISREG(status.st_mode) or is_link(status):
                return False
            if not os.path.isdir(os.path.dirname(full)):
                self._make_directories(os.path.dirname(full))
            if not _share_blocks(full, source.path):
                logger.debug("%s: a hard link, since the file system shares no blocks with %s", full, source.path)
                os.link(source.path, full)
        # The files are on two file systems, or there are no links, or too many of them. The caller writes the bytes.
        except OSError as error:  # StorageError is an OSError
            logger.debug("%s: written, not shared with %s: %s", full, source.path, error)
            return False
        return True

    def may_share(self, directory: Location) -> bool:
        try:
            return not directory.scheme and os.stat(_existing(self._root)).st_dev == os.stat(directory.path).st_dev
        except OSError:
            return False

    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        if over is ANYTHING:
            prepared = self.prepare(path, data)
            try:
                prepared.commit()
            finally:
                prepared.discard()
            return True
        if over == data:
            return self._touch(path, data)
        if over is not None and not self.remove_if(path, over):
            return False
        # A writer that died may have made the directory without syncing its name.
        self._make_directories(os.path.dirname(self._full(path)))
        same = names.temporary(path, secrets.token_hex(4))
        try:
            self.put_new(same, data)
            return self._put_where_none_is(path, data, self._full(same))
        finally:
            _quietly(os.unlink, self._full(same))

    def put_new(self, path: str, data: bytes) -> None:
        full = self._full(path)
        try:
            fd = self._in_directory(full, lambda: os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666))
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                sync_data(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise from_os_error(error, "write", full, 0, len(data)) from error

    def sync_names(self, path: str) -> None:
        _fsync_directory(self._full(path))

    def prepare(self, path: str, data: bytes, digits: str = "") -> Temporary:
        temporary = names.temporary(path, digits or secrets.token_hex(4))
        try:
            self.put_new(temporary, data)
        except BaseException:
            _quietly(os.unlink, self._full(temporary))
            raise
        return Temporary(self, path, self._full(path), self._full(temporary))

    def remove(self, *paths: str) -> None:
        for path in paths:
            full = self._full(path)
            try:
                if path:  # The store's own directory may be reached through a link, which stays.
                    os.unlink(full)
                    continue
            except OSError:  # It may be a directory.
                pass
            _quietly(os.rmdir, full)

    def remove_if(self, path: str, data: bytes) -> bool:
        # A rename decides who removes the file: of several processes that rename it, only one finds it.
        moved = self._full(names.temporary(path, secrets.token_hex(4)))
        try:
            _retry_while_open(lambda: os.rename(self._full(path), moved))
            content = Path(moved).read_bytes()
            # The file belongs to somebody else, so it is put back. If a third process has put a file there in
            # between, the owner of the file finds this out before it commits.
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
        """Puts ``data`` at ``path`` if nothing is there. Returns whether it did. The file ``same`` has these bytes."""
        try:
            # link(2) is the only call that network file systems either do once or do not do at all.
            os.link(same, self._full(path))
            return True
        except FileExistsError:
            # The file may be the one of this very call: if the server's answer is lost, the client asks again.
            return os.stat(same).st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise from_os_error(error, "link", self._full(path)) from error
        # On a file system without links, other processes may see the file before it has its content.
        try:
            self.put_new(path, data)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def _touch(self, path: str, data: bytes) -> bool:
        """Sets the time of a file to now if it has these bytes. Returns whether it has."""
        full = self._full(path)
        try:
            if Path(full).read_bytes() != data:
                return False
            # A byte is written, because then the file server sets the time. utime may set that of this host's clock.
            fd = os.open(full, os.O_WRONLY | BINARY)
            try:
                os.write(fd, data[:1])
            finally:
                os.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise from_os_error(error, "touch", full) from error
        return True

    def now(self) -> float:
        probe = names.temporary(names.LOCK, secrets.token_hex(4))
        try:
            with suppress(NoSpaceError):  # Without its content, the new file has a time all the same.
                self.put_new(probe, b"now")  # The file server sets the time of what is written.
            entry = self.entry(probe)
        finally:
            _quietly(os.unlink, self._full(probe))
        if entry is None:
            raise StorageError("somebody has removed the file at once", file=self._full(probe))
        return entry.changed_at

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


class Temporary:
    """A file that is ready to be renamed to its path."""

    def __init__(self, store: LocalStore, path: str, full: str, temporary: str) -> None:
        self._store, self._path, self._full, self._temporary = store, path, full, temporary

    def commit(self, over: Condition = ANYTHING) -> None:
        # Between this look and the rename, nobody but another writer changes the file. A writer that has taken over the
        # lock has removed the temporary file before, so the rename fails.
        if over is not ANYTHING and _content(self._full) != over:
            raise changed_meanwhile(self._store, self._path)
        try:
            _retry_while_open(lambda: os.replace(self._temporary, self._full))
        except OSError as error:
            raise from_os_error(error, "rename", self._temporary) from error
        _fsync_directory(os.path.dirname(self._full))

    def discard(self) -> None:
        _quietly(os.unlink, self._temporary)


def _content(path: str) -> bytes | None:
    """Returns the bytes of a file, or None if there is none. Raises StorageError."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, "read", path) from error


def _existing(path: str) -> str:
    """Returns the nearest directory that exists: this one, or one above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "."
    return path


def make_directories(path: str, made: list[str]) -> None:
    """Makes a directory and all directories above it, and makes their names durable. Adds those that this very call has
    made to the front of ``made``, and none that was there or that another process has made at the same time. After an
    error, no new directory is left, and ``made`` is empty. Raises StorageError."""
    try:
        while not _make_missing(path, made):
            pass
    except BaseException:
        while made:
            _quietly(os.rmdir, made.pop(0))
        raise


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
