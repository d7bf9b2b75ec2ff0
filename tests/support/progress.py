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

    def assert_complete(self, action: str) -> int:
        """That ``action`` has begun once, all of its bytes have moved, and it has ended. Returns the bytes."""
        (told, nbytes), *moved, last = self.calls
        assert (told, last) == (action, ("end", 0))
        assert {what for what, _ in moved} <= {"advance"}
        assert sum(count for _, count in moved) == nbytes
        return nbytes
