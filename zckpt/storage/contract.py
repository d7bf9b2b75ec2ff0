"""The contract of stores: all that is done to the place where checkpoints live goes through here.

A new store is a class with the methods of ``Store``, one line in the table of ``zckpt.storage.schemes``, and a test
class that derives from ``zckpt.testing.StoreContract``. What the methods have to do is said here, and nowhere else. A
package outside of zckpt adds its store with ``zckpt.storage.schemes.SCHEMES["s3"] = S3Store``, before it is first used.

- Several processes use a store at the same time, on several hosts. What a method has done, all of them see as soon as
  it has returned. Three methods are atomic: ``commit``, ``claim`` and ``withdraw``.
- What is *durable* outlives a loss of power. Where the durability of names needs nothing, ``sync_names`` does nothing.
- Files are made only in directories that ``make_directories`` has made and nobody has removed: elsewhere, ``put``,
  ``create`` and ``prepare`` raise StorageError, and ``claim`` returns False. A store without directories, such as an
  object store, marks them, for instance by empty objects, and looks for the mark.
- No path is a file and a directory at once: a method that would make it so raises StorageError and changes nothing;
  ``claim`` returns False.
- Every failure is a StorageError, a NoSpaceError where there is no space, with ``file=str(location of the file)``.
  Only the methods of ``Reader`` raise FormatErrors, too, which are no StorageErrors: MissingFileError (F001) for a
  file that is not there, FormatError (F002) for a link and for what is no regular file. Both are made by
  ``zckpt.format.rules.broken``: ``raise broken("F001", "the file is missing", file=...)``.

An object store that cannot rename has to do something of its own in ``commit``: one that copies ``prepared`` to
``path`` and then deletes it changes ``path`` though ``remove(prepared)`` has returned in between. For instance, both
first make a mark, by a write that succeeds only where there is none; who makes it wins, and a ``remove`` that comes
second waits for the commit, or carries it out itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from zckpt.state.inventory import FileSpan
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.location import Location


_COUNTING = threading.Lock()


@dataclass
class IOCount:
    """What a reader has asked of the store: read calls, and the bytes that they returned; and what became of them."""

    reads: int = 0
    """Requests to the store: one for all ``views`` of a ``read_into``, and one more each time that a request gave fewer
    bytes than asked for and the rest is asked for."""
    metadata_bytes: int = 0
    """What ``Reader.read`` has returned: of the manifest, the index, digest tables and headers."""
    data_bytes: int = 0
    """What all other reads have returned: of tensors."""
    copied_bytes: int = 0
    """The bytes of tensors in the host's memory that the processor has copied or converted from a staging buffer to
    their place. All others were read straight into their place."""

    def add(self, *, reads: int = 0, metadata_bytes: int = 0, data_bytes: int = 0, copied_bytes: int = 0) -> None:
        """Several threads may call it at once."""
        with _COUNTING:
            self.reads += reads
            self.metadata_bytes += metadata_bytes
            self.data_bytes += data_bytes
            self.copied_bytes += copied_bytes

    @property
    def bytes_read(self) -> int:
        return self.metadata_bytes + self.data_bytes


class Reader(Protocol):
    """Reads the files of a store. Several threads use it at once. What one call returns is of one content: of a file
    that is replaced meanwhile, the old or the new one. Of a file that is removed, it returns the old content or raises
    MissingFileError.

    Paths are those of the store. No link below the store's own directory is followed, where there are links. Every
    method raises MissingFileError (F001), FormatError (F002) and StorageError.
    """

    count: IOCount
    """Of all calls, whichever thread makes them."""

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` from byte ``offset``, or fewer at the end of the file."""

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views`` one after the other with tensor data from byte ``offset``; returns the bytes read, fewer only
        at the end of the file."""

    def size(self, path: str) -> int:
        """In bytes."""

    def close(self) -> None:
        """Gives back what the reader holds, such as open files. It is not used afterwards."""

    @property
    def direct(self) -> DirectReads | None:
        """What it can do beside ``read_into``; None: nothing, as in most stores."""


class DirectReads(Protocol):
    """Reads of tensor data past caches and past the host's memory. They count and raise as those of ``Reader`` do."""

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        """Whether most of these bytes are in memory already, so that ``read_into`` suits better. Starts no I/O."""

    def alignment(self, path: str) -> tuple[int, int]:
        """Two numbers of bytes, powers of two: for ``read_direct`` of this file, addresses of memory have to be
        multiples of the first one, offsets and lengths multiples of the second one."""

    def read_direct(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views``, one after the other, from byte ``offset``, past all caches; returns the bytes read: fewer at
        the end of the file, or 0 where this cannot be done. ``offset`` and all addresses and lengths are multiples of
        the numbers that ``alignment`` returns."""

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        """Fills ``target``, 1-D uint8 in device memory that nobody else is using, from byte ``offset``, past the host's
        memory; returns the bytes read: fewer at the end of the file, or 0 where this cannot be done."""


class Writer(Protocol):
    """One new file, which several threads write at once, each part of it once and in any order. Then ``sync`` is called
    once, and ``close``. When both have returned, the file has all that was written. Before, others may see no file, or
    one with any part of the content; after a ``close`` without ``sync``, that may be left of it. Every method raises
    StorageError or NoSpaceError."""

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        """Writes ``data`` to the file, from its byte ``offset`` on. ``data`` begins as far behind the start of a page
        of memory as ``offset`` lies behind the start of a page of the file, so that whole pages of the file are whole
        pages of memory. The caller changes ``data`` afterwards: keep no reference to it."""

    def sync(self) -> None:
        """Makes the data durable. Called once, after the last write has returned; not at all after an error."""

    def close(self) -> None:
        """Called once, whatever has happened before."""

    @property
    def sharing(self) -> PageSharing | None:
        """What it can do beside ``write``; None: nothing, as in most stores."""


class PageSharing(Protocol):
    """Parts of a file made of the pages of another one: instead of ``Writer.write``, they are shared, read back for
    their digests, and their edges written."""

    def share(self, source: FileSpan, offset: int) -> bool:
        """Makes all whole pages of the part from byte ``offset`` on those of a local file outside of any checkpoint,
        which takes neither time nor space. False where this cannot be done: then nothing has happened."""

    def read_back(self, room: Bytes, offset: int) -> None:
        """Reads the shared whole pages of the part from byte ``offset`` on into ``room``, which is as long as the part
        and lies as the ``data`` of ``write``."""

    def write_edges(self, data: Bytes | memoryview, offset: int) -> None:
        """Writes those bytes of ``data``, the part from byte ``offset`` on, that are no whole pages."""


class StoredFile(NamedTuple):
    """A file, as far as it takes space."""

    nbytes: int
    links: int
    """How many paths lead to it, in this and other directories. Its space is free once all of them are removed."""
    identity: Hashable
    """Equal for all paths that lead to it, and for no other file of the store."""


class Creator(Protocol):
    """Makes new files."""

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> Writer:
        """A new file, whose directory exists; StorageError if the file does. ``reserved_bytes``: at least so many will
        be written, so that its length does not depend on this; that there is no space for them should show here.
        ``direct``: to be written past all caches, where that can be done."""


class Store(Creator, Protocol):
    """A directory of checkpoints, or one checkpoint. Its files have paths relative to it, with ``/`` between their
    components; the empty path is the directory itself, which need not exist. To make a ``Store`` touches nothing."""

    @property
    def location(self) -> Location:
        """The Location that this store was made for."""

    @property
    def parent(self) -> Store:
        """The store at ``location.parent``."""

    def child(self, path: str) -> Store:
        """The store at ``location.child(path)``."""

    # What is there

    def reader(self) -> Reader: ...

    def exists(self, path: str) -> bool:
        """Whether anything is there, be it a link that leads nowhere. The store's own directory may be reached through
        links."""

    def entries(self) -> list[str] | None:
        """The names of all that is directly in the directory, in any order; None if there is no such directory,
        also where a file has that name."""

    def directories(self) -> list[str]:
        """The names of the directories directly in it, ascending; no links. StorageError if there is none."""

    def files(self, path: str) -> list[StoredFile]:
        """The file at ``path``, or all files in a directory and below it, in any order; none for what is not there.
        Raises nothing for what goes meanwhile."""

    def free_bytes(self) -> int | None:
        """How many more bytes this process may store in the directory, which exists; None where that cannot be known.
        Raises nothing."""

    # New files, beside those of ``create``

    def make_directories(self, path: str) -> None:
        """Makes the directory ``path``, and all above it, exist, durably, or raises and leaves nothing new. Nothing
        happens if it exists."""

    def share(self, path: str, source: Location) -> bool:
        """Makes ``path`` a new file with the bytes of the file ``source``, which is durable and never changed, without
        writing them: both share their pages, or are two names of one file. Durable but for its name. What becomes of
        one of them later, such as its removal, does not touch the other. False where this cannot be done, in most
        stores always: then nothing has happened. Raises nothing."""

    def put(self, path: str, data: bytes) -> None:
        """A new file with these bytes, whose directory exists; StorageError if the file does. Durable but for its
        name."""

    def sync_names(self, path: str) -> None:
        """Makes the names in a directory durable."""

    # Commits

    def prepare(self, path: str, data: bytes, digits: str = "") -> str:
        """Makes a temporary file with these bytes that is to replace ``path``. Its data are durable, its name is not.
        Returns its path, ``zckpt.format.names.temporary(path, digits)``, with eight random hexadecimal digits if none
        are given. Leaves nothing after an error. A temporary file that is there already is one, and may be
        gone then."""

    def commit(self, path: str, prepared: str) -> None:
        """Replaces ``path`` by the file ``prepared``, which is gone then. At every instant ``path`` holds either all of
        the new content or all of the old one, if there was one; the new one is durable on return. Raises StorageError,
        and changes nothing, if somebody has removed ``prepared``, be it just now."""

    # What goes

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all in it. Raises nothing: what cannot be removed stays. Of a ``remove``
        of what was prepared and its ``commit`` at the same time, one comes first: either the commit raises, or ``path``
        has its new content when ``remove`` returns."""

    def remove_if_empty(self, path: str) -> None:
        """Removes a directory if nothing is in it; not a file, and nothing above it. Raises nothing."""

    # Locks

    def claim(self, path: str, data: bytes) -> bool:
        """Makes a new file that has these bytes from its first instant; False if there is one already, or if its
        directory has gone. Of many who claim a path at once, one succeeds."""

    def withdraw(self, path: str, data: bytes) -> bool:
        """Removes a file that was claimed with ``data``; False if it holds something else, or is gone. Of many who
        withdraw it at once, one succeeds."""

    def touch(self, path: str) -> None:
        """Makes ``changed_at`` of a file now. Raises StorageError if there is none. A file that somebody withdraws or
        removes at the same time does not come back."""

    def changed_at(self, path: str) -> float | None:
        """When a file was last written, prepared or touched, in seconds of the store's own clock, which all hosts
        share; None if there is none. May be rounded to whole seconds, as ``now``."""

    def now(self) -> float:
        """By the same clock. The directory exists."""
