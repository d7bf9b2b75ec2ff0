"""Puts an export in its place: it has a temporary name until it is whole, and gets its own name in a single step."""

from __future__ import annotations

import fnmatch
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import CheckpointExistsError, UnsupportedError, first_few, from_os_error
from zckpt.format import names
from zckpt.listing.runs import refuse_in_checkpoint
from zckpt.storage import files
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.storage.location import StrPath

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
"""An export that is a directory has at least one of these files."""
TORCH_FILE = (b"PK\3\4", b"/data.pkl")
"""These are near the beginning of every file that ``torch.save`` writes."""
_BEGINNING_BYTES = 4096


def choose_place(
    out: StrPath, patterns: Sequence[str] | None, overwrite: bool, marks: Sequence[bytes] = TORCH_FILE
) -> tuple[str, str]:
    """Returns the absolute path of the export and the temporary path that it has until it is whole. If ``out`` is a
    link, the export replaces what the link leads to. Raises UnsupportedError for a URL, and what ``check_place``
    raises."""
    location = Location.of(out)
    if location.scheme:
        raise UnsupportedError(
            "an export can be written only to a file system", file=str(location), hint="give a path instead of a URL"
        )
    path = str(location.absolute())
    if os.path.islink(path):
        path = os.path.realpath(path)
    check_place(path, patterns, overwrite, marks)
    return path, names.temporary(path, secrets.token_hex(4))


def check_place(
    path: str, patterns: Sequence[str] | None, overwrite: bool, marks: Sequence[bytes] = TORCH_FILE
) -> None:
    """Raises CheckpointExistsError unless an export may be put at ``path``. The export is a directory if ``patterns``
    is given, and a file otherwise. ``overwrite`` allows it to replace an earlier export: a file that has all ``marks``
    near its beginning, or a directory that has weights and in which all files match ``patterns``."""
    refuse_in_checkpoint(path)
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) != (patterns is not None):
        there, export_is = ("a directory", "a file") if patterns is None else ("a file", "a directory")
        raise CheckpointExistsError(
            f"there is {there}, and the export is {export_is}", file=path, hint="give another path"
        )
    if patterns is None:
        if not _has_marks(path, marks):
            raise CheckpointExistsError(
                "there is a file of another kind", file=path,
                hint="give a path at which nothing exists yet, or move the file away",
            )  # fmt: skip
    else:
        try:
            found = sorted(os.listdir(path))
        except OSError as error:
            raise from_os_error(error, "list", path) from error
        if not found:
            return
        foreign = [name for name in found if not _is_exported(path, name, patterns)]
        if foreign or not any(_matches(name, _WEIGHTS) for name in found):
            raise CheckpointExistsError(
                f"the directory has files that no export has written: {first_few(foreign or found, 5)}", file=path,
                hint="give a path at which nothing exists yet, or move these files away",
            )  # fmt: skip
    if not overwrite:
        raise CheckpointExistsError(
            "something is there already",
            file=path,
            hint="give another path, or `overwrite=True` (--overwrite) to replace it",
        )


def _is_exported(directory: str, name: str, patterns: Sequence[str]) -> bool:
    """Whether an export may have written this file. The code of a model is exported only with a configuration that
    names it."""
    if not (os.path.isfile(os.path.join(directory, name)) and _matches(name, patterns)):
        return False
    config = Path(directory, "config.json")
    return not name.endswith(".py") or (config.is_file() and b'"auto_map"' in config.read_bytes())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _has_marks(path: str, marks: Sequence[bytes]) -> bool:
    if not os.path.isfile(path):  # to open a pipe could block
        return False
    try:
        with open(path, "rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    return all(mark in beginning for mark in marks)


def begin(prepared: str, *, directory: bool) -> None:
    """Makes the directory that is prepared, or the one in which a file is prepared. Raises StorageError."""
    open_store(prepared if directory else os.path.dirname(prepared)).make_directories("")


def put_in_place(prepared: str, path: str) -> None:
    """Renames what was written to ``path``, where it replaces what is there. Raises StorageError; then what was there
    is there again."""
    try:
        files.put_in_place(prepared, path)
    except OSError as error:
        raise from_os_error(error, "rename", prepared) from error
    try:
        open_store(os.path.dirname(path)).sync_names("")
    except BaseException:
        files.take_back(prepared, path)
        raise
    open_store(prepared).remove("")
