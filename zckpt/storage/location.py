"""Where something lies: a path of this machine's file systems, or a path behind a scheme, as in ``s3://bucket/run``."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType

StrPath = str | os.PathLike[str]

_WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL | re.IGNORECASE)
"""A scheme has two characters or more: ``C:`` is a drive of Windows."""
_WITH_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]", re.IGNORECASE)
"""What ``pathlib`` makes of a path behind a scheme."""


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a run, of a checkpoint, or of a file in it. ``str()`` of it is what the user would give.

    All but ``resolved`` are operations on text alone. Nothing is changed in a path behind a scheme but that components
    are added and taken away at its end.
    """

    scheme: str
    """Which store it belongs to, by the table in ``zckpt.storage.schemes``. Empty for a path of a file system."""
    path: str

    @staticmethod
    def of(given: StrPath) -> Location:
        """Raises TypeError for what is no path, ValueError for an empty one, and UnsupportedError for a ``Path`` that
        may have been made from a URL."""
        text: object = os.fspath(given)
        if not isinstance(text, str):
            raise TypeError(f"a path must be a str or a Path, got {type(text).__name__}")
        if not text:
            raise ValueError("the path is empty; the current directory is '.'")
        if isinstance(given, PurePath) and _WITH_LOST_SLASH.match(text):
            raise UnsupportedError(
                f"{text!r} looks like a URL, of which pathlib has taken a slash away",
                hint="give a URL, or a directory of that name, as a string",
            )
        found = _WITH_SCHEME.fullmatch(text)
        return Location(*found.groups()) if found else Location("", text)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else self.path

    def child(self, path: str) -> Location:
        """What has this path, with ``/`` between its components, below this one; the empty path is this one itself."""
        return Location(self.scheme, self._paths.join(self.path, path)) if path else self

    @property
    def parent(self) -> Location:
        """The directory that this lies in; of the topmost one, itself."""
        above = self._paths.dirname(self._without_end)
        return Location(self.scheme, above if above or self.scheme else os.curdir)

    @property
    def name(self) -> str:
        """The last component."""
        return str(self._paths.basename(self._without_end))

    def absolute(self) -> Location:
        """The same place, whatever the current directory is; equal for two ways to write one path."""
        return Location(self.scheme, self._without_end if self.scheme else os.path.abspath(self.path))

    def resolved(self) -> Location:
        """The same place, with every link on the way followed, where it can have links."""
        return self.absolute() if self.scheme else Location("", os.path.realpath(self.path))

    def path_from(self, above: Location) -> str:
        """Its path relative to ``above``, with ``/`` between the components: ``.`` for the same place, and with ``..``
        where it does not lie in it. Where no relative path leads there, it is all of this one."""
        try:
            if self.scheme == above.scheme:
                return str(self._paths.relpath(self.path or os.curdir, above.path)).replace(self._paths.sep, "/")
        except ValueError:  # two drives of Windows
            pass
        return str(self)

    @property
    def _paths(self) -> ModuleType:
        return posixpath if self.scheme else os.path

    @property
    def _without_end(self) -> str:
        """The path without what may stand behind its last component."""
        seps = "/" if self.scheme else os.sep + (os.altsep or "")
        return self.path.rstrip(seps) or self.path
