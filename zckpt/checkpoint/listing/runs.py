"""What is in the directory of a run: its checkpoints, which of them are whole, and those in DeepSpeed's format."""

from __future__ import annotations

import os
import re
import sys
from contextlib import closing, suppress
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.contents import Contents
from zckpt.checkpoint.listing.other_formats import deepspeed_files, other_format
from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    StorageError,
    ZckptError,
    first_few,
    printable,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import DIGEST_BYTES
from zckpt.format.limits import LATEST_BYTES_MAX, MANIFEST_BYTES_MAX
from zckpt.format.rules import broken
from zckpt.plan.lineage import Lineage, Use
from zckpt.storage.location import Location, StrPath
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store

DEPTH_MAX = 4
"""A checkpoint that nothing names is found if its path in the run has at most this many components."""
DIRECTORIES_MAX = 1000
"""To make an error message, no more than this many directories are looked at."""
SHOWN_MAX = 5
"""An error message names no more than this many checkpoints of one kind."""
COMPARED_MAX = 10
"""No more than this many checkpoints are looked at to find whole ones."""
WHOLE_MAX = 3
"""No more than this many whole checkpoints are named. One is enough to go on with, and to find more costs time."""
_TRAINER = re.compile(r"checkpoint-[0-9]+", re.ASCII)
"""The name of a directory that Hugging Face's Trainer makes in its output directory: a run of one checkpoint."""
_ACCELERATE = re.compile(r"checkpoint_[0-9]+", re.ASCII)
"""The name of a directory that Accelerate makes for one save if it names the directories itself."""

NOTHING_CHANGED = "nothing was changed"
_GIVE = "give the directory of a checkpoint or run"


def read_manifest(checkpoint: Store, reader: Reader) -> Manifest:
    """Returns the manifest of a checkpoint, which ``reader`` reads. Raises CheckpointNotFoundError, FormatError and
    StorageError."""
    try:
        return decode_manifest(checkpoint, manifest_bytes(reader))
    except FormatError as error:
        # If the path of the directory is that of a file, some stores raise another error than MissingFileError.
        if not isinstance(error, MissingFileError) and (error.rule != "F002" or checkpoint.entry(names.MANIFEST)):
            raise
        raise CheckpointNotFoundError("there is no manifest", file=str(checkpoint.location)) from None


def manifest_bytes(reader: Reader) -> bytes:
    """Returns the bytes of a manifest. If the manifest is too long, it returns one byte more than a manifest may have,
    so that the caller sees that. Raises FormatError (F001, F002) and StorageError."""
    return reader.read(names.MANIFEST, 0, MANIFEST_BYTES_MAX + 1)


def decode_manifest(checkpoint: Store, raw: bytes) -> Manifest:
    """Returns the manifest of a checkpoint from its bytes. Raises FormatError, which names the file."""
    try:
        return manifest_format.decode(raw)
    except FormatError as error:
        error.file = str(checkpoint.location.child(names.MANIFEST))
        raise


def read_latest(run: Store, file: str = names.LATEST) -> str:
    """Returns the path, relative to the run, that the run's ``latest`` holds. Raises FormatError (L001, F001, F002) and
    StorageError."""
    with closing(run.reader()) as reader:
        raw = reader.read(file, 0, LATEST_BYTES_MAX + 1)
    file = str(run.location.child(file))
    name = names.decode_latest(raw, file)
    # On Windows such a name would be another path, or would name another drive.
    if sys.platform == "win32" and not {"\\", ":"}.isdisjoint(name):
        raise broken("L001", f"no directory can have the name {name!r} on this system", file=file)
    return name


def refuse_links(run: Store, name: str) -> None:
    """Raises FormatError (F002) if this path of a checkpoint in the run has several components, and one of them is a
    link. A single component may be a link."""
    if "/" in name:
        with closing(run.reader()) as reader, suppress(MissingFileError):
            reader.size(f"{name}/{names.MANIFEST}")


def directories(run: Store) -> Iterator[tuple[Store, list[str]]]:
    """Yields the directories in which the checkpoints of a run may be, each with its entries.

    They are the directories directly in the run and those in a Trainer's ``checkpoint-<N>``. In a run that has a
    ``latest``, a checkpoint may have a path of several components, so directories further down are looked at too, to a
    depth of ``DEPTH_MAX``. Directories in a checkpoint, in another run (a directory with a ``latest`` of its own) or
    behind a link are left out, and so are directories that cannot be listed.
    """
    yield from _below(run, DEPTH_MAX, names.LATEST in entries_of(run))


def _below(above: Store, depth: int, nested: bool) -> Iterator[tuple[Store, list[str]]]:
    try:
        subdirectories = directories_of(above)
    except StorageError:
        return
    for name in subdirectories:
        if names.is_data_dir(name):
            continue
        directory = above.child(name)
        entries = entries_of(directory)
        yield directory, entries
        of_trainer = is_of_trainer(name)
        is_run = names.LATEST in entries and not of_trainer
        if (nested or of_trainer) and depth > 1 and not (is_run or is_begun(entries) or deepspeed_files(entries)):
            yield from _below(directory, depth - 1, nested)


def entries_of(store: Store) -> list[str]:
    """Returns the sorted entries of a directory. There are none if it cannot be read, so that nothing is removed."""
    with suppress(StorageError):
        return names_in(store)
    return []


def names_in(store: Store) -> list[str]:
    """Returns the entries of a directory in sorted order, and none if there is no directory. Raises StorageError."""
    return sorted(entry.path for entry in store.entries() or ())


def names_at(store: Store) -> list[str]:
    """Returns the entries of a directory in sorted order. Raises CheckpointNotFoundError if there is no directory, and
    StorageError."""
    entries = store.entries()
    if entries is None:
        raise nothing_at(store)
    return sorted(entry.path for entry in entries)


def directories_of(store: Store) -> list[str]:
    """Returns the names of the directories in a directory, without links, in sorted order. Raises StorageError."""
    return sorted(entry.path for entry in store.entries() or () if entry.is_directory)


def is_of_trainer(name: str) -> bool:
    """Whether a directory with this name is one in which Hugging Face's Trainer saves a checkpoint."""
    return _TRAINER.fullmatch(name) is not None


def is_begun(entries: Collection[str]) -> bool:
    """Whether somebody has written a checkpoint in the directory with these entries, or has begun to write one."""
    return any(name in (names.MANIFEST, names.LOCK) or is_leftover(name) for name in entries)


def is_leftover(name: str) -> bool:
    """Whether an entry of a checkpoint's directory with this name is a leftover unless the manifest names it."""
    temporary = any(names.is_temporary(name, of) for of in (names.MANIFEST, names.LOCK))
    return temporary or names.is_data_dir(name)


def run_of(checkpoint: Store) -> Store:
    """Returns the directory of the run that a checkpoint belongs to. It is the nearest of the ``DEPTH_MAX`` directories
    above it that has a ``latest``, or, if none has one, the directory that the checkpoint is in. For a checkpoint in a
    Trainer's ``checkpoint-<N>`` it is the Trainer's output directory."""
    checkpoint = open_store(checkpoint.location.absolute())
    if is_of_trainer(checkpoint.parent.location.name):
        return checkpoint.parent.parent
    return _above(checkpoint, names.LATEST, DEPTH_MAX) or checkpoint.parent


def latest_name(checkpoint: Location, run: Location) -> str:
    """Returns the path by which the ``latest`` of a run names the checkpoint, or raises ValueError if it cannot."""
    name = checkpoint.path_from(run)
    try:
        names.encode_latest(name)
    except FormatError:
        raise ValueError(
            f"the file `latest` in {run} cannot name the checkpoint {name!r}: its tag, or path relative to this "
            f"directory, has to lie in the directory, take at most {LATEST_BYTES_MAX - 1} bytes and have no control "
            "characters; latest=False, or save_latest=False, writes it without `latest`"
        ) from None
    if name.split("/")[0] == names.LATEST:
        raise ValueError(
            f"the checkpoint {name!r} would take the place of the file `latest` in {run}: choose another tag or path; "
            "latest=False, or save_latest=False, writes it without this file"
        )
    return name


def refuse_place(target: Store, run: Store, *, latest: bool) -> None:
    """Raises CheckpointExistsError if a new checkpoint at ``target``, of this run, would hide others or be hidden by
    one. To open a directory that has a manifest is to open the checkpoint in it, and none in its subdirectories.
    ``latest``: whether the file ``latest`` will be written, in whose place there may be no directory then.

    Raises ValueError if the path has a name by which a directory above it would look like a checkpoint.
    """
    for name in target.location.path_from(run.location).split("/"):
        if is_begun([name]):
            raise ValueError(
                f"no checkpoint may be in a directory called {name!r}, which is a name of a checkpoint's own files: "
                "choose another tag or path"
            )
    in_it = (printable(inner.location.path_from(target.location)) for inner in _checkpoints(target))
    below = "the file `latest`" if names.LATEST in entries_of(target) else next(in_it, None)
    if below is not None:
        raise CheckpointExistsError(
            f"this is the directory of a run, with {below}: a checkpoint here would hide those that are in it",
            file=str(target.location),
            hint=f"write to a directory in it: {target.location.child('global_step<N>')}",
        )
    levels = max(target.location.path_from(run.location).count("/") + 1, DEPTH_MAX)
    above = _above(target, names.MANIFEST, levels)
    if above is not None:
        place = printable(str(above.location))
        raise CheckpointExistsError(
            f"{place} is a checkpoint, which would hide one in a directory of it", file=str(target.location),
            hint=f"write elsewhere, or move what {place} has of this checkpoint (manifest.msgpack, data-*) to a "
            f"directory of its own, such as {place}/global_step<N>",
        )  # fmt: skip
    if latest and (entry := run.entry(names.LATEST)) is not None and entry.is_directory:
        raise CheckpointExistsError(
            "a directory is in the place of the file `latest`, which is to name the new checkpoint",
            file=str(run.location.child(names.LATEST)),
            hint="move it, or write without this file: latest=False, save_latest=False",
        )


def refuse_in_checkpoint(path: StrPath) -> None:
    """Raises CheckpointExistsError if a file or folder of another format at this path would be in a checkpoint."""
    above = _above(open_store(Location.of(path).resolved()), names.MANIFEST, DEPTH_MAX)
    if above is not None:
        place = printable(str(above.location))
        raise CheckpointExistsError(
            f"{place} is a checkpoint, in which nothing else may be written", file=os.fspath(path),
            hint="give a path outside of it",
        )  # fmt: skip


def _above(store: Store, name: str, levels: int) -> Store | None:
    """Returns the nearest of the ``levels`` directories above this one that has an entry of this name, or None."""
    for _ in range(levels):
        if store.parent.location == store.location:
            return None
        store = store.parent
        if store.entry(name) is not None:
            return store
    return None


def whole_neighbours(checkpoint: Store) -> list[str]:
    """Returns the absolute paths of other checkpoints of the same run that are whole, the newest first. There are at
    most ``WHOLE_MAX`` of them, found among the ``COMPARED_MAX`` newest checkpoints. No tensor is read: a checkpoint
    counts as whole if its manifest can be read and its files have the sizes that the manifest says. This raises no
    error: a checkpoint that cannot be looked at does not count as whole.
    """
    location = checkpoint.location.absolute()
    others = (other for other in _of_same_run(checkpoint) if other.location != location)
    whole = islice(filter(if_whole, islice(others, COMPARED_MAX)), WHOLE_MAX)
    return [str(other.location) for other in whole]


def _of_same_run(checkpoint: Store) -> list[Store]:
    """Returns the checkpoints of the run that ``checkpoint`` belongs to, the one that was committed last first. In each
    directory that Accelerate makes for a save, the checkpoint of a model has the same name. So the run is the
    checkpoints of this name in all of these directories."""
    location = checkpoint.location.absolute()
    if not _ACCELERATE.fullmatch(location.parent.name):
        return _newest_first(_checkpoints(run_of(checkpoint)))
    saves = open_store(location.parent.parent)
    same = [saves.child(f"{name}/{location.name}") for name in directories_of(saves) if _ACCELERATE.fullmatch(name)]
    return _newest_first(store for store in same[:DIRECTORIES_MAX] if store.entry(names.MANIFEST) is not None)


def _newest_first(checkpoints: Iterable[Store]) -> list[Store]:
    """Sorts checkpoints by the time of their commit, and returns them, the newest first. Leaves out a checkpoint whose
    manifest is not a regular file."""
    committed = ((committed_at(store), str(store.location), store) for store in checkpoints)
    return [store for at, _, store in sorted(committed, key=lambda entry: entry[:2], reverse=True) if at]


def _checkpoints(run: Store) -> list[Store]:
    return [directory for directory, entries in _searched(run) if names.MANIFEST in entries]


def _searched(run: Store) -> Iterator[tuple[Store, list[str]]]:
    return islice(directories(run), DIRECTORIES_MAX)


def committed_at(store: Store) -> float:
    """Returns when a checkpoint was committed, in seconds since the epoch, or 0 if that cannot be found out."""
    try:
        entry = store.entry(names.MANIFEST)
        return 0.0 if entry is None or entry.nbytes is None else entry.changed_at
    except ZckptError:
        return 0.0


def newest_to_resume(checkpoint: Store, lineage: Lineage) -> str | None:
    """Returns the absolute path of the newest whole checkpoint in the directory of the run of ``checkpoint`` from which
    training can go on, and which has the same run as ``lineage``. If Trainer or Accelerate has made a directory for
    this checkpoint, the path is that of this directory. It reads no tensor."""
    resumable = next((store for store in _of_same_run(checkpoint) if can_resume(store, lineage.run_id)), None)
    if resumable is None:
        return None
    place = resumable.location.absolute()
    of_framework = is_of_trainer(place.parent.name) or _ACCELERATE.fullmatch(place.parent.name)
    return str(place.parent if of_framework else place)


def can_resume(checkpoint: Store, run_id: str | None = None) -> bool:
    """Whether there is a checkpoint in exactly this directory that is whole, and from which training can go on.
    ``run_id``: the identity of the run that it has to belong to. None means any run. No tensor is read."""
    contents = if_whole(checkpoint)
    return contents is not None and contents.lineage.use is Use.RESUME and run_id in (None, contents.lineage.run_id)


def if_whole(checkpoint: Store) -> Contents | None:
    """Returns what the manifest of a checkpoint says, with a reader that is closed, or None if the checkpoint is not
    whole. No tensor is read."""
    try:
        with closing(checkpoint.reader()) as reader:
            contents = Contents(read_manifest(checkpoint, reader), reader, checkpoint)
            check_lengths(contents)
            _ = contents.lineage  # raises an error if the tree is damaged
            return contents
    except ZckptError:
        return None


def check_lengths(contents: Contents, *, everywhere: bool = False) -> None:
    """Raises FormatError (F001 to F003, D001, I001) unless every file of the manifest is there and has its length. If
    each machine has its own ranks' files, those of the machines of which something is here are enough, unless
    ``everywhere`` is true. Reads no data."""
    manifest, here = contents.manifest, set[int]()
    for machine in contents.machines:
        with suppress(MissingFileError):
            contents.reader.size(names.digests_path(manifest.save_id, machine.ranks[0]))
            here.update(machine.ranks)
    ranks = here if here and not everywhere else set(range(manifest.world_size))
    contents.check_lengths({number: None for number, rank in enumerate(manifest.files.rank) if rank in ranks})
    for rank in sorted(ranks):
        path = names.digests_path(manifest.save_id, rank)
        nbytes = contents.reader.size(path)
        if nbytes < contents.digest_counts[rank] * DIGEST_BYTES:
            raise broken("D001", f"the table is {nbytes} bytes long", file=path)
    contents.check_index_length()


def what_is_whole(checkpoint: Store, *, here: bool = False) -> str:
    """Returns a clause for the hint of an error about a checkpoint. It says which other checkpoints of the run are
    whole. ``here``: whether each machine has the files of its own ranks, so that only those of this machine were looked
    at."""
    whole, place = whole_neighbours(checkpoint), " on this machine" if here else ""
    if not whole:
        return f"the run has no other checkpoint that is whole{place}"
    return f"of the run's other checkpoints these are whole{place}, newest first: {', '.join(map(printable, whole))}"


def nothing_at(store: Store, beside: str | None = None, give: str = _GIVE) -> CheckpointNotFoundError:
    """Returns the error for a path without a directory. Its hint names the checkpoints beside the path, or a directory
    with a similar name, or says what can be given. ``beside`` and ``give``: the first and the last of these, for a call
    that takes other formats. ``beside`` is empty if there are no checkpoints, and None stands for those of zckpt."""
    is_file = store.entry("") is not None
    hint = (_checkpoints_beside(store) if beside is None else beside) or _similar_to(store) or give
    if is_file:
        hint += "; `zckpt convert` reads a file of torch.save"
    what = "the path is a file" if is_file else "the path does not exist"
    return CheckpointNotFoundError(what, file=str(store.location), hint=hint)


def _checkpoints_beside(store: Store) -> str:
    """Returns a clause that names the checkpoints of the run in which a path is, or an empty text if it has none."""
    run = store.parent
    if is_of_trainer(run.location.name):
        run = run.parent
    listed = _listed(_newest_first(_checkpoints(run)), run)
    return f"the checkpoints in {printable(str(run.location))} are, newest first: {listed}" if listed else ""


def _similar_to(store: Store) -> str:
    """Returns a question that names a directory with a similar name, or an empty text if there is none."""
    try:
        beside = directories_of(store.parent)[:DIRECTORIES_MAX]
    except StorageError:
        return ""
    similar = get_close_matches(store.location.name, beside, 1)
    return "".join(f"did you mean {printable(str(store.parent.location.child(name)))}?" for name in similar)


def not_a_checkpoint(store: Store, entries: Sequence[str], message: str) -> CheckpointNotFoundError:
    """Returns the error, with ``message``, for a directory with these entries, in which nobody has begun a checkpoint.
    It says what is there instead."""
    other, here = other_format(entries), ours_in(store)
    if other is not None and not here:
        return CheckpointNotFoundError(f"this is {other.what}", file=str(store.location), hint=other.hint)
    # Trainer's save_model() puts a model into the directory that has the checkpoints.
    beside = "" if other is None else f"; beside them is {other.what}: {other.hint}"
    return CheckpointNotFoundError(message, file=str(store.location), hint=what_is_here(store) + beside)


def what_is_here(run: Store) -> str:
    """Returns the hint of an error that says that ``run`` is not a checkpoint. It names the checkpoints or the runs
    that are in this directory, and says what to do."""
    ours = ours_in(run)
    if ours:
        return ours
    runs = _runs_in(run)
    if runs:
        return f"give one of the runs that are here: {_listed(runs, run)}"
    foreign = [(directory, other) for directory, entries in _searched(run) if (other := other_format(entries))]
    if foreign:
        kind = foreign[0][1]
        listed = _listed([directory for directory, other in foreign if other is kind], run)
        return f"{kind.what} is in {listed}; {kind.hint}"
    return f"no checkpoint is here; {_GIVE}"


def _runs_in(above: Store) -> list[Store]:
    """Returns the directories that have checkpoints in them, among the directories of ``above``. It looks at no more
    than ``DIRECTORIES_MAX`` directories and directories of these."""
    pairs = ((directory, entries) for directory, _ in directories(above) for _, entries in directories(directory))
    begun = [directory for directory, entries in islice(pairs, DIRECTORIES_MAX) if is_begun(entries)]
    return [*{directory.location: directory for directory in begun}.values()]


def ours_in(run: Store) -> str:
    """Returns the clause for a hint that names the checkpoints of zckpt in this directory. It is empty if there are
    none."""
    begun = [(directory, entries) for directory, entries in _searched(run) if is_begun(entries)]
    committed = _newest_first(directory for directory, entries in begun if names.MANIFEST in entries)
    others = [directory for directory, entries in begun if names.MANIFEST not in entries]
    told = [
        ("give one of the checkpoints that are here, newest first: ", committed),
        ("these have no manifest, which zckpt.repair may be able to rebuild: ", others),
    ]
    return "; ".join(what + _listed(which, run) for what, which in told if which)


def _listed(stores: Sequence[Store], run: Store) -> str:
    return first_few([store.location.path_from(run.location) for store in stores], SHOWN_MAX)
