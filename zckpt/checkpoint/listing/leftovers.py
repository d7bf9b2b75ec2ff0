"""Finds what writes have left in a run, and recognises which of it zckpt has made. Nothing else is ever removed."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple

from zckpt.checkpoint.listing.files import lengths
from zckpt.checkpoint.listing.find import manifest_of
from zckpt.checkpoint.listing.runs import entries_of, is_leftover
from zckpt.errors import CheckpointNotFoundError, FormatError, MissingFileError, StorageError, ZckptError, first_few
from zckpt.format import names
from zckpt.format.data_file import BEGINNING_BYTES, begins_like_data_file
from zckpt.storage.lock import DEAD_SECONDS, is_alive, read_lock

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store


class Found(NamedTuple):
    """What there is of one entry of a directory. All paths are relative to this directory."""

    files: list[str]
    """The files that may be removed, because zckpt has made them."""
    directories: list[str]
    """The directories that zckpt has made, the innermost first. They may be removed once they are empty."""
    foreign: list[str]
    """What zckpt has not made."""


class Leftovers(NamedTuple):
    """The entries of a checkpoint's directory that writes have made and that its manifest does not name."""

    own: list[str]
    """The names of the entries that may be removed, and the paths of such files in the data of the checkpoint."""
    foreign: list[str]
    """The names of the entries that stay, because not all that is in them is zckpt's."""
    manifest: Manifest | None
    """The manifest of the checkpoint, or None if there is none or it cannot be read."""


def leftovers(checkpoint: Store, *, deep: bool = False) -> Leftovers:
    """Returns what writes have left in a checkpoint's directory. The writes died, failed or were replaced, or are under
    way. If the manifest cannot be read, it may name any of the entries, and both lists are empty. They do not have what
    cannot be read, either, nor a temporary file of the lock whose process may be alive: it is about to take the lock,
    or asks the store for its time. A process that removes leftovers has to hold the lock.

    ``deep``: whether to look into the data directory that the manifest names, where repairs may have left temporary
    files. This lists the directories of all ranks."""
    own, foreign = list[str](), list[str]()
    try:
        manifest = manifest_of(checkpoint)
    except CheckpointNotFoundError:
        manifest = None
    except ZckptError:  # the manifest may name any of the entries
        return Leftovers(own, foreign, None)
    named = None if manifest is None else names.data_dir(manifest.save_id)
    for name in entries_of(checkpoint):
        if is_leftover(name) and name != named:
            with suppress(StorageError):
                is_own = not look(checkpoint, name).foreign if names.is_data_dir(name) else is_file(checkpoint, name)
                is_in_use = is_own and names.is_temporary(name, names.LOCK) and _is_in_use(checkpoint, name)
                # Another process may remove an entry meanwhile.
                if not is_in_use and (is_own or checkpoint.entry(name) is not None):
                    (own if is_own else foreign).append(name)
    if deep and manifest is not None:
        with suppress(StorageError):
            files = look(checkpoint, names.data_dir(manifest.save_id), lengths(manifest)).files
            rebuilt = (names.INDEX, names.DIGESTS)
            own += [path for path in files if any(names.is_temporary(path.split("/")[-1], of) for of in rebuilt)]
    return Leftovers(own, foreign, manifest)


def _is_in_use(checkpoint: Store, name: str) -> bool:
    """Returns whether the process of a temporary file of the lock may be alive, or has removed this file meanwhile."""
    holder = read_lock(checkpoint, name)
    return holder is None or is_alive(checkpoint, holder, name) or checkpoint.entry(name) is None


def may_be_named(checkpoint: Store, save_id: str) -> bool:
    """Returns whether the manifest of a checkpoint names the data of this save, or may do so because it cannot be
    read."""
    try:
        return manifest_of(checkpoint).save_id == save_id
    except CheckpointNotFoundError:
        return False
    except ZckptError:
        return True


def run_leftovers(run: Store) -> list[str]:
    """Returns the names of the temporary files of ``latest`` that dead writers have left in a run. A commit needs
    such a file only for an instant, and a run has no lock. So those that are older than ``DEAD_SECONDS`` are left
    behind."""
    temporaries = [name for name in entries_of(run) if names.is_temporary(name, names.LATEST) and is_file(run, name)]
    entries = [entry for entry in map(run.entry, temporaries) if entry is not None]
    now = run.now() if entries else 0.0
    return [entry.path for entry in entries if now - entry.changed_at > DEAD_SECONDS]


def look(store: Store, name: str, named: Collection[str] | None = None) -> Found:
    """Returns what there is of an entry of a directory. A data directory is looked at to the bottom: zckpt's are the
    files that have names of the format, and data files have to begin as zckpt's do, too. Any other entry of the
    directory counts as zckpt's as a whole.

    ``named``: if the data directory is known to be zckpt's, the paths of the files in it that need not be looked at,
    because a manifest names them. What is foreign stays, and all else may be removed. None means that it is known only
    by its name. If anything in it is foreign, all of it stays. Raises StorageError.
    """
    found, entry = Found([], [], []), store.entry(name)
    if not names.is_data_dir(name):
        _add_all(store, name, found, is_directory=entry is not None and entry.is_directory)
        return found
    if entry is not None and entry.is_directory:
        with closing(store.reader()) as reader:
            _look(store, reader, name, named or (), found)
    elif entry is not None:
        found.foreign.append(name)
    return found if named is not None or not found.foreign else Found([], [], found.foreign)


def _look(store: Store, reader: Reader, path: str, named: Collection[str], found: Found) -> None:
    """Adds to ``found`` what is in a data directory, or in the directory of a rank."""
    directory, in_data_dir = store.child(path), "/" not in path
    for entry in sorted(directory.entries() or (), key=lambda entry: entry.path):
        name, below = entry.path, f"{path}/{entry.path}"
        if entry.is_directory and in_data_dir and names.split_rank_dir(name) is not None:
            _look(store, reader, below, named, found)
        elif not entry.is_directory and (below in named or _is_own(reader, below, in_data_dir=in_data_dir)):
            found.files.append(below)
        else:
            found.foreign.append(below)
    found.directories.append(path)


def _add_all(store: Store, path: str, found: Found, *, is_directory: bool) -> None:
    """Adds to ``found`` a file, or a directory with all that is in it."""
    if not is_directory:
        found.files.append(path)
        return
    for entry in store.entries(path) or ():
        _add_all(store, f"{path}/{entry.path}", found, is_directory=entry.is_directory)
    found.directories.append(path)


def _is_own(reader: Reader, path: str, *, in_data_dir: bool) -> bool:
    """Returns whether a file in a data directory, or in the directory of a rank, is zckpt's."""
    name = path.rpartition("/")[2]
    of = names.INDEX if in_data_dir else names.DIGESTS
    is_data_file = not in_data_dir and names.split_data_file_name(name) is not None
    if not (is_data_file or name == of or names.is_temporary(name, of) or names.is_old(name, of)):
        return False
    try:
        beginning = reader.read(path, 0, BEGINNING_BYTES)
    except FormatError as error:
        return isinstance(error, MissingFileError)  # another process has removed it meanwhile
    return not is_data_file or begins_like_data_file(beginning)


def is_file(store: Store, name: str) -> bool:
    """Returns whether there is a file of this name, and not a directory or a link."""
    with closing(store.reader()) as reader:
        try:
            reader.size(name)
        except FormatError:
            return False
        except StorageError:  # such as a file of another user, which may not be opened
            return True
    return True


def left_alone(foreign: Sequence[object]) -> str:
    """Returns the warning about paths that were not removed because they are foreign."""
    return f"what is not zckpt's was not removed: {first_few(foreign, 3)}; move it elsewhere, or remove it yourself"
