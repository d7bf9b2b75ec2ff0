"""Puts an export in its place: it has a temporary name until it is whole, and gets its own name in a single step."""

from __future__ import annotations

import fnmatch
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointExistsError, UnsupportedError, first_few, from_os_error
from zckpt.format import names
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.storage.location import StrPath


def find_place(out: StrPath, patterns: Sequence[str] | None, overwrite: bool) -> str:
    """Returns the absolute path of the export. The export is a directory if ``patterns`` is given, and a file
    otherwise. ``overwrite`` allows it to replace a file, or a directory in which all files match ``patterns``.

    Raises CheckpointExistsError where something else is there, and UnsupportedError for a URL.
    """
    location = Location.of(out)
    if location.scheme:
        raise UnsupportedError(
            "an export can be written only to a file system", file=str(location), hint="give a path instead of a URL"
        )
    path = str(location.absolute())
    try:
        found = os.listdir(path) if os.path.isdir(path) else None
    except OSError as error:
        raise from_os_error(error, "list", path) from error
    if found is None and not os.path.lexists(path):
        return path
    if (found is None) != (patterns is None):
        there, export_is = ("a directory", "a file") if patterns is None else ("a file", "a directory")
        raise CheckpointExistsError(
            f"there is {there}, and the export is {export_is}", file=path, hint="give another path"
        )
    foreign = [
        name
        for name in sorted(found or ())
        if not os.path.isfile(os.path.join(path, name))
        or not any(fnmatch.fnmatch(name, pattern) for pattern in patterns or ())
    ]
    if foreign:
        raise CheckpointExistsError(
            f"the directory has files that no export has written: {first_few(foreign, 5)}", file=path,
            hint="give a path at which nothing exists yet, or move these files away",
        )  # fmt: skip
    if not overwrite and found != []:
        raise CheckpointExistsError(
            "something is there already",
            file=path,
            hint="give another path, or `overwrite=True` (--overwrite) to replace it",
        )
    return path


def begin(path: str, *, directory: bool) -> str:
    """Returns the temporary path that later becomes ``path``. If it is to be a directory, it is made. Raises
    StorageError."""
    prepared = names.temporary(path, secrets.token_hex(4))
    open_store(prepared if directory else os.path.dirname(path)).make_directories("")
    return prepared


def put_in_place(prepared: str, path: str) -> None:
    """Renames what was written to ``path``, where it replaces what is there. A directory that is replaced is moved
    aside first, and is moved back if the new one cannot be renamed. Raises StorageError."""
    aside = names.temporary(path, secrets.token_hex(4))
    try:
        if os.path.isdir(path):
            os.rename(path, aside)
        try:
            os.replace(prepared, path)
        except OSError:
            if os.path.isdir(aside):
                os.rename(aside, path)
            raise
    except OSError as error:
        raise from_os_error(error, "rename", prepared) from error
    open_store(os.path.dirname(path)).sync_names("")
    shutil.rmtree(aside, ignore_errors=True)
