"""Puts an export, a checkpoint in DeepSpeed's own format, or the page of a report in place.

On a file system, it has a temporary name until it is complete, and then gets its own name in a single step. An object
store cannot rename: there, a file appears when its upload is complete, and the files of a directory appear one after
the other, while a lock in the directory keeps other processes away. So only a file is ever replaced there.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import closing, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.checkpoint.listing.runs import refuse_in_checkpoint
from zckpt.errors import CheckpointExistsError, RankError, ZckptError, check_flags, first_few, from_os_error, warn
from zckpt.format.names import LOCK
from zckpt.storage.local_store import make_directories
from zckpt.storage.location import Location
from zckpt.storage.lock import WriteLock
from zckpt.storage.process_names import left_over, own_temporary
from zckpt.storage.schemes import open_store
from zckpt.storage.space import Space
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors", "*_states.pt", "*.distcp")
"""Patterns of the files with weights. Every directory that is written has at least one of them."""
_CONFIGURATIONS = ("config.json", "adapter_config.json")
"""The files without which no program takes a directory for a model."""
TORCH_FILE = (b"PK\3\4", b"/data.pkl")
"""Bytes that are near the beginning of every file that ``torch.save`` writes."""
_BEGINNING_BYTES = 4096
"""The number of bytes of a file in which its marks are looked for."""


class Place(NamedTuple):
    """The place of a new file or directory that is not a checkpoint. Rank 0 chooses it and tells the other ranks."""

    path: str
    """The absolute path of the file or directory once it is complete."""
    prepared: str
    """The temporary path of the file or directory until it is complete. In an object store, it is ``path``."""
    what: str
    """What errors call the file or directory, such as "export"."""
    overwrite: bool
    """Whether an earlier file or directory of the same kind may be replaced."""
    patterns: Sequence[str] | None
    """Patterns of the paths of the files that the directory may have. None means that it is a file."""
    marks: Sequence[bytes]
    """For a file, bytes that are near the beginning of every file of the same kind."""
    made: list[str]
    """What ``remove`` removes besides the temporary file or directory: the directories that ``begin`` has made, the
    innermost first. In an object store, these are the names of the files that are written and replace nothing."""
    locks: list[WriteLock]
    """The lock of the directory in an object store, once ``begin`` has taken it."""

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
        replaced. Raises TypeError if ``overwrite`` is no bool, ValueError if a file would have the path of a bucket,
        and the errors of ``check``."""
        check_flags(overwrite=overwrite)
        location = Location.of(out).absolute()
        if location.scheme and patterns is None and location.parent.path in ("", location.path):
            raise ValueError(f"give the path of a file in the bucket instead of {str(location)!r}")
        path = str(location)
        if os.path.islink(path):
            path = os.path.realpath(path)
        place = cls.of(path, path if location.scheme else own_temporary(path), what, overwrite, patterns, marks, [], [])
        place.check()
        return place

    @classmethod
    def of(cls, *fields: Any) -> Place:
        """Returns the place with these fields, as ``choose`` has returned it on another rank."""
        place = cls(*fields)
        return place if place.prepared != place.path else PlaceInStore(*fields)

    @property
    def store(self) -> Store:
        """The directory in which the files are written. For a file, it is the directory that contains it."""
        prepared = open_store(self.prepared)
        return prepared.parent if self.patterns is None else prepared

    @property
    def name(self) -> str:
        """The name under which a file is written. On a file system, it is the temporary name."""
        return Location.of(self.prepared).name

    def check(self) -> bool:
        """Returns whether something is here that will be replaced. Raises CheckpointExistsError unless something may be
        put here. Where something is already, ``overwrite`` allows to replace an earlier one of the same kind: a file
        that has all ``marks`` near its beginning, or, on a file system, a directory that has weights and in which all
        files match ``patterns``."""
        path = self.path
        refuse_in_checkpoint(path)
        there = open_store(path).entry("")
        if there is None:
            return False
        if there.is_directory != (self.patterns is not None):
            kind, this = ("a directory", "a file") if self.patterns is None else ("a file", "a directory")
            raise CheckpointExistsError(
                f"there is {kind}, and the {self.what} is {this}", file=path, hint="give another path"
            )
        if self.patterns is None:
            if there.nbytes is None or not _has_marks(open_store(path), self.marks):
                raise CheckpointExistsError(
                    "there is a file of another kind", file=path,
                    hint="give a path at which nothing exists yet, or move the file away",
                )  # fmt: skip
        elif not self.check_directory(self.patterns):
            return True
        if not self.overwrite:
            raise CheckpointExistsError(
                "something is there already",
                file=path,
                hint="give another path, or `overwrite=True` (--overwrite) to replace it",
            )
        return True

    def check_directory(self, patterns: Sequence[str]) -> bool:
        """Returns whether the directory that is here has any files. Raises CheckpointExistsError if it has others than
        an earlier one of the same kind has, whose files match ``patterns``."""
        path = self.path
        try:
            names, has_code = sorted(os.listdir(path)), _has_code(path)
            foreign = [*_foreign(path, [name for name in patterns if has_code or not name.endswith(".py")])]
        except OSError as error:
            raise from_os_error(error, "list", path) from error
        why = ""
        if foreign:
            why = f"the directory has files that no {self.what} has: {first_few(foreign, 5)}"
        elif names and not any(fnmatch(name, pattern) for name in names for pattern in _WEIGHTS):
            why = f"the directory has no weights, so no {self.what} has made it: {first_few(names, 5)}"
        if why:
            raise CheckpointExistsError(
                why, file=path, hint="give a path at which nothing exists yet, or move these files away"
            )
        return bool(names)

    def begin(self, names: Iterable[str]) -> None:
        """Prepares the place for files with these names, before any of them is written. On a file system, makes the
        directory of ``store``, and removes temporary files that dead processes have left beside the place. In an object
        store, takes the lock of the directory. Raises StorageError, LockedError and the errors of ``check``."""
        _remove_left_over(os.path.dirname(self.path))
        make_directories(self.store.location.path, self.made)

    def put_small(self, small_files: Mapping[str, bytes]) -> None:
        """Writes small files, after all others, because they say that a directory has a whole model: the index and the
        configuration come last. Raises LockedError if another process has taken the directory over, and
        StorageError."""
        for lock in self.locks:
            lock.confirm()
        for name in sorted(small_files, key=lambda name: (name in _CONFIGURATIONS, name.endswith(".index.json"))):
            self.store.put_new(name, small_files[name])

    def check_seen(self, rank: int) -> None:
        """Raises RankError if this rank does not see the directory that ``begin`` has made on rank 0. ``rank``: the
        number of this rank in its job."""
        store = self.store
        if store.entry("") is None:
            raise RankError(
                "rank 0 has made a directory that this rank does not see", file=str(store.location), rank=rank,
                hint=f"write the {self.what} to a file system that all ranks share, or to an object store",
            )  # fmt: skip

    def finish(self, then: Callable[[], None] = lambda: None) -> None:
        """Calls ``then``, once the file or directory is in its place. In an object store, it is there already. On a
        file system, renames it to ``path`` first, where it replaces an earlier one. This raises StorageError, and the
        errors of ``check``, because another process may have put something there meanwhile. Raises what ``then``
        raises. After an error, ``path`` is as it was before, once ``remove`` has been called. Only a file in an object
        store that has replaced another one stays."""
        self.store.sync_names("")
        self.check()
        try:
            put_in_place(self.prepared, self.path)
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
            take_back(self.prepared, self.path)
            raise
        self.remove()

    def remove(self) -> None:
        """Removes what is at the temporary path. After ``finish``, this is what was at ``path`` before. Also removes
        each directory that ``begin`` has made and that is empty. In an object store, it is called only after an error,
        and removes the files that were written."""
        _remove_tree(self.prepared)
        while self.made:
            with suppress(OSError):  # it is not empty
                os.rmdir(self.made.pop(0))


class PlaceInStore(Place):
    """A place in an object store, where nothing can be renamed."""

    def check_directory(self, patterns: Sequence[str]) -> bool:
        raise CheckpointExistsError(
            "there are files already, and only on a file system can a directory be replaced in one step",
            file=self.path, hint="give another path, or remove these files first",
        )  # fmt: skip

    def begin(self, names: Iterable[str]) -> None:
        is_replaced = self.check()
        if self.patterns is not None:
            lock = WriteLock(self.store)
            lock.acquire()
            self.locks.append(lock)
            others = [entry.path for entry in self.store.entries(deep=True) or () if entry.path != LOCK]
            if others:
                raise CheckpointExistsError(
                    f"the directory has got {first_few(others, 5)} meanwhile", file=self.path,
                    hint="give a path that nobody else writes to",
                )  # fmt: skip
        self.made.extend(() if is_replaced else names)

    def check_seen(self, rank: int) -> None:
        pass  # Every rank reaches the same store.

    def finish(self, then: Callable[[], None] = lambda: None) -> None:
        for lock in self.locks:
            lock.confirm()
        then()
        for lock in self.locks:
            lock.release()

    def remove(self) -> None:
        self.store.remove(*self.made)
        for lock in self.locks:
            lock.release()
        with suppress(ZckptError):
            left = [name for name in self.made if self.store.entry(name) is not None]
            if left:
                warn(f"{first_few(left, 5)} of what has failed could not be removed from {self.store.location}")


def write_in_place(
    place: Place, ranks: Ranks, sizes: Mapping[str, int], write: Callable[[], object], finish: Callable[[], None]
) -> None:
    """Writes files with these names and ``sizes`` to ``place``. All ranks have to call this. ``write`` writes them, by
    steps of all ranks, and ``finish`` puts them in place, on rank 0. After an error, nothing of them remains."""
    try:
        ranks.first(lambda: place.begin(sizes), "prepare the place")
        ranks.together(lambda: place.check_seen(ranks.job_rank), "look at the place")
        space = ranks.first(lambda: Space.of(place.store, sum(sizes.values())), "look for space")
        ranks.together(lambda: Space(*space).refuse_lack(), "look for space")
        write()
        ranks.first(finish, f"put the {place.what} in place")
    except BaseException:
        if ranks.rank == 0:
            place.remove()
        raise


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


def _has_marks(file: Store, marks: Sequence[bytes]) -> bool:
    with closing(file.parent.reader()) as reader:
        beginning = reader.read(file.location.name, 0, _BEGINNING_BYTES)
    return all(mark in beginning for mark in marks)


def put_in_place(prepared: str, path: str) -> None:
    """Renames ``prepared`` to ``path``. If there was something at ``path``, it has the name ``prepared`` afterwards, or
    is replaced. If the system can exchange two names, there is something at ``path`` at any time. If it cannot, a file
    at ``path`` is replaced, and a directory at ``path`` is missing for an instant. Raises OSError, and then both have
    their former names."""
    if os.path.lexists(path) and linux.exchange(prepared, path):
        return
    if not os.path.isdir(path):
        os.replace(prepared, path)
        return
    aside = f"{prepared}.old"
    os.rename(path, aside)
    try:
        os.rename(prepared, path)
    except OSError:
        os.rename(aside, path)
        raise
    os.rename(aside, prepared)


def take_back(prepared: str, path: str) -> None:
    """Undoes ``put_in_place``. Raises OSError."""
    if os.path.lexists(prepared):
        put_in_place(prepared, path)
    else:
        os.rename(path, prepared)


def _remove_left_over(directory: str) -> None:
    """Removes the temporary files and directories of dead processes from a directory. Does nothing if the directory
    does not exist. Raises StorageError if it cannot be listed."""
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, "list", directory) from error
    for name in left_over(entries):
        _remove_tree(os.path.join(directory, name))


def _remove_tree(path: str) -> None:
    """Removes a file, or a directory with everything in it. Raises nothing: what cannot be removed stays."""
    with suppress(OSError):
        os.unlink(path)
    shutil.rmtree(path, ignore_errors=True)
