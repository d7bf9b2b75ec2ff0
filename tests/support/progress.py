"""A progress that records its calls."""

from __future__ import annotations


class RecordedProgress:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def begin(self, action: str, nbytes: int) -> None:
        self.calls.append((action, nbytes))

    def advance(self, nbytes: int) -> None:
        self.calls.append(("advance", nbytes))

    def end(self) -> None:
        self.calls.append(("end", 0))

    def assert_complete(self, action: str) -> int:
        """Checks that ``action`` has begun once, that all of its bytes have moved, and that it has ended.

        Returns the number of bytes.
        """
        (begun, nbytes), *advances, last = self.calls
        assert (begun, last) == (action, ("end", 0))
        assert {call for call, _ in advances} <= {"advance"}
        assert sum(count for _, count in advances) == nbytes
        return nbytes
