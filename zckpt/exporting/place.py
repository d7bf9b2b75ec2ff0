"""How an export appears: under a temporary name until it is whole, and then all at once."""

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
    """The absolute path of what is to be written: a directory if there are ``patterns``, else a file. ``overwrite``
    allows a file to be replaced, and a directory that has nothing but files whose names match ``patterns``.

    Raises CheckpointExistsError where something else is there, and UnsupportedError for a URL.
    """
    location = Location.of(out)
    if location.scheme:
        raise UnsupportedError("an export is written to a file system", file=str(location), hint="give a path")
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
            f"the directory has what no export has written: {first_few(foreign, 5)}", file=path,
            hint="give a path where nothing is yet, or move these away",
        )  # fmt: skip
    if not overwrite and found != []:
        raise CheckpointExistsError(
            "there is something already",
            file=path,
            hint="give another path, or `overwrite=True` (--overwrite) to replace it",
        )
    return path


def begin(path: str, *, directory: bool) -> str:
    """The temporary path that becomes ``path``; for a directory, it exists then. Raises StorageError."""
    prepared = names.temporary(path, secrets.token_hex(4))
    open_store(prepared if directory else os.path.dirname(path)).make_directories("")
    return prepared


def put_in_place(prepared: str, path: str) -> None:
    """Gives what was written its name, in the place of what is there. A directory that is replaced is moved aside
    first, and back if the other one cannot be moved. Raises StorageError."""
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
