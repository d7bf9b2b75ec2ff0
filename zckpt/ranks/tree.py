"""The tree along which the ranks of a group exchange messages, and the messages of one step. With a tree, a rank has
few connections, however many ranks there are. Rank 0 is the root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FAN_OUT = 32
"""The largest number of children of a rank. Gloo connects all members of a group with each other, so a rank has up to
twice as many connections for the messages of one channel."""


def parent(rank: int) -> int:
    """Returns the parent of a rank other than 0."""
    return (rank - 1) // FAN_OUT


def children(rank: int, size: int) -> range:
    """Returns the children of a rank in a group of ``size`` ranks."""
    first = rank * FAN_OUT + 1
    return range(min(first, size), min(first + FAN_OUT, size))


def family(rank: int, size: int) -> list[int]:
    """Returns a rank and its children."""
    return [rank, *children(rank, size)]


def neighbors(rank: int, size: int) -> list[int]:
    """Returns the ranks with which a rank exchanges messages: its parent and its children."""
    return [*([parent(rank)] if rank else ()), *children(rank, size)]


class StepReport(NamedTuple):
    """What a rank and all ranks below it tell their parent at the end of a step."""

    step: str
    """What the rank does, in words. All ranks have to do the same."""
    results: dict[int, bytes] = {}  # noqa: RUF012  nobody changes the default
    """The result of each rank, packed. Ranks whose result is None are left out."""
    other: tuple[int, str] | None = None
    """A rank that does something else, and what it does."""
    failure: tuple[int, str] | None = None
    """The first rank that has failed, and its error in words."""
    failures: int = 0


def joined(own: StepReport, below: Sequence[tuple[int, StepReport]]) -> StepReport:
    """Returns the report of a rank with those of its children, each of which has its number."""
    others = ((child, report.step) if report.step != own.step else report.other for child, report in below)
    reports = [own, *(report for _, report in below)]
    return StepReport(
        own.step,
        {rank: result for report in reports for rank, result in report.results.items()},
        next(filter(None, others), None),
        min(filter(None, (report.failure for report in reports)), default=None, key=lambda failure: failure[0]),
        sum(report.failures for report in reports),
    )


class Answer(NamedTuple):
    """What rank 0 answers to all ranks at the end of a step."""

    common: bytes = b""
    """The packed value for all ranks."""
    each: Mapping[int, bytes] = {}
    """What rank 0 tells some ranks alone: the packed value, by rank."""
    report: StepReport | None = None
    """The report of all ranks, if a rank has failed or does something else."""
    error: tuple[str, str, dict[str, Any]] | None = None
    """The error that the decision of rank 0 has raised, from which every rank makes its own one: the class, the message
    and the attributes."""


def for_branches(answer: Answer, rank: int, children: Sequence[int]) -> list[Answer]:
    """Returns what ``rank`` passes on to each of its children: only the values for the child and for the ranks below
    it."""
    each: dict[int, dict[int, bytes]] = {child: {} for child in children}
    for other, value in answer.each.items():
        below = other
        while below > rank and parent(below) != rank:
            below = parent(below)
        if below > rank:
            each[below][other] = value
    return [answer._replace(each=each[child]) for child in children]
