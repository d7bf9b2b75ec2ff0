"""Refuses a write that would not fit, before it begins: compares the bytes to be written with the free bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zckpt.errors import NoSpaceError

if TYPE_CHECKING:
    from zckpt.storage.contract import Store


class Space(NamedTuple):
    """The needed and the free space in the directory that all ranks are about to write to, as one process has found
    them."""

    location: str
    """The directory, as errors name it."""
    needed_bytes: int
    """How many bytes all ranks together are going to write."""
    free_bytes: int | None
    """How many bytes are free in the directory. None if the store cannot know."""

    @classmethod
    def of(cls, store: Store, needed_bytes: int) -> Space:
        """Returns the space of a store whose directory exists. Raises nothing."""
        return cls(str(store.location), needed_bytes, store.free_bytes())

    def refuse_lack(self) -> None:
        """Raises NoSpaceError if more bytes are needed than are free. Ranks that have the same values raise the same
        error."""
        if self.free_bytes is not None and self.needed_bytes > self.free_bytes:
            raise NoSpaceError(
                f"{self.needed_bytes:,} bytes are needed, and {self.free_bytes:,} are free",
                file=self.location,
                hint="free space (`zckpt prune` and `zckpt gc` remove old checkpoints and leftovers) or write "
                "elsewhere; nothing was written, and no checkpoint was changed",
            )
