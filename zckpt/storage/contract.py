"""The place where checkpoints live: all that reading, writing, committing and cleaning up do to it goes through here.

A store without rename, such as an object store, can be one too: what has to be atomic is ``commit`` alone, and
directories and the durability of names may be nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from zckpt.state.inventory import FileSpan
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.location import Location


@dataclass
class IOCount:
    """What was asked of the operating system: read calls, and the bytes that they returned."""

    reads: int = 0
    metadata_bytes: int = 0
    """Of the manifest, the index, digest tables and headers."""
    data_bytes: int = 0
    """Of tensors."""

    @property
    def bytes_read(self) -> int:
        return self.metadata_bytes + self.data_bytes


class DirectReads(Protocol):
    """What a reader may offer beside ``Reader.read_into``: reads of tensor data that leave caches alone. They count as
    its own reads do, and raise the same errors."""

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        """Whether most of these bytes are in memory already, so that ``read_into`` is better. Starts no I/O."""

    def read_direct(self, path: str, pages: Bytes, offset: int) -> int:
        """Fills ``pages``, whole pages of memory, from byte ``offset``, a multiple of a page, past all caches; returns
        the bytes read: fewer at the end of the file, or 0 where that cannot be."""

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        """Fills ``target``, 1-D uint8 in device memory that nobody else is using, from byte ``offset``, past the host's
        memory; returns the bytes read: fewer at the end of the file, or 0 where that cannot be."""


class Reader(Protocol):
    """Reads files of a store, without following links inside of it. Safe to use from several threads.

    Raises FormatError (F001, F002) for a file that is missing, a link or no regular file, and StorageError.
    """

    count: IOCount

    @property
    def direct(self) -> DirectReads | None:
        """None where all reads are by ``read`` and ``read_into``."""

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` from byte ``offset``, or fewer at the end of the file."""

    def size(self, path: str) -> int:
        """In bytes."""

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views`` one after the other with tensor data from byte ``offset``; returns the bytes read, fewer only
        at the end of the file."""

    def close(self) -> None: ...


class PageSharing(Protocol):
    """What a writer may offer beside ``Writer.write``: to have the pages of another file in its own."""

    def share(self, source: FileSpan, offset: int) -> bool:
        """Makes all whole pages from byte ``offset`` on those of a local file outside of any checkpoint, which takes
        neither time nor space; the rest is left to ``write_edges``. False where that cannot be: then nothing has
        happened."""

    def read_back(self, stage: Bytes, offset: int, nbytes: int) -> None:
        """Fills the whole pages, which were shared, among the bytes that ``write`` would be given."""

    def write_edges(self, stage: Bytes, offset: int, nbytes: int) -> None:
        """Writes what is no whole page among the bytes that ``write`` would be given."""


class Writer(Protocol):
    """One new file, which several threads write at once, each part of it once. Every method raises StorageError."""

    @property
    def sharing(self) -> PageSharing | None:
        """None where all bytes have to be written."""

    def write(self, stage: Bytes, offset: int, nbytes: int) -> None:
        """Writes ``nbytes`` at byte ``offset``. They lie in ``stage``, which begins at a page of memory, as far behind
        its start as ``offset`` is behind the start of a page."""

    def sync(self) -> None:
        """Makes the data durable."""

    def close(self) -> None: ...


class Store(Protocol):
    """A directory: a checkpoint, or a run. Files have paths relative to it, with ``/`` between their components; the
    empty path is the directory itself, which need not exist. Every method that does not say otherwise raises
    StorageError or NoSpaceError."""

    @property
    def location(self) -> Location: ...

    @property
    def parent(self) -> Store:
        """The store at ``location.parent``."""

    def child(self, path: str) -> Store:
        """The store at ``location.child(path)``."""

    def reader(self) -> Reader: ...

    def exists(self, path: str) -> bool:
        """Whether anything is there, be it a link that leads nowhere. The root may be reached through links."""

    def entries(self) -> list[str] | None:
        """The names directly below the root; None if there is no such directory or prefix."""

    def directories(self) -> list[str]:
        """The names of the directories directly below the root, ascending; no links."""

    def nbytes(self, path: str) -> int:
        """Of a file, or of all in a directory; 0 if there is none, or what has gone meanwhile."""

    def make_directories(self, path: str) -> None:
        """Makes ``path``, and all above it, exist for every rank, durably, or leaves nothing of it."""

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> Writer:
        """A new file, whose directory exists. ``reserved_bytes``: what it will need at least; that there is no space
        for it should show here. ``direct``: past all caches, where the store can."""

    def put(self, path: str, data: bytes) -> None:
        """A new file with these bytes, durable but for its name."""

    def sync_names(self, path: str) -> None:
        """Makes the names in a directory durable."""

    def prepare(self, path: str, data: bytes, digits: str = "") -> str:
        """Makes a temporary file with these bytes that is to replace ``path``. Its data are durable, its name is not.
        Returns its name, ``names.temporary(path, digits)``, with random digits if none are given."""

    def commit(self, path: str, prepared: str) -> None:
        """Replaces ``path`` by the file ``prepared``; this is the commit. At every instant ``path`` holds either all of
        the new content or all of the old one; the new one is durable on return. It fails, and changes nothing, if
        somebody has removed ``prepared``."""

    def replace(self, path: str, data: bytes) -> None:
        """Calls ``prepare``, then ``commit``. If either fails, the temporary file is removed."""

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all in it. Raises nothing: what cannot be removed stays."""

    def remove_if_empty(self, path: str) -> None:
        """Removes a directory if nothing is in it. Raises nothing."""

    def claim(self, path: str, data: bytes) -> bool:
        """Makes a new file that has these bytes from its first instant, unless there is one: then False."""

    def withdraw(self, path: str, data: bytes) -> bool:
        """Removes a file that was claimed with ``data``; False if it holds something else, or is gone."""

    def touch(self, path: str) -> None:
        """As if it had been changed now."""

    def changed_at(self, path: str) -> float | None:
        """When a file was last changed or touched, in seconds of the store's own clock; None if there is none."""

    def now(self) -> float:
        """By the same clock."""
