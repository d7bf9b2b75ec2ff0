"""What lies in the directory of a run: its checkpoints, which of them are whole, and those in DeepSpeed's format."""

from __future__ import annotations

import os
import re
import sys
from contextlib import closing
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING

from zckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    StorageError,
    ZckptError,
)
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.format.limits import LATEST_BYTES_MAX, MANIFEST_BYTES_MAX
from zckpt.format.rules import broken
from zckpt.reading.deepspeed_files import deepspeed_files
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store

DEPTH_MAX = 4
"""A checkpoint that nothing names is found if its path in the run has at most this many components."""
DIRECTORIES_MAX = 1000
"""An error message is made by looking at no more than this many directories."""
SHOWN_MAX = 5
"""An error message names no more than this many checkpoints of one kind."""
COMPARED_MAX = 10
"""No more than this many checkpoints are looked at to find whole ones."""
WHOLE_MAX = 3
"""No more than this many whole checkpoints are named. One is enough to go on with, and to find more costs time."""
_TRAINER = re.compile(r"checkpoint-[0-9]+", re.ASCII)
"""The name of a directory in the output directory of Hugging Face's Trainer; it is a run of one checkpoint."""

NOTHING_CHANGED = "nothing was changed"
DEEPSPEED_HINT = (
    "zckpt.attach(engine) makes engine.load_checkpoint load it; to convert it, load it into an engine that way, and "
    "write that with zckpt.write(engine)"
)


def read_manifest(path: str, reader: Reader) -> Manifest:
    """The manifest of the checkpoint at ``path``, which ``reader`` reads. Raises FormatError, StorageError."""
    raw = reader.read(names.MANIFEST, 0, min(reader.size(names.MANIFEST), MANIFEST_BYTES_MAX + 1))
    try:
        return manifest_format.decode(raw)
    except FormatError as error:
        error.file = os.path.join(path, names.MANIFEST)
        raise


def read_latest(run: Store) -> str:
    """The path, relative to the run, that its ``latest`` holds. Raises FormatError (L001, F001, F002), StorageError."""
    with closing(run.reader()) as reader:
        raw = reader.read(names.LATEST, 0, LATEST_BYTES_MAX + 1)
    file = os.path.join(run.root, names.LATEST)
    name = names.decode_latest(raw, file)
    if sys.platform == "win32" and not {"\\", ":"}.isdisjoint(name):  # there it would be another path, or another drive
        raise broken("L001", f"no directory can have the name {name!r} on this system", file=file)
    return name


def has_manifest(run: Store, name: str) -> bool:
    """Whether a checkpoint is at this path in the run. Raises FormatError (F002) for a path of several components if
    one of them is a link."""
    if "/" not in name:  # a single component may be a link
        return open_store(os.path.join(run.root, name)).exists(names.MANIFEST)
    with closing(run.reader()) as reader:
        try:
            reader.size(f"{name}/{names.MANIFEST}")
        except MissingFileError:
            return False
    return True


def directories(run: str) -> Iterator[tuple[str, list[str]]]:
    """The directories in which the checkpoints of a run may be, by their paths relative to it, each with its entries.

    They are those directly in the run, those in a Trainer's ``checkpoint-<N>``, and, in a run that has a ``latest``,
    those further down, to a depth of ``DEPTH_MAX``: there a checkpoint may have a path of several components. Left out
    is what lies in a checkpoint, in another run (it has a ``latest`` of its own) or behind a link, and what cannot be
    listed.
    """
    yield from _below(run, "", DEPTH_MAX, names.LATEST in entries_of(run))


def _below(run: str, above: str, depth: int, nested: bool) -> Iterator[tuple[str, list[str]]]:
    try:
        found = open_store(os.path.join(run, above)).directories()
    except StorageError:
        return
    for name in found:
        if names.is_data_dir(name):
            continue
        path = os.path.join(above, name)
        entries = entries_of(os.path.join(run, path))
        yield path, entries
        of_trainer = is_of_trainer(path)
        is_run = names.LATEST in entries and not of_trainer
        if (nested or of_trainer) and depth > 1 and not (is_run or is_begun(entries) or deepspeed_files(entries)):
            yield from _below(run, path, depth - 1, nested)


def entries_of(path: str) -> list[str]:
    """The entries of a directory, sorted; an empty list if they cannot be read, so that nothing there is removed."""
    try:
        return sorted(open_store(path).entries() or ())
    except StorageError:
        return []


def is_of_trainer(path: str) -> bool:
    """Whether a directory has the name of one in which Hugging Face's Trainer saves a checkpoint."""
    return _TRAINER.fullmatch(os.path.basename(path)) is not None


def is_begun(entries: Collection[str]) -> bool:
    """Whether somebody has written a checkpoint in the directory with these entries, or has begun to write one."""
    return any(name in (names.MANIFEST, names.LOCK) or is_leftover(name) for name in entries)


def is_leftover(name: str) -> bool:
    """Whether an entry of a checkpoint's directory with this name is a leftover unless the manifest names it."""
    temporary = any(names.is_temporary(name, of) for of in (names.MANIFEST, names.LOCK))
    return temporary or names.is_data_dir(name)


def run_of(path: str) -> str:
    """The directory of the run that a checkpoint belongs to: the nearest one above it that has a ``latest``, else the
    one that it lies in. For one in a Trainer's ``checkpoint-<N>`` it is the Trainer's output directory."""
    above = os.path.dirname(os.path.abspath(path))
    if is_of_trainer(above):
        return os.path.dirname(above)
    candidate = above
    for _ in range(DEPTH_MAX):
        if open_store(candidate).exists(names.LATEST):
            return candidate
        candidate = os.path.dirname(candidate)
    return above


def latest_name(path: str, run: str) -> str:
    """What ``latest`` in the directory ``run`` holds to name the checkpoint at ``path``. Raises ValueError where it
    cannot name it."""
    name = os.path.relpath(path, run).replace(os.sep, "/")
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


def refuse_place(path: str, run: str, *, latest: bool) -> None:
    """Raises CheckpointExistsError where a new checkpoint at ``path``, of the run in the directory ``run``, would hide
    others or be hidden by one: whoever opens a directory that has a manifest gets the checkpoint in it, whatever is
    below. With ``latest``, which is to be written, also where a directory is in the place of this file.
    """
    below = "the file `latest`" if names.LATEST in entries_of(path) else next(iter(_checkpoints(path)), None)
    if below is not None:
        raise CheckpointExistsError(
            f"this is the directory of a run, with {below}: a checkpoint here would hide those that are in it",
            file=path,
            hint=f"write to a directory in it: {os.path.join(path, 'global_step<N>')}",
        )
    parents = PurePath(path).parents
    for above in [str(one) for one in parents if one.is_relative_to(run)] or [str(parents[0])]:
        if open_store(above).exists(names.MANIFEST):
            raise CheckpointExistsError(
                f"{above} is a checkpoint, which would hide one in a directory of it", file=path,
                hint=f"write elsewhere, or move what {above} has of this checkpoint (manifest.msgpack, data-*) to a "
                f"directory of its own, such as {os.path.join(above, 'global_step<N>')}",
            )  # fmt: skip
    if latest and open_store(run).exists(names.LATEST) and names.LATEST in open_store(run).directories():
        raise CheckpointExistsError(
            "a directory is in the place of the file `latest`, which is to name the new checkpoint",
            file=os.path.join(run, names.LATEST),
            hint="move it, or write without this file: latest=False, save_latest=False",
        )


def whole_neighbours(path: str) -> list[str]:
    """The other checkpoints of the run of the checkpoint at ``path`` that are whole, as far as their manifests and the
    sizes of their files say, newest first: absolute paths of the ``WHOLE_MAX`` newest ones, found among the
    ``COMPARED_MAX`` newest checkpoints. No tensor is read. Raises nothing: what cannot be looked at is not whole.
    """
    own = os.path.abspath(path)
    others = (found for found in _newest_first(run_of(path)) if found != own)
    return list(islice(filter(_is_whole, islice(others, COMPARED_MAX)), WHOLE_MAX))


def _newest_first(run: str) -> list[str]:
    """The paths of the checkpoints of a run, the one that was committed last first."""
    found = [(_committed_at(os.path.join(run, name)), os.path.join(run, name)) for name in _checkpoints(run)]
    return [path for _, path in sorted(found, reverse=True)]


def _checkpoints(run: str) -> list[str]:
    looked_at = islice(directories(run), DIRECTORIES_MAX)
    return [name for name, entries in looked_at if names.MANIFEST in entries]


def _committed_at(path: str) -> float:
    """When the checkpoint at ``path`` was committed; 0 if that cannot be found out."""
    store = open_store(path)
    try:
        with closing(store.reader()) as reader:
            reader.size(names.MANIFEST)  # Raises an error for what is not a regular file: to open that could block.
        return store.changed_at(names.MANIFEST) or 0.0
    except ZckptError:
        return 0.0


def _is_whole(path: str) -> bool:
    try:
        with closing(open_store(path).reader()) as reader:
            manifest = read_manifest(path, reader)
            digest_counts = [0] * manifest.world_size
            for file in manifest.files:
                if reader.size(manifest.path(file)) != file.nbytes:
                    return False
                spans = (file.data_start, file.nbytes - file.data_start)
                count = file.first_block + sum(block_count(nbytes, manifest.block_bytes) for nbytes in spans)
                digest_counts[file.rank] = max(digest_counts[file.rank], count)
            tables = (reader.size(names.digests_path(manifest.save_id, rank)) for rank in range(manifest.world_size))
            # A table has at least as many digests. Their exact number is known from the index only.
            if any(size < count * DIGEST_BYTES for size, count in zip(tables, digest_counts, strict=True)):
                return False
            return reader.size(names.index_path(manifest.save_id)) == manifest.index_bytes
    except ZckptError:
        return False


def what_is_whole(path: str) -> str:
    """A clause for the hint of an error about the checkpoint at ``path``: which other ones of its run are whole."""
    found = whole_neighbours(path)
    if not found:
        return "the run has no other checkpoint that is whole"
    return f"of the run's other checkpoints these are whole, newest first: {', '.join(found)}"


def nothing_at(path: str) -> CheckpointNotFoundError:
    """The error where ``path`` is no directory. It names the checkpoints that are there, if its run has some."""
    what = "is a file" if open_store(path).exists("") else "does not exist"
    run = run_of(path)
    found = [os.path.relpath(one, run) for one in _newest_first(run)]
    hint = f"the checkpoints in {run} are, newest first: {_listed(found)}" if found else ""
    return CheckpointNotFoundError(
        f"the path {what}", file=path, hint=hint or "give the directory of a checkpoint or run"
    )


def not_a_checkpoint(path: str, entries: Sequence[str], message: str) -> CheckpointNotFoundError:
    """The error, with ``message``, for a directory with these entries, in which nobody has begun a checkpoint. It says
    what is there instead."""
    if deepspeed_files(entries):
        return CheckpointNotFoundError("this is a checkpoint in DeepSpeed's own format", file=path, hint=DEEPSPEED_HINT)
    return CheckpointNotFoundError(message, file=path, hint=what_is_here(path))


def what_is_here(run: str) -> str:
    """The hint of an error that no checkpoint is at ``run``: which ones are in this directory, and what to do."""
    found = list(islice(directories(run), DIRECTORIES_MAX))
    committed = [os.path.relpath(path, run) for path in _newest_first(run)]
    others = [name for name, entries in found if is_begun(entries) and names.MANIFEST not in entries]
    told = [
        ("give one of the checkpoints that are here, newest first: ", committed),
        ("these have no manifest, which zckpt.repair may be able to rebuild: ", others),
    ]
    if committed or others:
        return "; ".join(what + _listed(which) for what, which in told if which)
    foreign = [name for name, entries in found if deepspeed_files(entries)]
    if foreign:
        return f"the checkpoints here are in DeepSpeed's own format: {_listed(foreign)}; {DEEPSPEED_HINT}"
    return "no checkpoint is here; give the directory of a checkpoint or run"


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    return ", ".join(found[:SHOWN_MAX]) + more
