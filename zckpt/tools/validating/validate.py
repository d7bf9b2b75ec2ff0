"""Validates the checkpoint at a path, in one process or on all ranks of a job together."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

from zckpt.checkpoint.listing.find import find, manifest_of, open_contents
from zckpt.checkpoint.restoring.machines import look_for_spread
from zckpt.checkpoint.restoring.peers import Peers
from zckpt.errors import CheckpointNotFoundError, FormatError, UnfinishedWriteError
from zckpt.format import names
from zckpt.ranks.collectives import Ranks, check_arguments, comparable
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.tools.validating.check import ValidationShare, check_checkpoint
from zckpt.tools.validating.report import LEVELS, Finding, Level, Report, in_order
from zckpt.transfer.budget import Budget, budget_or_default

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.checkpoint.restoring.machines import Spread
    from zckpt.progress import Progress
    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.tools.validating.values import ValueChecks


def validate(
    path: StrPath, *, level: Level = "digests", budget: Budget | None = None, progress: Progress | None = None
) -> Report:
    """Checks a checkpoint against the specification.

    The report lists everything that is wrong with the checkpoint; this raises no error for it. If torch.distributed is
    initialised, every rank has to call this with the same arguments, and the ranks share the work.

    Args:
        path: the directory of a checkpoint, or that of a run, whose file ``latest`` names the checkpoint.
        level: how much is checked. "structure" checks everything except the data of tensors: names, sizes, headers, the
            index and the digest tables. "digests" also reads every byte and compares it with its digest. "deep" also
            looks for unusual values: NaN, infinities, negative second moments, and 16-bit weights that differ from
            their rounded master weights. Unusual values break no rule, so they are reported as observations.
        budget: the memory, the threads and the kind of I/O. None means ``Budget.from_environment()``.
        progress: an object that is told how many bytes are done, such as ``zckpt.ProgressBar()``.

    Returns:
        The report, with a finding for each broken rule and each place where it is broken. Every rank gets the same
        report.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ValueError: ``level`` is unknown.
        UnsupportedError: the path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
        StorageError: the operating system reports an error when it reads.
        RankError: another rank has failed or is lost, or the ranks have different paths.
    """
    ranks = Ranks(call="zckpt.validate")

    def arguments() -> dict[str, object]:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        return comparable(path=str(Location.of(path)), level=level)

    ranks.decide(arguments, check_arguments, "find the checkpoint")
    common_path = str(Location.of(path))
    with ranks.undivided():
        identity, spread, own = _look(common_path, ranks)
        while True:
            directory, _, finding = identity
            if finding:
                return Report(common_path, level, (Finding(*finding),), files=1)
            with ExitStack() as exchange:
                if spread is None:
                    opened = partial(open_contents, open_store(directory))
                    check = partial(_check, opened, ValidationShare(ranks.rank, ranks.size))
                else:
                    peers = exchange.enter_context(Peers(None, spread.store.reader(), "zckpt.validate"))
                    check = partial(_check_disk, spread, own, peers, ranks)
                checked = ranks.decide(partial(check, level, budget, progress), _joined, "validate")
            report = _report(directory, level, checked)
            if report.ok:
                return report
            checked_identity = identity
            identity, spread, own = _look(common_path, ranks)
            # If the checkpoint was replaced meanwhile, the findings say nothing about the one that is there now.
            if identity == checked_identity:
                return report


def _look(path: str, ranks: Ranks) -> tuple[Sequence[Any], Spread | None, Callable[[], tuple[Store, Contents]]]:
    """Returns what ``_find`` returns on rank 0. If each machine has the files of its own ranks, also returns the
    checkpoint on all machines, and a function that raises what is wrong with the manifest of this machine."""
    spread, own = look_for_spread(path, ranks)
    if spread is not None:
        return [str(spread.store.location), spread.manifest.save_id, []], spread, own
    return ranks.first(lambda: _find(path), "find the checkpoint"), None, own


def _find(path: str) -> tuple[str, str, tuple[Any, ...]]:
    """Returns the directory of the checkpoint, its save id, and an empty tuple. If its manifest is damaged, returns
    empty strings and the fields of the finding."""
    try:
        store = find(path)
        return str(store.location), manifest_of(store).save_id, ()
    except FormatError as error:
        return "", "", astuple(Finding.of(error))


_Checked = tuple[list[tuple[Any, ...]], bytes, int, int]
"""The result of one rank: the fields of each finding, the packed ``ValueChecks`` or no bytes, the number of files of
the checkpoint, and the number of bytes that the rank has read."""


def _check(
    opened: Callable[[], Contents],
    share: ValidationShare,
    level: Level,
    budget: Budget | None,
    progress: Progress | None,
) -> _Checked:
    try:
        contents = opened()
    except (CheckpointNotFoundError, FormatError) as error:  # Another process has replaced the checkpoint meanwhile.
        return [astuple(Finding("", error.message))], b"", 0, 0
    budget = budget_or_default(budget)
    with closing(contents.reader):
        findings, values, bytes_read = check_checkpoint(contents, budget, level, share, progress)
    manifest = contents.manifest
    files = 2 + manifest.world_size + len(manifest.files)  # manifest, index, digest tables, data files
    return [astuple(finding) for finding in findings], values, files, bytes_read


def _check_disk(
    spread: Spread, own: Callable[[], tuple[Store, Contents]], peers: Peers, ranks: Ranks,
    level: Level, budget: Budget | None, progress: Progress | None,
) -> _Checked:  # fmt: skip
    """Checks the files that this machine has, together with the other ranks of the machine. A finding about one of them
    names the machine."""
    manifest = spread.manifest
    tables = (names.digests_path(manifest.save_id, rank) for rank in range(manifest.world_size))
    share = ValidationShare(ranks.rank, ranks.size, [spread.holders[table] or range(ranks.size) for table in tables])
    findings, values, files, bytes_read = _check(lambda: spread.opened(peers)[1], share, level, budget, progress)
    findings += [astuple(finding) for finding in _of_this_machine(spread, own)]
    elsewhere = {*spread.lost, *spread.elsewhere}
    machine = f" (on {socket.gethostname()})" if ranks.size > 1 else ""
    named = [
        (rule, message if file in elsewhere else f"{message}{machine}", file, *place)
        for rule, message, file, *place in findings
    ]
    return named, values, files, bytes_read


def _of_this_machine(spread: Spread, own: Callable[[], tuple[Store, Contents]]) -> list[Finding]:
    """Returns what is wrong with the manifest of this machine, which may also be new and have none."""
    try:
        found = own()[1].manifest
    except UnfinishedWriteError:
        return [Finding("F001", "the file is missing", names.MANIFEST)]
    except CheckpointNotFoundError:
        return []
    except FormatError as error:
        return [Finding.of(error)]
    if found.save_id == spread.manifest.save_id:
        return []
    return [Finding("F001", f"the file is that of another save, of step {found.step}", names.MANIFEST)]


def _joined(checked: Sequence[_Checked]) -> _Checked:
    """Returns the results of all ranks as one result."""
    findings = [fields for of_rank, *_ in checked for fields in of_rank]
    packed = [values for _, values, *_ in checked if values]
    files = max(files for *_, files, _ in checked)
    return findings, _added(packed).pack() if packed else b"", files, sum(bytes_read for *_, bytes_read in checked)


def _report(path: str, level: Level, checked: _Checked) -> Report:
    findings, packed, files, bytes_read = checked
    observations = _added([packed]).observations() if packed else ()
    return Report(path, level, in_order(Finding(*fields) for fields in findings), observations, files, bytes_read)


def _added(packed: Sequence[bytes]) -> ValueChecks:
    """Returns what several ranks have found of the values. ``packed``: what ``ValueChecks.pack`` returned on each."""
    from zckpt.tools.validating.values import (
        ValueChecks,  # imported late, because only the level "deep" has values
    )

    values = ValueChecks({})
    for of_rank in packed:
        values.add(of_rank)
    return values
