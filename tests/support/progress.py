"""A progress that keeps what it is told."""

from __future__ import annotations


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def begin(self, action: str, nbytes: int) -> None:
        self.calls.append((action, nbytes))

    def advance(self, nbytes: int) -> None:
        self.calls.append(("advance", nbytes))

    def end(self) -> None:
        self.calls.append(("end", 0))
