"""Puts an export, or the page of a report, in place. It has a temporary name until it is complete, and then gets its
own name in a single step."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zckpt.errors import CheckpointExistsError, UnsupportedError, first_few, from_os_error
from zckpt.listing.runs import refuse_in_checkpoint
from zckpt.storage import files
from zckpt.storage.location import Location
from zckpt.storage.process_names import remove_left_over, temporary
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
"""Patterns of the files with weights. Every exported directory has at least one of them."""
TORCH_FILE = (b"PK\3\4", b"/data.pkl")
"""Bytes that are near the beginning of every file that ``torch.save`` writes."""
_BEGINNING_BYTES = 4096
"""The number of bytes of a file in which its marks are looked for."""


class Place(NamedTuple):
    """The place of a new file or directory that is not a checkpoint. Rank 0 chooses it and tells the other ranks."""

    path: str
    """The absolute path of the file or directory once it is complete."""
    prepared: str
    """The temporary path of the file or directory until it is complete."""
    what: str
    """The name that errors use for the file or directory, such as "the export"."""
    overwrite: bool
    """Whether an earlier file or directory of the same kind may be replaced."""
    patterns: Sequence[str] | None = None
    """Patterns of the names of the files that the directory may have. None means that it is a file."""
    marks: Sequence[bytes] = ()
    """For a file, bytes that are near the beginning of every file of the same kind."""

    @classmethod
    def choose(
        cls,
        out: StrPath,
        what: str,
        *,
        overwrite: bool,
        patterns: Sequence[str] | None = None,
        marks: Sequence[bytes] = (),
    ) -> Place:
        """Returns the place for the path ``out``. If ``out`` is a symbolic link, the target of the link will be
        replaced. Raises UnsupportedError for a URL, and the errors of ``check``."""
        location = Location.of(out)
        if location.scheme:
            raise UnsupportedError(
                f"{what} can be written only to a file system", file=str(location), hint="give a path instead of a URL"
            )
        path = str(location.absolute())
        if os.path.islink(path):
            path = os.path.realpath(path)
        place = cls(path, temporary(path), what, overwrite, patterns, marks)
        place.check()
        return place

    @property
    def store(self) -> Store:
        """The temporary directory. For a file, it is the directory that contains the temporary file."""
        prepared = open_store(self.prepared)
        return prepared.parent if self.patterns is None else prepared

    def check(self) -> None:
        """Raises CheckpointExistsError unless something may be put here. Where something is already, ``overwrite``
        allows to replace an earlier one of the same kind: a file that has all ``marks`` near its beginning, or a
        directory that has weights and in which all files match ``patterns``."""
        path = self.path
        refuse_in_checkpoint(path)
        if not os.path.lexists(path):
            return
        if os.path.isdir(path) != (self.patterns is not None):
            there, this = ("a directory", "a file") if self.patterns is None else ("a file", "a directory")
            raise CheckpointExistsError(
                f"there is {there}, and {self.what} is {this}", file=path, hint="give another path"
            )
        if self.patterns is None:
            if not _has_marks(path, self.marks):
                raise CheckpointExistsError(
                    "there is a file of another kind", file=path,
                    hint="give a path at which nothing exists yet, or move the file away",
                )  # fmt: skip
        else:
            try:
                names = sorted(os.listdir(path))
            except OSError as error:
                raise from_os_error(error, "list", path) from error
            if not names:
                return
            foreign = [name for name in names if not _is_exported(path, name, self.patterns)]
            if foreign or not any(_matches(name, _WEIGHTS) for name in names):
                raise CheckpointExistsError(
                    f"the directory has files that no export has written: {first_few(foreign or names, 5)}", file=path,
                    hint="give a path at which nothing exists yet, or move these files away",
                )  # fmt: skip
        if not self.overwrite:
            raise CheckpointExistsError(
                "something is there already",
                file=path,
                hint="give another path, or `overwrite=True` (--overwrite) to replace it",
            )

    def begin(self) -> None:
        """Makes the directory of ``store``, and removes temporary files that dead processes have left beside the place.
        Raises StorageError."""
        remove_left_over(open_store(os.path.dirname(self.path)))
        self.store.make_directories("")

    def finish(self) -> None:
        """Renames the temporary file or directory to ``path``, where it replaces an earlier one. Raises StorageError,
        and the errors of ``check``, because another process may have put something there meanwhile. After an error,
        ``path`` is as it was before."""
        self.store.sync_names("")
        self.check()
        try:
            files.put_in_place(self.prepared, self.path)
        except OSError as error:
            raise from_os_error(error, "rename", self.prepared) from error
        try:
            open_store(os.path.dirname(self.path)).sync_names("")
        except BaseException:
            files.take_back(self.prepared, self.path)
            raise
        self.remove()

    def remove(self) -> None:
        """Removes what is at the temporary path. After ``finish``, this is what was at ``path`` before."""
        open_store(self.prepared).remove("")


def _is_exported(directory: str, name: str, patterns: Sequence[str]) -> bool:
    """Returns whether an export may have written this file. An export writes the code of a model only together with a
    configuration that names this code."""
    if not (os.path.isfile(os.path.join(directory, name)) and _matches(name, patterns)):
        return False
    config = Path(directory, "config.json")
    return not name.endswith(".py") or (config.is_file() and b'"auto_map"' in config.read_bytes())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _has_marks(path: str, marks: Sequence[bytes]) -> bool:
    if not os.path.isfile(path):  # Opening a pipe could block.
        return False
    try:
        with open(path, "rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    return all(mark in beginning for mark in marks)
