"""Every error class of zckpt.

    ZckptError
    ├── CheckpointNotFoundError      (FileNotFoundError)   there is no checkpoint at the path
    │   └── UnfinishedWriteError                           there are data, but no manifest
    ├── CheckpointExistsError        (FileExistsError)     a write would replace a checkpoint
    ├── LockedError                  (BlockingIOError)     another process is writing the same checkpoint
    ├── FormatError                  (ValueError)          a checkpoint breaks a rule of the specification
    │   ├── VersionError                                   it has a major version that this reader does not know
    │   ├── FeatureError                                   it requires a feature that this reader does not know
    │   ├── MissingFileError                               a file that the manifest implies does not exist
    │   ├── SizeError                                      a file is shorter or longer than it must be
    │   └── DigestError                                    bytes differ from their recorded digest
    ├── RepairError                  (RuntimeError)        a checkpoint cannot be rebuilt from the files that are left
    ├── KeyNotFoundError             (KeyError)            the checkpoint has no tensor with this key
    ├── CastError                    (TypeError)           the conversion between two dtypes makes no sense
    ├── StateError                   (TypeError)           a value or a tensor cannot be kept in a checkpoint
    ├── OffloadedError               (RuntimeError)        a call needs state that is on disk, or was lost there
    ├── DeviceError                  (RuntimeError)        a device does not exist, fails or is full
    ├── UnsupportedError             (NotImplementedError) zckpt does not support an engine or one of its modes
    ├── MismatchError                (ValueError)          engine and checkpoint do not fit each other
    ├── RankError                    (RuntimeError)        another rank failed, or the ranks disagree
    │   └── TagError                 (AssertionError)      the ranks save under different tags
    └── StorageError                 (OSError)             the operating system refused to read or write
        └── NoSpaceError                                   the disk is full, or a quota or file size limit is reached

In brackets is the builtin exception that the class also derives from, so that callers can catch that.
"""

from __future__ import annotations

import errno
import re
import sys
import warnings
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class ZckptError(Exception):
    """The base class of every error that zckpt raises on purpose.

    ``str(error)`` contains the message, those of the attributes below that are known, and the hint, as far as they are
    printable. A rank that the message names already is not repeated. An attribute is None if it is not known.
    """

    message: str
    """What went wrong."""
    file: str | None
    """The path of the file that the error is about."""
    key: str | None
    """The key of the tensor that the error is about, or the path to a value in a state tree."""
    start: int | None
    """The first byte of ``file`` that the error is about, counted from 0."""
    stop: int | None
    """The byte of ``file`` behind the last one that the error is about."""
    rule: str | None
    """The id of the rule of the specification that is broken, such as ``"D003"``."""
    rank: int | None
    """The rank that the error is about."""
    hint: str | None
    """What the user can do."""

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
        names_rank = re.search(rf"\brank {self.rank}\b", self.message)
        facts = [
            ("rule", self.rule),
            ("file", self.file),
            ("bytes", f"[{self.start}, {self.stop})" if self.start is not None else None),
            ("key", self.key),
            ("rank", None if names_rank else self.rank),
        ]
        known = ", ".join(f"{name} {printable(str(value))}" for name, value in facts if value is not None)
        text = f"{self.message} ({known})" if known else self.message
        return printable(f"{text}\n  {self.hint}" if self.hint else text, keep="\n")


class CheckpointNotFoundError(ZckptError, FileNotFoundError):
    """There is no checkpoint at this path."""


class UnfinishedWriteError(CheckpointNotFoundError):
    """There are data at this path, but no manifest: a write has not committed, or the manifest was lost."""


class CheckpointExistsError(ZckptError, FileExistsError):
    """There is a checkpoint at this path already, and the caller has not asked to overwrite it."""


class LockedError(ZckptError, BlockingIOError):
    """Another process is writing the same checkpoint."""


class FormatError(ZckptError, ValueError):
    """A checkpoint breaks a rule of the specification. ``rule`` is the id of the rule."""


class VersionError(FormatError):
    """A checkpoint has a major version of the format that this version of zckpt does not know."""


class FeatureError(FormatError):
    """A checkpoint requires a feature of the format that this version of zckpt does not know."""


class MissingFileError(FormatError):
    """A file that the manifest implies does not exist."""


class SizeError(FormatError):
    """A file is shorter or longer than the manifest or the specification says."""


class DigestError(FormatError):
    """Bytes of a checkpoint differ from their recorded digest, so they are damaged."""


class RepairError(ZckptError, RuntimeError):
    """A checkpoint cannot be rebuilt from the files that are left. The message lists every reason."""


class KeyNotFoundError(ZckptError, KeyError):
    """The checkpoint has no tensor with this key. The hint names the nearest keys."""

    __str__ = ZckptError.__str__  # KeyError's own method returns the repr of the message.


class CastError(ZckptError, TypeError):
    """A conversion between two dtypes makes no sense, such as one from float to bool."""


class StateError(ZckptError, TypeError):
    """A value cannot be kept in a tree of state, or the values of a tensor are not in its memory. ``key`` is the path
    to the value, or the key of the tensor."""


class OffloadedError(ZckptError, RuntimeError):
    """A call needs state of the engine that ``zckpt.offload`` has moved to disk, or that was lost there."""


class DeviceError(ZckptError, RuntimeError):
    """A device does not exist, has too little memory, or refuses copies to or from it; or host memory cannot be pinned
    for such copies."""


class UnsupportedError(ZckptError, NotImplementedError):
    """zckpt does not support an engine, an optimizer or a mode. The message names it."""


class MismatchError(ZckptError, ValueError):
    """What was asked for does not fit the checkpoint, such as an engine of another model, a slice of another shape, or
    memory of another size. The message names the differences, or the first few of them."""


class RankError(ZckptError, RuntimeError):
    """Another rank failed, or the ranks disagree about what they do."""


class TagError(RankError, AssertionError):
    """The ranks save one checkpoint under different tags. It is an AssertionError because DeepSpeed raises one then."""


class StorageError(ZckptError, OSError):
    """The operating system or a server refused to read or write a file. ``__cause__`` is its error."""

    transient = False
    """Whether the store could not be reached for the moment, so that to try again later can help."""


class NoSpaceError(StorageError):
    """There is no space left on the disk, or a quota or a limit for the size of files is reached."""


def warn(message: str) -> None:
    """Issues a UserWarning. Its place is the line of the caller's code that has called zckpt."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "zckpt":
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message, keep="\n"), stacklevel=level)


def printable(text: str, keep: str = "") -> str:
    """Returns a text in which every character that is neither printable nor in ``keep`` is replaced by its escape
    sequence in Python, such as ``\\n``. A checkpoint may come from a stranger, who could hide terminal commands in the
    names in it. A name may also have bytes that are not UTF-8, which most streams refuse."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def count(number: int, what: str) -> str:
    """Returns a number of things for a message, such as ``1 tensor`` and ``3,000 tensors``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def first_few(things: Sequence[object], count: int, rest: str = " and {} more") -> str:
    """Returns the first ``count`` of ``things`` for a message, separated by commas, as far as they are printable.

    If there are more of them, ``rest`` follows. Their number takes the place of ``{}`` in it.
    """
    return ", ".join(printable(str(thing)) for thing in things[:count]) + (
        rest.format(len(things) - count) if len(things) > count else ""
    )


def did_you_mean(given: str, accepted: Iterable[str]) -> str:
    """Returns a question for the end of a message about a wrong name. It is empty if no accepted name is similar."""
    similar = get_close_matches(given, [*accepted], 1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def refuse_unknown(call: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises TypeError, as Python does, if the call does not have one of the arguments that were given by name."""
    for name in given:
        if name not in known:
            raise TypeError(f"{call} has no {name}{did_you_mean(name, known)}: it has {', '.join(known)}")


def check_flags(**flags: object) -> None:
    """Raises TypeError for an argument that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


OPEN_FILES_HINT = (
    "this process has as many files and connections open as it may: raise its limit (`ulimit -n 65536`, or nofile in "
    "/etc/security/limits.conf) before the job starts; a rank needs up to 70 connections for messages, "
    "as many again for each of writes in the background and copies (copy_to), and one for every other rank while ranks "
    "send each other tensors"
)

_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


_NOT_ALLOWED = "this process may not do that there: look at the owner and the permissions (`ls -ld`)"
_HINTS = {
    errno.EROFS: "this file system is mounted for reading only: choose a path elsewhere",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EEXIST: "something else has this name already: choose another path",
    errno.ENOTDIR: "a file is in the place of a directory: choose another path",
}
"""For each of these errors of the operating system, by its number in ``errno``, what a user can do about it."""


def from_os_error(
    error: OSError, doing: str, file: str, start: int | None = None, stop: int | None = None
) -> StorageError:
    """Returns the StorageError for an OSError. ``doing`` says what was refused, such as "write" or "fsync"."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return NoSpaceError(
            f"cannot {doing}: {reason}",
            file=file,
            start=start,
            stop=stop,
            hint="free space or write elsewhere; no checkpoint was changed",
        )
    hint = OPEN_FILES_HINT if error.errno in _TOO_MANY_FILES else _HINTS.get(error.errno or 0)
    return StorageError(f"cannot {doing}: {reason}", file=file, start=start, stop=stop, hint=hint)
