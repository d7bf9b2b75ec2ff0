"""What a validation has found: broken rules, and observations about values, which no rule is about."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from zckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Level = Literal["structure", "digests", "deep"]
LEVELS: tuple[Level, ...] = ("structure", "digests", "deep")
"""Each checks all that the one before it does."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that is broken. ``start`` and ``stop`` are bytes of ``file``; what is unknown is None."""

    rule: str
    message: str
    file: str | None = None
    key: str | None = None
    start: int | None = None
    stop: int | None = None

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
    """Something odd about the values of one tensor. It breaks no rule."""

    key: str
    kind: str
    """One of ``WHAT``."""
    count: int
    """Elements; of kind "unlike_master" 1, for the tensor."""

    def __str__(self) -> str:
        return f"note  {self.key}: {self.count:,} {WHAT[self.kind]}"


@dataclass(frozen=True)
class Report:
    """What ``zckpt.validate`` found. ``ok`` if no rule is broken, whatever the values are."""

    path: str
    level: Level
    findings: tuple[Finding, ...] = ()
    """In the order of files and bytes."""
    observations: tuple[Observation, ...] = ()
    """At level "deep". In the order of keys."""
    files: int = 0
    """Files checked."""
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
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
        summary = f"{self.path}: {verdict}{notes} ({self.files} files, {self.bytes_read:,} bytes read)"
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
