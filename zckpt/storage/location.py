"""The place of a file or directory: a path of this machine's file systems, or a path behind a scheme, as in
``s3://bucket/run``."""

from __future__ import annotations

import os
import posixpath
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType

StrPath = str | os.PathLike[str]

_WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL | re.IGNORECASE)
"""Matches a path with a scheme. A scheme has two characters or more, because ``C:`` is a drive of Windows."""
_WITH_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]", re.IGNORECASE)
"""Matches the text that ``pathlib`` makes of a path with a scheme: one of the two slashes is missing."""

_OBJECT_STORE_WITH_LOST_SLASH = re.compile(r"(s3|gs|az|https?):/(?!/)", re.IGNORECASE)
"""Matches a URL of an object store or a web server in which one of the two slashes is missing."""

_OF_WINDOWS = re.compile(r"[a-z]:[/\\]|\\\\", re.IGNORECASE)
"""Matches an absolute path of Windows, which begins with a drive or the name of a host. Elsewhere, it would be the name
of a directory in the working directory."""


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a run, of a checkpoint, or of a file in it. ``str(location)`` is the text that a user would pass.

    All methods except ``resolved`` only change text. A path behind a scheme is never changed, except that components
    are added or removed at its end.
    """

    scheme: str
    """The scheme, which says which store the location belongs to, by the table in ``zckpt.storage.schemes``. It is
    empty for a path of a file system."""
    path: str

    @staticmethod
    def of(path: StrPath) -> Location:
        """Returns the location of a path that a user has passed. Raises TypeError for a value that is not a path,
        ValueError for an empty path, and UnsupportedError for a ``Path`` that may have been made from a URL, and for an
        absolute path of Windows on another system."""
        text: object = os.fspath(path) if hasattr(path, "__fspath__") else path
        if not isinstance(text, str):
            raise TypeError(f"a path must be a str or a Path, got {type(text).__name__}")
        if not text:
            raise ValueError("the path is empty; the current directory is '.'")
        if isinstance(path, PurePath) and _WITH_LOST_SLASH.match(text):
            raise UnsupportedError(
                f"{text!r} looks like a URL, of which pathlib has taken a slash away",
                hint="give a URL, or a directory of that name, as a string",
            )
        if _OBJECT_STORE_WITH_LOST_SLASH.match(text):
            raise UnsupportedError(
                f"{text!r} looks like a URL that lacks a slash",
                hint=f"give {text.replace(':/', '://', 1)!r}; a directory of this name is {f'./{text}'!r}",
            )
        if text == "~" or text.startswith("~/"):
            raise UnsupportedError(
                f"{text!r} begins with a tilde, which only a shell replaces by the home directory",
                hint=f"give os.path.expanduser({text!r}); a directory of this name is {f'./{text}'!r}",
            )
        if os.sep == "/" and _OF_WINDOWS.match(text):
            raise UnsupportedError(
                f"{text!r} is a path of Windows, and this is another system",
                hint=f"give a path of this system; a directory of this name is {f'./{text}'!r}",
            )
        match = _WITH_SCHEME.fullmatch(text)
        return Location(match[1].lower(), match[2]) if match else Location("", text)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else self.path

    def child(self, path: str) -> Location:
        """Returns the location ``path`` below this one. ``path`` has ``/`` between its components. For the empty path
        it is this location itself."""
        return Location(self.scheme, self._paths.join(self.path, path)) if path else self

    @property
    def parent(self) -> Location:
        """The directory that contains this location. The parent of ``/``, and of a scheme without a path, is the
        location itself."""
        directory = self._paths.dirname(self._without_end)
        return Location(self.scheme, directory if directory or self.scheme else os.curdir)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return str(self._paths.basename(self._without_end))

    def absolute(self) -> Location:
        """Returns the same place with a path that does not depend on the current directory. It is equal for two ways to
        write one path, as long as no links are involved."""
        return Location(self.scheme, self._without_end if self.scheme else os.path.abspath(self.path))

    def resolved(self) -> Location:
        """Returns the same place with every link in its path followed. Only paths of file systems have links."""
        return self.absolute() if self.scheme else Location("", os.path.realpath(self.path))

    def path_from(self, directory: Location) -> str:
        """Returns the path relative to ``directory``, with ``/`` between the components. It is ``.`` for the same
        place, and begins with ``..`` if this location is not below ``directory``. If no relative path leads from
        ``directory`` to this location, returns the whole location as text."""
        with suppress(ValueError):  # two drives of Windows
            if self.scheme == directory.scheme:
                return str(self._paths.relpath(self.path or os.curdir, directory.path)).replace(self._paths.sep, "/")
        return str(self)

    @property
    def _paths(self) -> ModuleType:
        return posixpath if self.scheme else os.path

    @property
    def _without_end(self) -> str:
        """The path without the slashes after its last component."""
        seps = "/" if self.scheme else os.sep + (os.altsep or "")
        return self.path.rstrip(seps) or self.path
