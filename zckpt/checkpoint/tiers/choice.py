"""Chooses which checkpoint is opened or restored if it may be in several places, the nearest of which is the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple

from zckpt.checkpoint.listing.contents import Contents
from zckpt.checkpoint.listing.files import files_in, lengths
from zckpt.checkpoint.listing.find import find, manifest_of, on_machines, open_contents
from zckpt.checkpoint.listing.runs import check_lengths, directories
from zckpt.errors import CheckpointNotFoundError, FormatError, MissingFileError, StorageError, ZckptError, warn
from zckpt.format import names
from zckpt.plan.lineage import Use
from zckpt.storage.location import Location, StrPath
from zckpt.storage.overlay import OverlayReader
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Reader, Store


class Chosen(NamedTuple):
    """A checkpoint that may be in several places."""

    save_id: str
    paths: list[str]
    """For each place, the directory that the checkpoint is in, or would be in. The nearest is the first."""

    def nearest(self) -> Store:
        """Returns the nearest directory with something of the checkpoint. Raises CheckpointNotFoundError and
        StorageError."""
        store = next((store for store in map(open_store, self.paths) if _holds(store, self.save_id)), None)
        if store is None:
            raise CheckpointNotFoundError("the checkpoint that was chosen is not there any more", file=self.paths[0])
        return store

    def contents(self) -> Contents:
        """Returns what the checkpoint holds. Raises CheckpointNotFoundError if no place has its manifest, and
        StorageError."""
        stores = [*map(open_store, self.paths)]
        for store in stores:
            with suppress(CheckpointNotFoundError, FormatError):
                manifest = manifest_of(store)
                if manifest.save_id == self.save_id:
                    return _overlay(stores, manifest)
        raise CheckpointNotFoundError("there is no manifest", file=self.paths[0])

    def opened(self) -> tuple[Store, Contents]:
        """Returns the nearest directory, and what the checkpoint holds. Raises the errors of ``contents``."""
        return self.nearest(), self.contents()


def _holds(store: Store, save_id: str) -> bool:
    """Returns whether a directory has files of this save, of which the manifest may be missing. Raises StorageError."""
    if store.entry(names.data_dir(save_id)) is not None:
        return True
    with suppress(CheckpointNotFoundError, FormatError):  # A web server does not tell that there is a directory.
        return manifest_of(store).save_id == save_id
    return False


def _overlay(stores: Sequence[Store], manifest: Manifest) -> Contents:
    """Returns what a checkpoint holds that is in several directories, the nearest of which is the first. Each file is
    read from the nearest directory in which it has the right length. If there is none, a read of the file raises the
    error of the first directory that has anything of the checkpoint. Nothing is asked of a directory if nearer ones
    have everything. Raises StorageError."""
    missing = dict.fromkeys(lengths(manifest))
    used: list[Store] = []
    reader_of: dict[str, Reader] = {}
    readers: list[Reader] = []
    for store in stores:
        if missing and _holds(store, manifest.save_id):
            used.append(store)
            readers.append(store.reader())
            for path in files_in(store, manifest, missing):
                reader_of[path] = readers[-1]
                del missing[path]
    farthest = max(used or stores, key=lambda store: store.requests_in_flight)
    return Contents(manifest, OverlayReader(readers, reader_of), farthest)


class _Found(NamedTuple):
    """A checkpoint in one of the places."""

    number: int
    """The number of the place."""
    store: Store
    manifest: Manifest
    run_id: str
    use: Use


def choose(places: Sequence[StrPath]) -> Chosen:
    """Returns the checkpoint that is opened or restored. Each place is the directory of a checkpoint, or that of a run.

    It is the one with the most steps among those that the places' files ``latest`` name, if it is whole: each of its
    files is in one of the places and has the right length. If none of them is whole, it is the one with the most steps
    that is whole, among all checkpoints of the same training runs from which training can go on. No tensor is read. A
    warning says why a checkpoint or place was left out. Raises CheckpointNotFoundError if no place has a checkpoint,
    the error of the nearest place without a whole checkpoint, and ValueError if there is no place.
    """
    if not isinstance(places, Iterable):
        raise TypeError(f"a path must be a str or a Path, or a list of these, got {type(places).__name__}")
    if not places:
        raise ValueError("there is no path: give one, or several, the nearest first")
    roots = [Location.of(place).absolute() for place in places]
    named: list[_Found] = []
    errors: list[ZckptError] = []
    reached: list[Location] = []
    for root in roots:
        try:
            named.append(_found(len(reached), find(str(root))))
        except (CheckpointNotFoundError, FormatError, StorageError) as error:
            errors.append(error)
            if isinstance(error, StorageError):
                continue
        reached.append(root)
    skipped = [error for error in errors if not isinstance(error, CheckpointNotFoundError)]
    if not named:  # The error of a `latest` that leads nowhere says more than that of a place that is empty.
        raise [*skipped, *(error for error in errors if error.rule), *errors][0]
    seen: set[str] = set()
    for found in [*_newest_first(named), *_newest_first(_others(reached, named))]:
        chosen = _everywhere(found, reached, named)
        if chosen.save_id in seen:
            continue
        seen.add(chosen.save_id)
        try:
            contents = chosen.contents()
            with closing(contents.reader):
                check_lengths(contents, everywhere=True)
        except ZckptError as error:
            skipped.append(error)
        else:
            for reason in skipped:
                warn(f"{found.store.location} is taken, because another checkpoint cannot be used: {reason}")
            return chosen
    first = skipped[0]
    if isinstance(first, MissingFileError):
        spread = on_machines(named[0].store)
        together = f"{spread}, and a restore from one place alone asks all of them" if spread else ""
        first.hint = "; ".join(filter(None, ["no checkpoint of the run is whole in these places", together]))
    raise first


def _found(number: int, store: Store) -> _Found:
    contents = open_contents(store)
    with closing(contents.reader):
        return _Found(number, store, contents.manifest, contents.lineage.run_id, contents.lineage.use)


def _newest_first(found: Sequence[_Found]) -> list[_Found]:
    return sorted(found, key=lambda one: -one.manifest.step)  # The sort is stable, so the nearest comes first.


def _others(roots: Sequence[Location], named: Sequence[_Found]) -> list[_Found]:
    """Returns the checkpoints of the same training runs from which training can go on."""
    run_ids = {found.run_id for found in named}
    found: list[_Found] = []
    for number, root in enumerate(roots):
        for store, entries in directories(open_store(root)):
            if names.MANIFEST in entries:
                with suppress(ZckptError):
                    found.append(_found(number, store))
    return [one for one in found if one.run_id in run_ids and one.use is Use.RESUME]


def _everywhere(found: _Found, roots: Sequence[Location], named: Sequence[_Found]) -> Chosen:
    """Returns the checkpoint with its directory in each place. It has the same path in each run, but a place may also
    be the directory of a checkpoint."""
    place, save_id = found.store.location, found.manifest.save_id
    name = place.path_from(roots[found.number])
    directories_of_places: dict[int, Location] = {found.number: place}
    for one in named:
        if one.manifest.save_id == save_id:
            directories_of_places[one.number] = one.store.location
        elif one.store.location == roots[one.number]:
            directories_of_places[one.number] = roots[one.number]
        elif name == ".":
            directories_of_places[one.number] = roots[one.number].child(place.name)
    others = [root if name == "." else root.child(name) for root in roots]
    return Chosen(save_id, [str(directories_of_places.get(number, other)) for number, other in enumerate(others)])
