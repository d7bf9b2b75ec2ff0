"""What a validation has found: broken rules, and observations about values, which no rule is about."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from zckpt.errors import FormatError, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Level = Literal["structure", "digests", "deep"]
LEVELS: tuple[Level, ...] = ("structure", "digests", "deep")
"""The levels of a validation. Each of them checks everything that the one before it checks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that is broken. An attribute is None if it is not known."""

    rule: str
    """The number of the rule in the specification, such as ``"D003"``."""
    message: str
    """What is wrong."""
    file: str | None = None
    """The file that breaks the rule."""
    key: str | None = None
    """The key of the tensor that is concerned."""
    start: int | None = None
    """The first byte of the file that is concerned."""
    stop: int | None = None
    """The byte after the last one that is concerned."""

    @classmethod
    def of(cls, error: FormatError) -> Finding:
        return cls(error.rule or "?", error.message, error.file, error.key, error.start, error.stop)

    def __str__(self) -> str:
        span = f" bytes [{self.start}, {self.stop})" if self.start is not None else ""
        key = f" ({self.key})" if self.key else ""
        return f"{self.rule}  {self.file or ''}{span}{key}: {self.message}"


WHAT = {
    "nan": "elements are NaN",
    "inf": "elements are infinite",
    "negative": "elements are negative, where none can be",
    "unlike_master": "tensor is not its master, rounded",
}
"""The kinds of observations."""


@dataclass(frozen=True, slots=True, order=True)
class Observation:
    """Something unusual about the values of one tensor. It breaks no rule."""

    key: str
    """The key of the tensor."""
    kind: str
    """What is unusual: "nan", "inf", "negative" or "unlike_master"."""
    count: int
    """The number of elements that are concerned. It is 1 for the kind "unlike_master", which is about the tensor."""

    def __str__(self) -> str:
        return f"note  {self.key}: {self.count:,} {WHAT[self.kind]}"


@dataclass(frozen=True)
class Report:
    """What ``zckpt.validate`` has found."""

    path: str
    """The directory of the checkpoint."""
    level: Level
    """The level of the validation."""
    findings: tuple[Finding, ...] = ()
    """The rules that are broken, in the order of files and bytes."""
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
        """The sums of the observations by kind and part."""
        sums: dict[str, Counter[str]] = {}
        for one in self.observations:
            sums.setdefault(one.kind, Counter())[one.key.partition("/")[0]] += one.count
        return {kind: dict(sums[kind]) for kind in WHAT if kind in sums}

    def to_json(self) -> str:
        """One line, with the fields that ``docs/operations.md`` lists."""
        found: dict[str, Any] = {
            "path": self.path,
            "level": self.level,
            "ok": self.ok,
            "files": self.files,
            "bytes_read": self.bytes_read,
            "findings": [asdict(one) for one in self.findings],
            "observations": [asdict(one) for one in self.observations],
            "counts": self.counts,
        }
        return json.dumps(found)

    def __str__(self) -> str:
        verdict = "valid" if self.ok else f"{len(self.findings)} findings"
        notes = f", {len(self.observations)} notes" if self.observations else ""
        summary = f"{self.path}: {verdict}{notes} ({count(self.files, 'file')}, {self.bytes_read:,} bytes read)"
        return "\n".join([*map(str, self.findings), *map(str, self.observations), summary])


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sorted by file and bytes; what two checks have found is there once."""
    unique = {(one.rule, one.file, one.start, one.message): one for one in findings}
    return tuple(sorted(unique.values(), key=lambda one: (one.file or "", one.start or 0, one.rule, one.message)))


def failures(*checks: Callable[[], object]) -> list[FormatError]:
    """What these checks raise, each of them at most one error."""
    found: list[FormatError] = []
    for check in checks:
        try:
            check()
        except FormatError as error:
            found.append(error)
    return found
