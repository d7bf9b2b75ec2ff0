"""Puts an export, a checkpoint in DeepSpeed's own format, or the page of a report in place. It has a temporary name
until it is complete, and then gets its own name in a single step."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zckpt.errors import CheckpointExistsError, UnsupportedError, first_few, from_os_error
from zckpt.listing.runs import refuse_in_checkpoint
from zckpt.storage import files
from zckpt.storage.local_store import make_directories
from zckpt.storage.location import Location
from zckpt.storage.process_names import remove_left_over, temporary
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors", "*_states.pt")
"""Patterns of the files with weights. Every directory that is written has at least one of them."""
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
    """What errors call the file or directory, such as "export"."""
    overwrite: bool
    """Whether an earlier file or directory of the same kind may be replaced."""
    patterns: Sequence[str] | None
    """Patterns of the paths of the files that the directory may have. None means that it is a file."""
    marks: Sequence[bytes]
    """For a file, bytes that are near the beginning of every file of the same kind."""
    made: list[str]
    """The directories that ``begin`` has made, the innermost first."""

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
                f"the {what} can be written only to a file system",
                file=str(location),
                hint="give a path instead of a URL",
            )
        path = str(location.absolute())
        if os.path.islink(path):
            path = os.path.realpath(path)
        place = cls(path, temporary(path), what, overwrite, patterns, marks, [])
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
                f"there is {there}, and the {self.what} is {this}", file=path, hint="give another path"
            )
        if self.patterns is None:
            if not _has_marks(path, self.marks):
                raise CheckpointExistsError(
                    "there is a file of another kind", file=path,
                    hint="give a path at which nothing exists yet, or move the file away",
                )  # fmt: skip
        else:
            try:
                names, has_code = sorted(os.listdir(path)), _has_code(path)
                foreign = [*_foreign(path, [name for name in self.patterns if has_code or not name.endswith(".py")])]
            except OSError as error:
                raise from_os_error(error, "list", path) from error
            if not names:
                return
            if foreign or not any(fnmatch(name, pattern) for name in names for pattern in _WEIGHTS):
                if foreign:
                    why = f"the directory has files that no {self.what} has: {first_few(foreign, 5)}"
                else:
                    why = f"the directory has no weights, so no {self.what} has made it: {first_few(names, 5)}"
                raise CheckpointExistsError(
                    why, file=path,
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
        remove_left_over(os.path.dirname(self.path))
        make_directories(self.store.location.path, self.made)

    def finish(self, then: Callable[[], None] = lambda: None) -> None:
        """Renames the temporary file or directory to ``path``, where it replaces an earlier one, and calls ``then``.
        Raises StorageError, what ``then`` raises, and the errors of ``check``, because another process may have put
        something there meanwhile. After an error, ``path`` is as it was before."""
        self.store.sync_names("")
        self.check()
        try:
            files.put_in_place(self.prepared, self.path)
        except OSError as error:
            raise from_os_error(error, "rename", self.prepared) from error
        try:
            if self.patterns is not None and os.path.isdir(self.prepared):
                foreign = [*_foreign(self.prepared, self.patterns)]
                if foreign:  # somebody has put it there since the last check
                    raise CheckpointExistsError(
                        f"the directory has got {first_few(foreign, 5)} meanwhile", file=self.path,
                        hint="give a path that nobody else writes to",
                    )  # fmt: skip
            open_store(os.path.dirname(self.path)).sync_names("")
            then()
        except BaseException:
            files.take_back(self.prepared, self.path)
            raise
        self.remove()

    def remove(self) -> None:
        """Removes what is at the temporary path. After ``finish``, this is what was at ``path`` before. Also removes
        each directory that ``begin`` has made and that is empty."""
        files.remove_tree(self.prepared)
        while self.made:
            with suppress(OSError):  # it is not empty
                os.rmdir(self.made.pop(0))


def _has_code(directory: str) -> bool:
    """Returns whether a model's folder may have the code of the model. An export writes it only together with a
    configuration that names it."""
    config = Path(directory, "config.json")
    return config.is_file() and b'"auto_map"' in config.read_bytes()


def _foreign(directory: str, patterns: Sequence[str]) -> Iterator[str]:
    """Yields the path, relative to the directory, of everything in it that is not a file whose path matches one of the
    patterns. Raises OSError."""
    for name in sorted(os.listdir(directory)):
        parted = [pattern.partition("/") for pattern in patterns]
        below = [rest for first, _, rest in parted if fnmatch(name, first)]
        path = os.path.join(directory, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode) and any(below):
            yield from (f"{name}/{entry}" for entry in _foreign(path, [*filter(None, below)]))
        elif not (stat.S_ISREG(mode) and "" in below):
            yield name


def _has_marks(path: str, marks: Sequence[bytes]) -> bool:
    if not os.path.isfile(path):  # Opening a pipe could block.
        return False
    try:
        with open(path, "rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    return all(mark in beginning for mark in marks)
