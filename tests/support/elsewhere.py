"""A plugin of pytest that simulates macOS or Windows on Linux.

Before zckpt is imported, it takes away from the process what the other system does not have, as far as that can be
simulated::

    ZCKPT_TEST_SYSTEM=win32 python -m pytest -p tests.support.elsewhere @tests/elsewhere.txt

On both systems, zckpt may not use the C library, ``/proc``, direct I/O, ``preadv``, ``pwritev`` or ``os.kill``. (macOS
has some of these, but zckpt does without them there.) On macOS, there is no fsync of directories, and files are synced
by ``F_FULLFSYNC``. On Windows, there is no ``fcntl``, no ``resource``, no ``dir_fd=``, no flag of POSIX and no
positional I/O. The flags of POSIX include those of mmap. A directory cannot be opened, a file that is open cannot be
removed or replaced, and zckpt has to open every file with ``O_BINARY``. ``\\`` in paths, drives, names that Windows
reserves, its shares and rights, and the behaviour of other file systems are not simulated.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import shutil
import signal
import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SYSTEM = os.environ["ZCKPT_TEST_SYSTEM"]
FIRST = [
    "torch", "torch.distributed", "torch.utils.data", "numpy", "safetensors", "safetensors.numpy",
    "safetensors.torch", "xxhash", "msgpack", "zstandard", "tqdm", "hypothesis", "hypothesis.strategies",
    "unittest.mock", "subprocess", "multiprocessing.connection", "tempfile", "concurrent.futures.thread",
]  # fmt: skip
GONE = [
    "O_DIRECT", "preadv", "pwritev", "posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "eventfd",
    "memfd_create",
]  # fmt: skip
GONE_FROM_WINDOWS = [
    "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "pread", "pwrite", "readv", "writev", "statvfs",
    "fstatvfs", "sysconf", "fork", "mkfifo", "mknod", "getuid", "geteuid", "getgid", "getegid", "fchmod", "chown",
    "lchown", "fchown", "getpgid", "setsid", "nice", "getloadavg",
]  # fmt: skip
O_BINARY = 0x8000
F_FULLFSYNC = 51
if SYSTEM == "win32":  # already here, because conftest.py is imported before ``pytest_collection`` runs
    sys.modules["fcntl"] = sys.modules["resource"] = None  # type: ignore[assignment]


def is_zckpts(depth: int = 2) -> bool:
    """Returns whether zckpt has called the function that calls this one."""
    return str(sys._getframe(depth).f_globals.get("__name__")).startswith("zckpt")


def of_zckpt(call: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is ``instead`` when zckpt calls it, and ``call`` for all other callers."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return (instead if is_zckpts() else call)(*args, **kwargs)

    return called


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError(f"called with {args} {kwargs}, as it must not be on {SYSTEM}")


def outside_of_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``call``, which must not be called with a path that only Linux has."""
    return lambda path: never(path) if str(path).startswith("/proc/") else call(path)


def without_proc(event: str, args: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])


def is_open(path: Any) -> bool:
    """Returns whether this process has the file of this name open."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and any(is_same(fd, status) for fd in range(3, 256))


def is_same(fd: int, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), status)
    except OSError:
        return False


def unless_open(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*paths: Any, **kwargs: Any) -> Any:
        if any(map(is_open, paths)):
            raise PermissionError(errno.EACCES, "The process cannot access the file", paths[0])
        return call(*paths, **kwargs)

    return checked


def become_macos() -> None:
    import fcntl

    fcntl.F_FULLFSYNC = F_FULLFSYNC  # type: ignore[attr-defined]
    real_fcntl, real_fsync = fcntl.fcntl, os.fsync

    unsynced: set[int] = set()

    def full_sync(fd: int, command: int) -> None:
        assert command == F_FULLFSYNC
        if stat.S_ISDIR(os.fstat(fd).st_mode) or fd % 3 == 0:  # some files are as on a file system without F_FULLFSYNC
            unsynced.add(fd)
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        real_fsync(fd)

    def sync(fd: int) -> None:
        assert fd in unsynced, "F_FULLFSYNC was not tried"
        unsynced.discard(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real_fsync(fd)

    fcntl.fcntl = of_zckpt(real_fcntl, full_sync)
    fcntl.ioctl = of_zckpt(fcntl.ioctl, never)
    os.fsync = of_zckpt(real_fsync, sync)


def become_windows() -> None:
    os.environ.setdefault("USERNAME", "nobody")  # Windows sets it, and pytest asks for it
    statvfs = os.statvfs

    def disk_usage(path: Any) -> Any:  # shutil's own would call Windows' functions
        status = statvfs(path)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        return shutil._ntuple_diskusage(total, total - free, free)

    shutil.disk_usage = disk_usage
    for name in GONE_FROM_WINDOWS:
        delattr(os, name)
    del signal.SIGKILL, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
    os.O_BINARY = O_BINARY  # type: ignore[attr-defined]
    real_open = os.open

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if os.path.isdir(path):
            code = errno.EEXIST if flags & os.O_EXCL else errno.EACCES
            raise OSError(code, os.strerror(code), path)
        assert flags & O_BINARY or not is_zckpts(), f"{path} is opened as text"
        return real_open(path, flags & ~O_BINARY, mode)

    os.open = opened
    real_utime = os.utime

    def by_name(path: Any, *args: Any, **kwargs: Any) -> None:
        assert not isinstance(path, int), "Windows takes names alone"
        real_utime(path, *args, **kwargs)

    os.utime = by_name
    for name in ("unlink", "remove", "rename", "replace"):
        setattr(os, name, unless_open(getattr(os, name)))
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    for name in FIRST:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.startswith("zckpt")], "zckpt was imported too early"
    for name in GONE:
        if hasattr(os, name):
            delattr(os, name)
    ctypes.CDLL = of_zckpt(ctypes.CDLL, never)  # type: ignore[misc,assignment]
    os.kill = of_zckpt(os.kill, never)
    os.readlink = of_zckpt(os.readlink, outside_of_proc(os.readlink))
    {"darwin": become_macos, "win32": become_windows}[SYSTEM]()
    sys.addaudithook(without_proc)
    sys.platform = SYSTEM
