"""Opens, on all ranks together, a checkpoint of which each machine has the files of its own ranks."""

from __future__ import annotations

from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from zckpt.checkpoint.listing.contents import Contents, plain_root
from zckpt.checkpoint.listing.doubt import settle
from zckpt.checkpoint.listing.files import files_in, lengths
from zckpt.checkpoint.listing.find import find_and_open, manifest_of
from zckpt.checkpoint.listing.runs import COMPARED_MAX, decode_manifest, directories, manifest_bytes, run_of
from zckpt.checkpoint.restoring.peers import PeerReader, Peers
from zckpt.errors import FormatError, ZckptError, first_few
from zckpt.format import names
from zckpt.format.rules import broken
from zckpt.plan.machines import machines_in
from zckpt.storage.overlay import OverlayReader
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.ranks.collectives import Ranks
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
    def lost(self) -> dict[str, str]:
        """The files that no rank sees, and words for the machine that had each of them."""
        files = [file for file, ranks in self.holders.items() if not ranks]
        machines = machines_in(plain_root(self.manifest)) if files else ()
        disks = {names.rank_dir(self.manifest.save_id, rank): str(each) for each in machines for rank in each.ranks}
        return {file: disks.get(file.rpartition("/")[0], ANOTHER) for file in files}

    def opened(self, peers: Peers) -> tuple[Store, Contents]:
        """Returns the directory of the checkpoint, and what it holds, of which ``peers`` read what is elsewhere."""
        lost = self.lost
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
        if lost := spread.lost:
            base = open_store(path)
            run = run_of(base) if base.location == spread.store.location else base
            raise _gone(spread.store, lost, _whole(run, ranks))
    return spread, opened


def look_for_spread(path: StrPath, ranks: Ranks) -> tuple[Spread | None, Callable[[], tuple[Store, Contents]]]:
    """Returns the checkpoint at ``path``, or that of the run at ``path``, if it was written with ``node_local``, and
    None if no rank finds such a checkpoint. Also returns a function that returns what ``find_and_open`` has returned on
    this rank, or raises its error. This is collective, and changes nothing.

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

    newest = ranks.decide(look, _newest, "find the checkpoint")
    if newest is None:
        return None, opened
    for _, contents in found:
        contents.reader.close()
    finder, name = newest
    store = base.child(name)

    def give() -> bytes | None:
        if ranks.rank != finder:
            return None
        with closing(store.reader()) as reader:
            return manifest_bytes(reader)

    raw = ranks.decide(give, lambda given: given[finder], "read the manifest")
    assert raw is not None, "the finder gives it"

    def look_for_files() -> Any:
        manifest = decode_manifest(store, raw)
        own = files_in(store, manifest)
        seen = [(number, *each) for number, each in enumerate(lengths(manifest).items()) if each[0] in own]
        longer = {number: own[file] for number, file, nbytes in seen if own[file] != nbytes.start}
        return [_runs([number for number, *_ in seen]), longer]

    views = [_View(*fields) for fields in ranks.decide(look_for_files, _views, "look for the files")]

    def arrange() -> Spread:
        manifest = decode_manifest(store, raw)
        may_have = lengths(manifest)
        sees: list[list[int]] = [[] for _ in may_have]
        for number, view in enumerate(views):
            for file_number in _numbers(view.files):
                sees[file_number].append(number)
        holders: dict[str, tuple[int, ...]] = {}
        known: dict[tuple[int, ...], tuple[dict[int, int], tuple[int, ...]]] = {}
        elsewhere: dict[str, tuple[int, int]] = {}
        for file_number, (file, nbytes) in enumerate(may_have.items()):
            seen_in = tuple(sees[file_number])
            if seen_in not in known:  # Many files have the same holders: one object serves all.
                view_of = {rank: number for number in seen_in for rank in _numbers(views[number].ranks)}
                known[seen_in] = view_of, tuple(sorted(view_of))
            view_of, of_file = known[seen_in]
            holders[file] = of_file
            if of_file and ranks.rank not in view_of:
                holder = of_file[ranks.rank % len(of_file)]  # so that not all ranks ask the same one
                elsewhere[file] = holder, views[view_of[holder]].longer.get(file_number, nbytes.start)
        return Spread(store, raw, manifest, holders, elsewhere)

    return ranks.together(arrange, "look for the files"), opened


class _View(NamedTuple):
    """The files of a checkpoint that some ranks see. ``lengths`` gives each file a number."""

    files: Sequence[Sequence[int]]
    """The numbers of these files, as runs."""
    longer: Mapping[int, int]
    """The lengths in bytes of those files that are longer than they have to be."""
    ranks: Sequence[Sequence[int]]
    """These ranks, as runs."""


def _newest(reports: Sequence[Any]) -> tuple[int, str] | None:
    """Returns the first rank that has found the checkpoint with the most steps, and the name of its directory, or None
    if no rank has found one of which each machine has some of the files."""
    found = [report for report in reports if report]
    return (reports.index(max(found)), max(found)[-1]) if found else None


def _views(reports: Sequence[Any]) -> list[list[Any]]:
    """Returns the fields of a ``_View`` for each different report. A report has its first two fields. There may be
    millions of files, but all ranks of a machine see the same ones, mostly some runs of them."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks_of.setdefault(msgpack.packb(report), []).append(rank)
    return [[*msgpack.unpackb(report, strict_map_key=False), _runs(ranks)] for report, ranks in ranks_of.items()]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns ascending numbers as runs ``[start, stop)``."""
    starts = [n for n, before in zip(numbers, [-2, *numbers], strict=False) if n != before + 1]
    stops = [n + 1 for n, after in zip(numbers, [*numbers[1:], -1], strict=False) if n + 1 != after]
    return [*zip(starts, stops, strict=True)]


def _numbers(runs: Sequence[Sequence[int]]) -> Iterator[int]:
    """Returns the numbers that are in these runs."""
    return chain.from_iterable(range(start, stop) for start, stop in runs)


def _whole(run: Store, ranks: Ranks) -> list[str]:
    """Returns the names of other checkpoints of a run that are whole on all machines together, newest first."""

    def look() -> list[Any]:
        found = []
        for store, entries in directories(run):
            if names.MANIFEST in entries:
                try:
                    manifest = manifest_of(store)
                except ZckptError:
                    continue
                lacking = lengths(manifest).keys() - files_in(store, manifest).keys()
                found.append([manifest.step, store.location.path_from(run.location), manifest.save_id, [*lacking]])
        return sorted(found, reverse=True)[:COMPARED_MAX]

    def whole(reports: Sequence[Any]) -> list[str]:
        lacking: dict[tuple[int, str, str], set[str]] = {}
        for step, name, save_id, files in chain(*reports):
            lacking.setdefault((step, name, save_id), {*files}).intersection_update(files)
        return [name for (_, name, _), files in sorted(lacking.items(), reverse=True) if not files]

    return ranks.decide(look, whole, "look for whole checkpoints")


def _gone(store: Store, lost: Mapping[str, str], whole: Sequence[str]) -> FormatError:
    what = f"of the run's other checkpoints these are whole, newest first: {', '.join(whole)}"
    return broken(
        "F001", f"no rank sees {len(lost)} files of the checkpoint ({first_few([*lost], 2)}); they were on a disk "
        f"of {' and '.join(dict.fromkeys(lost.values()))}", file=str(store.location),
        hint=f"start a rank on that machine, restore from several places if the run has copies elsewhere (copy_to), or "
        f"restore another checkpoint; "
        f"{what if whole else 'no other checkpoint of the run is whole on these machines'}",
    )  # fmt: skip
