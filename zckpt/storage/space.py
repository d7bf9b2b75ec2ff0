"""Refuses to begin what would not fit: the bytes that are about to be written are compared with those that are free."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zckpt.errors import NoSpaceError

if TYPE_CHECKING:
    from zckpt.storage.contract import Store


class Space(NamedTuple):
    """What one process has found out about the directory that all ranks are about to write to."""

    location: str
    needed_bytes: int
    """How many bytes all ranks together are going to write."""
    free_bytes: int | None
    """How many bytes are free there; None where the store cannot know."""

    @classmethod
    def of(cls, store: Store, needed_bytes: int) -> Space:
        """Looks at a store whose directory exists. Raises nothing."""
        return cls(str(store.location), needed_bytes, store.free_bytes())

    def refuse_lack(self) -> None:
        """Raises NoSpaceError if more bytes are needed than are free: the same error on all ranks that are given the
        same values."""
        if self.free_bytes is not None and self.needed_bytes > self.free_bytes:
            raise NoSpaceError(
                f"{self.needed_bytes:,} bytes are needed, and {self.free_bytes:,} are free",
                file=self.location,
                hint="free space (`zckpt prune` and `zckpt gc` remove old checkpoints and leftovers) or write "
                "elsewhere; nothing was written, and no checkpoint was changed",
            )
