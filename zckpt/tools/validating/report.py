"""The result of a validation: rules that are broken, and observations about values, which no rule is about."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from zckpt.errors import FormatError, count, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Level = Literal["structure", "digests", "deep"]
LEVELS: tuple[Level, ...] = ("structure", "digests", "deep")
"""The levels of a validation. Each of them checks everything that the one before it checks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that a checkpoint breaks. An attribute is None if it is not known."""

    rule: str
    """The id of the rule in the specification, such as ``"D003"``."""
    message: str
    """What is wrong."""
    file: str | None = None
    """The file that breaks the rule."""
    key: str | None = None
    """The key of the tensor that the finding is about."""
    start: int | None = None
    """The first byte of the file that the finding is about, counted from 0."""
    stop: int | None = None
    """The byte of the file behind the last one that the finding is about."""

    @classmethod
    def of(cls, error: FormatError) -> Finding:
        """Makes a finding of an error that names a rule.

        Args:
            error: the error that a reader has raised.

        Returns:
            The finding.
        """
        return cls(error.rule or "?", error.message, error.file, error.key, error.start, error.stop)

    def __str__(self) -> str:
        span = f" bytes [{self.start}, {self.stop})" if self.start is not None else ""
        key = f" ({self.key})" if self.key else ""
        return printable(f"{self.rule}  {self.file or ''}{span}{key}: {self.message}")


WHAT = {
    "nan": "elements are NaN",
    "inf": "elements are infinite",
    "negative": "elements are negative, where none can be",
    "unlike_master": "tensor is not its master, rounded",
}
"""The kinds of observations, each with the words of a report that follow the number."""


@dataclass(frozen=True, slots=True, order=True)
class Observation:
    """Something unusual about the values of one tensor. It breaks no rule."""

    key: str
    """The key of the tensor."""
    kind: str
    """What is unusual: "nan", "inf", "negative" or "unlike_master"."""
    count: int
    """The number of unusual elements. It is 1 for the kind "unlike_master", which is about the whole tensor."""

    def __str__(self) -> str:
        return printable(f"note  {self.key}: {self.count:,} {WHAT[self.kind]}")


@dataclass(frozen=True)
class Report:
    """The result of ``zckpt.validate``."""

    path: str
    """The directory of the checkpoint."""
    level: Level
    """How much was checked: "structure", "digests" or "deep"."""
    findings: tuple[Finding, ...] = ()
    """The rules that the checkpoint breaks, in the order of files and bytes."""
    observations: tuple[Observation, ...] = ()
    """Unusual values, in the order of keys. They are looked for only at the level "deep"."""
    files: int = 0
    """The number of files that were checked."""
    bytes_read: int = 0
    """The number of bytes that were read."""

    @property
    def ok(self) -> bool:
        """Whether no rule is broken. Unusual values break no rule."""
        return not self.findings

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """For each kind of observation and each part, the sum of the counts of the observations."""
        sums: dict[str, Counter[str]] = {}
        for observation in self.observations:
            part = observation.key.partition("/")[0]
            sums.setdefault(observation.kind, Counter())[part] += observation.count
        return {kind: dict(sums[kind]) for kind in WHAT if kind in sums}

    def to_json(self) -> str:
        """Returns one line of JSON with the fields that ``docs/commands.md`` lists."""
        fields: dict[str, Any] = {
            "path": self.path,
            "level": self.level,
            "ok": self.ok,
            "files": self.files,
            "bytes_read": self.bytes_read,
            "findings": [asdict(finding) for finding in self.findings],
            "observations": [asdict(observation) for observation in self.observations],
            "counts": self.counts,
        }
        return json.dumps(fields)

    def __str__(self) -> str:
        verdict = "valid" if self.ok else count(len(self.findings), "finding")
        notes = f", {count(len(self.observations), 'note')}" if self.observations else ""
        summary = f"{self.path}: {verdict}{notes} ({count(self.files, 'file')}, {self.bytes_read:,} bytes read)"
        return "\n".join([*map(str, self.findings), *map(str, self.observations), printable(summary)])


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the findings in the order of files and bytes. A finding that two checks have made is there once."""
    unique = {(finding.rule, finding.file, finding.start, finding.message): finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda f: (f.file or "", f.start or 0, f.rule, f.message)))


def failures(*checks: Callable[[], object]) -> list[FormatError]:
    """Runs checks and returns the errors that they raise, at most one of each check."""
    errors: list[FormatError] = []
    for check in checks:
        try:
            check()
        except FormatError as error:
            errors.append(error)
    return errors
