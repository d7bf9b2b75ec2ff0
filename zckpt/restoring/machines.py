"""Opens, on all ranks together, a checkpoint of which each machine has the files of its own ranks."""

from __future__ import annotations

from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.errors import FormatError, ZckptError, first_few
from zckpt.format import names
from zckpt.format.rules import broken
from zckpt.listing.contents import Contents, plain_root
from zckpt.listing.doubt import settle
from zckpt.listing.files import files_in, lengths
from zckpt.listing.find import find_and_open
from zckpt.listing.runs import COMPARED_MAX, decode_manifest, directories, manifest_bytes, run_of
from zckpt.restoring.peers import PeerReader
from zckpt.state.machines import machines_in
from zckpt.storage.overlay import OverlayReader
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.ranks.collectives import Ranks
    from zckpt.restoring.peers import Peers
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath

ANOTHER = "another machine"
"""The words for a machine whose name is not known."""


class Spread(NamedTuple):
    """A checkpoint of which each machine has the files of its own ranks."""

    store: Store
    """The directory of the checkpoint on this machine, which need not exist."""
    raw: bytes
    """The bytes of the manifest."""
    manifest: Manifest
    holders: Mapping[str, tuple[int, ...]]
    """For each file, the ranks that see it."""
    elsewhere: Mapping[str, tuple[int, int]]
    """For each file that this rank does not see, a rank that does, and the size of the file in bytes."""

    @property
    def missing(self) -> list[str]:
        """The files that no rank sees."""
        return [file for file, ranks in self.holders.items() if not ranks]

    def opened(self, peers: Peers) -> tuple[Store, Contents]:
        """Returns the directory of the checkpoint, and what it holds. Files of other machines are read from their
        ranks."""
        disks = _disks(self.manifest)
        lost = {file: disks.get(file.rpartition("/")[0], ANOTHER) for file in self.missing}
        local, remote = self.store.reader(), PeerReader(peers, self.elsewhere, lost)
        reader = OverlayReader([local, remote], dict.fromkeys([*self.elsewhere, *lost], remote))
        return self.store, Contents(self.manifest, reader, self.store)


def find_spread(path: StrPath, ranks: Ranks) -> tuple[Spread | None, Callable[[], tuple[Store, Contents]]]:
    """Returns what ``look_for_spread`` returns. If a crash has left the checkpoint committed on some machines only,
    commits it on the others. This is collective. Raises FormatError (F001), which names the machines that are gone, if
    no rank sees some of the files, RankError and StorageError."""
    spread, opened = look_for_spread(path, ranks)
    if spread is not None:
        settle(spread.store, ranks)
        if missing := spread.missing:
            base = open_store(path)
            run = run_of(base) if base.location == spread.store.location else base
            raise _gone(spread, missing, _whole(run, ranks))
    return spread, opened


def look_for_spread(path: StrPath, ranks: Ranks) -> tuple[Spread | None, Callable[[], tuple[Store, Contents]]]:
    """Returns the checkpoint at ``path``, or that of the run at ``path``, if it was written with ``node_local``, and
    None if no rank finds such a checkpoint. Also returns a function that returns the directory of the checkpoint that
    this rank finds, and what it holds, or raises the error of ``find_and_open``. This is collective, and changes
    nothing.

    If the ranks find different checkpoints, it is the one with the most steps. Some of its files may be missing. Raises
    RankError and StorageError.
    """
    base = open_store(path)
    found: list[tuple[Store, Contents]] = []
    errors: list[ZckptError] = []

    def opened() -> tuple[Store, Contents]:
        if errors:
            raise errors[0]
        return found[0]

    def look() -> Any:
        try:
            found.append(find_and_open(path))
            store, contents = found[0]
            is_spread = bool(contents.machines)
        except ZckptError as error:  # ``opened`` raises it if no other rank finds such a checkpoint.
            errors.append(error)
            return None
        name = store.location.path_from(base.location)
        return [contents.manifest.step, contents.manifest.save_id, "" if name == "." else name] if is_spread else None

    reports = ranks.share(look, "find the checkpoint")
    if not any(reports):
        return None, opened
    for _, contents in found:
        contents.reader.close()
    newest = max(report for report in reports if report)
    store = base.child(newest[-1])

    def give() -> bytes:
        if ranks.rank != reports.index(newest):
            return b""
        with closing(store.reader()) as reader:
            return manifest_bytes(reader)

    raw = ranks.share(give, "read the manifest")[reports.index(newest)]
    own: dict[str, int] = {}

    def look_for_files() -> bool:
        manifest = decode_manifest(store, raw)
        own.update(files_in(store, manifest))
        return own.keys() == lengths(manifest).keys()

    # If all ranks see all files, their names need not be sent. There may be millions of them.
    all_see_all = all(ranks.share(look_for_files, "look for the files"))
    seen = ranks.share(lambda: own, "look for the files") if not all_see_all else [own] * ranks.size

    def arrange() -> Spread:
        manifest = decode_manifest(store, raw)
        holders: dict[str, tuple[int, ...]] = {}
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # Many files have the same holders: one tuple serves all.
        elsewhere: dict[str, tuple[int, int]] = {}
        for file in lengths(manifest):
            of_file = tuple(rank for rank, of_rank in enumerate(seen) if file in of_rank)
            holders[file] = known.setdefault(of_file, of_file)
            if of_file and ranks.rank not in of_file:
                holder = of_file[ranks.rank % len(of_file)]  # so that not all ranks ask the same one
                elsewhere[file] = holder, seen[holder][file]
        return Spread(store, raw, manifest, holders, elsewhere)

    return ranks.together(arrange, "look for the files"), opened


def _whole(run: Store, ranks: Ranks) -> list[str]:
    """Returns the names of other checkpoints of a run that are whole on all machines together, newest first."""

    def look() -> list[Any]:
        found = []
        for store, entries in directories(run):
            if names.MANIFEST in entries:
                try:
                    with closing(store.reader()) as reader:
                        manifest = decode_manifest(store, manifest_bytes(reader))
                except ZckptError:
                    continue
                lacking = lengths(manifest).keys() - files_in(store, manifest).keys()
                found.append([manifest.step, store.location.path_from(run.location), manifest.save_id, [*lacking]])
        return sorted(found, reverse=True)[:COMPARED_MAX]

    lacking: dict[tuple[int, str, str], set[str]] = {}
    for step, name, save_id, files in chain(*ranks.share(look, "look for whole checkpoints")):
        lacking.setdefault((step, name, save_id), {*files}).intersection_update(files)
    return [name for (_, name, _), files in sorted(lacking.items(), reverse=True) if not files]


def _disks(manifest: Manifest) -> dict[str, str]:
    """Returns the machine of each directory with the files of a rank, as words for an error."""
    return {
        names.rank_dir(manifest.save_id, rank): str(machine)
        for machine in machines_in(plain_root(manifest))
        for rank in machine.ranks
    }


def _gone(spread: Spread, missing: Sequence[str], whole: Sequence[str]) -> FormatError:
    disks = _disks(spread.manifest)
    lost = dict.fromkeys(disks.get(path.rpartition("/")[0], ANOTHER) for path in missing)
    what = f"of the run's other checkpoints these are whole, newest first: {', '.join(whole)}"
    return broken(
        "F001", f"no rank sees {len(missing)} files of the checkpoint ({first_few(missing, 2)}); they were on a disk "
        f"of {' and '.join(lost)}", file=str(spread.store.location),
        hint=f"start a rank on that machine, restore from several places if the run has copies elsewhere (copy_to), or "
        f"restore another checkpoint; "
        f"{what if whole else 'no other checkpoint of the run is whole on these machines'}",
    )  # fmt: skip
