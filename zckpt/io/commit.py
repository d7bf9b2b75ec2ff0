"""The order in which a checkpoint comes to be: data first, the manifest last, by rename, everything synced."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from zckpt.errors import StorageError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Callable


def fsync(fd: int, path: str) -> None:
    """Raises StorageError."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise from_os_error(error, "fsync", path) from error


def fsync_directory(path: str) -> None:
    """Makes the names in a directory durable. Raises StorageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, "open", path) from error
    try:
        fsync(fd, path)
    finally:
        os.close(fd)


def make_directories(path: str) -> None:
    """Creates ``path`` and its parents, and makes each new name durable, or leaves none. Raises StorageError."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path) or "."
    try:
        for directory in reversed(missing):
            try:
                os.makedirs(directory, exist_ok=True)
            except OSError as error:
                raise from_os_error(error, "create the directory", directory) from error
            fsync_directory(os.path.dirname(directory) or ".")
    except BaseException:
        for directory in missing:
            remove_empty_directory(directory)
        raise


def write_file(path: str, data: bytes) -> None:
    """A new file with these bytes, durable but for its name. Raises StorageError."""
    try:
        with open(path, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
    except OSError as error:
        raise from_os_error(error, "write", path, 0, len(data)) from error


def replace_file(path: str, data: bytes) -> None:
    """``path`` always holds all of ``data`` or what it held before; durable on return. Raises StorageError."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        _quietly(os.unlink, temporary)
        if isinstance(error, StorageError):
            raise
        raise from_os_error(error, "rename", temporary) from error
    fsync_directory(os.path.dirname(path) or ".")


def remove_tree(path: str) -> None:
    """Removes what a finished or failed write no longer needs. What cannot be removed stays: it is never read."""
    shutil.rmtree(path, ignore_errors=True)


def remove_empty_directory(path: str) -> None:
    """If it is empty; otherwise it stays."""
    _quietly(os.rmdir, path)


def _quietly(action: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(OSError):  # the first error is the one to report
        action(path)
