"""Every error that zckpt raises.

    ZckptError
    ├── CheckpointNotFoundError      (FileNotFoundError)   nothing there that could be opened
    │   └── UnfinishedWriteError                           data without a manifest: a write that never committed
    ├── CheckpointExistsError        (FileExistsError)     a write would replace a checkpoint
    ├── LockedError                  (BlockingIOError)     another process is writing the same checkpoint
    ├── FormatError                  (ValueError)          bytes that break a rule of the specification
    │   ├── VersionError                                   written by a newer format version
    │   ├── FeatureError                                   needs a feature that this reader does not know
    │   ├── MissingFileError                               the manifest names a file that is not there
    │   ├── SizeError                                      a file is shorter or longer than recorded
    │   └── DigestError                                    bytes differ from their recorded digest
    ├── RepairError                  (RuntimeError)        a checkpoint cannot be rebuilt from what is there
    ├── KeyNotFoundError             (KeyError)            no such key; names the nearest ones
    ├── CastError                    (TypeError)           a dtype that cannot be converted without nonsense
    ├── StateError                   (TypeError)           a value that the state tree cannot hold
    ├── OffloadedError               (RuntimeError)        state that a call needs is on disk, or was lost there
    ├── DeviceError                  (RuntimeError)        a device that is not there, fails, or is full
    ├── UnsupportedError             (NotImplementedError) an engine or mode that is not supported, by name
    ├── MismatchError                (ValueError)          engine and checkpoint do not fit; lists everything
    ├── RankError                    (RuntimeError)        another rank failed, or the ranks disagree
    │   └── TagError                 (AssertionError)      the ranks save under different tags
    └── StorageError                 (OSError)             the operating system refused a read or a write
        └── NoSpaceError                                   no space, quota or file size limit reached

Each also derives from the builtin a caller would expect. Each carries, where they are known, ``file``, ``key``,
``start``/``stop`` (a half-open byte range of ``file``), ``rule`` (an id from ``spec/``), ``rank`` and ``hint`` (what to
do).
"""

from __future__ import annotations

import errno
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ZckptError(Exception):
    """Base of every error that zckpt raises on purpose."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        start: int | None = None,
        stop: int | None = None,
        rule: str | None = None,
        rank: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.file = file
        self.key = key
        self.start = start
        self.stop = stop
        self.rule = rule
        self.rank = rank
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        facts = [
            ("rule", self.rule),
            ("file", self.file),
            ("bytes", f"[{self.start}, {self.stop})" if self.start is not None else None),
            ("key", self.key),
            ("rank", self.rank),
        ]
        known = ", ".join(f"{name} {value}" for name, value in facts if value is not None)
        text = f"{self.message} ({known})" if known else self.message
        return f"{text}\n  {self.hint}" if self.hint else text


class CheckpointNotFoundError(ZckptError, FileNotFoundError):
    """Nothing that could be opened at this path."""


class UnfinishedWriteError(CheckpointNotFoundError):
    """Data of a write that never committed: there is no manifest."""


class CheckpointExistsError(ZckptError, FileExistsError):
    """A checkpoint is already at this path and ``overwrite`` was not asked for."""


class LockedError(ZckptError, BlockingIOError):
    """Another process is writing the same checkpoint."""


class FormatError(ZckptError, ValueError):
    """Bytes that break a rule of the specification."""


class VersionError(FormatError):
    """A format version that this reader does not know."""


class FeatureError(FormatError):
    """A required feature that this reader does not know."""


class MissingFileError(FormatError):
    """The manifest names a file that is not there."""


class SizeError(FormatError):
    """A file is shorter or longer than recorded."""


class DigestError(FormatError):
    """Bytes differ from their recorded digest."""


class RepairError(ZckptError, RuntimeError):
    """A checkpoint cannot be rebuilt from what is there; the message lists every reason."""


class KeyNotFoundError(ZckptError, KeyError):
    """No such key in the checkpoint."""

    __str__ = ZckptError.__str__  # KeyError would show the repr


class CastError(ZckptError, TypeError):
    """A dtype conversion that makes no sense, such as float to bool."""


class StateError(ZckptError, TypeError):
    """A value that the state tree cannot hold; ``key`` is the path to it."""


class OffloadedError(ZckptError, RuntimeError):
    """A call needs state of the engine that ``zckpt.offload`` has moved to disk, or that was lost there."""


class DeviceError(ZckptError, RuntimeError):
    """A device that does not exist, that bytes cannot be copied to and from, or that has too little memory; or host
    memory that cannot be pinned for the copies."""


class UnsupportedError(ZckptError, NotImplementedError):
    """An engine, optimizer or mode that zckpt does not support, by name."""


class MismatchError(ZckptError, ValueError):
    """Engine and checkpoint do not fit; the message lists every difference."""


class RankError(ZckptError, RuntimeError):
    """Another rank failed, or the ranks disagree."""


class TagError(RankError, AssertionError):
    """The ranks save one checkpoint under different tags. DeepSpeed raises an AssertionError then, so this is one."""


class StorageError(ZckptError, OSError):
    """The operating system refused a read or a write; ``__cause__`` is its error."""


class NoSpaceError(StorageError):
    """No space left, quota exceeded, or a file size limit reached."""


def warn(message: str) -> None:
    """Gives a UserWarning whose place is the line outside of zckpt that has called zckpt."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "zckpt":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def count(number: int, what: str) -> str:
    """Returns a number of things for a message, such as ``1 tensor`` and ``3,000 tensors``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def first_few(things: Sequence[object], count: int, rest: str = " and {} more") -> str:
    """At most ``count`` of ``things``, for a message. If there are more, ``rest`` follows, with their number."""
    return ", ".join(map(str, things[:count])) + (rest.format(len(things) - count) if len(things) > count else "")


OPEN_FILES_HINT = (
    "this process has as many files and connections open as it may: raise its limit (`ulimit -n 65536`, or nofile in "
    "/etc/security/limits.conf) before the job starts; a rank needs one for every other rank"
)

_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_os_error(
    error: OSError, doing: str, file: str, start: int | None = None, stop: int | None = None
) -> StorageError:
    """The ``StorageError`` for an ``OSError`` met while ``doing`` ("write", "fsync", ...) at ``file``."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return NoSpaceError(
            f"cannot {doing}: {reason}",
            file=file,
            start=start,
            stop=stop,
            hint="free space or write elsewhere; no checkpoint was changed",
        )
    hint = OPEN_FILES_HINT if error.errno in _TOO_MANY_FILES else None
    return StorageError(f"cannot {doing}: {reason}", file=file, start=start, stop=stop, hint=hint)
