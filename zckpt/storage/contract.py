"""The contract of stores. zckpt reads and changes the place where checkpoints are stored only by these methods.

A new store is a class with the methods of ``Store``, one line in the table of ``zckpt.storage.schemes``, and a test
class that derives from ``zckpt.testing.StoreContract``. This file alone defines what the methods have to do. A package
outside of zckpt adds its store by ``zckpt.storage.schemes.SCHEMES["s3"] = S3Store``, before the store is first used.

- Several processes on several hosts use a store at the same time. As soon as a method has returned, all of them see
  what it has done. Three methods are atomic: ``commit``, ``claim`` and ``withdraw``.
- Something is *durable* if it survives a loss of power. If the names in a store are always durable, ``sync_names`` does
  nothing.
- Files are made only in directories that ``make_directories`` has made and that nobody has removed. For any other
  directory, ``put``, ``create`` and ``prepare`` raise StorageError, and ``claim`` returns False. A store that has no
  directories, such as an object store, marks them, for instance by empty objects, and looks for the mark.
- No path is a file and a directory at once. A method that would make a path both raises StorageError and changes
  nothing. ``claim`` returns False instead.
- Every failure raises a StorageError with ``file=str(location of the file)``. If there is no space, it is a
  NoSpaceError. Only the methods of ``Reader`` also raise FormatErrors, which are not StorageErrors: MissingFileError
  (F001) if there is no such file, and FormatError (F002) if the path is a link or anything else that is not a regular
  file. ``zckpt.format.rules.broken`` makes both: ``raise broken("F001", "the file is missing", file=...)``.

An object store that cannot rename needs a ``commit`` of its own. If it copies ``prepared`` to ``path`` and then deletes
``prepared``, it may change ``path`` after ``remove(prepared)`` has returned, which the contract forbids. One solution
is that ``commit`` and ``remove`` both begin by making a mark, with a write that succeeds only if the mark does not
exist yet. The one that makes the mark goes first. If this is ``commit``, ``remove`` waits for the commit, or carries it
out itself.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import torch

    from zckpt.state.inventory import FileRange
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.location import Location


_COUNTING = threading.Lock()
if hasattr(os, "register_at_fork"):  # In a forked process, nobody would release it for a thread of the parent.
    os.register_at_fork(before=_COUNTING.acquire, after_in_parent=_COUNTING.release, after_in_child=_COUNTING.release)


@dataclass
class IOCount:
    """Counts what a reader has read from its store, and how many of these bytes were copied in memory."""

    reads: int = 0
    """The number of requests to the store. A ``read_into`` is one request for all its ``views``, and ``read_portions``
    one for each portion. If a request returns fewer bytes than it asked for, the request for the rest counts as another
    one."""
    metadata_bytes: int = 0
    """The number of bytes that ``Reader.read`` has returned: bytes of the manifest, the index, digest tables and
    headers."""
    data_bytes: int = 0
    """The number of bytes that all other reads have returned: bytes of tensors."""
    copied_bytes: int = 0
    """The number of bytes of tensors in host memory that the processor has copied or converted from a staging buffer to
    their target. All other bytes in host memory were read straight into their target."""

    def add(self, *, reads: int = 0, metadata_bytes: int = 0, data_bytes: int = 0, copied_bytes: int = 0) -> None:
        """Adds to the counts. Several threads may call this at once."""
        with _COUNTING:
            self.reads += reads
            self.metadata_bytes += metadata_bytes
            self.data_bytes += data_bytes
            self.copied_bytes += copied_bytes

    @property
    def bytes_read(self) -> int:
        """The number of bytes that all reads have returned."""
        return self.metadata_bytes + self.data_bytes


class Reader(Protocol):
    """Reads the files of a store. Several threads use one reader at the same time.

    The bytes that one call returns belong to one version of the file. If the file is replaced during the call, they are
    bytes of the old version or of the new one. If the file is removed during the call, the call returns the old content
    or raises MissingFileError.

    Paths are relative to the store's directory. No link below this directory is followed, if the store can have links.
    Every method raises MissingFileError (F001), FormatError (F002) and StorageError.
    """

    count: IOCount
    """The sum over all calls of all threads."""

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Returns ``nbytes`` bytes from byte ``offset`` on, or fewer if the file ends before. zckpt calls this for
        manifests, indexes, digest tables, headers, locks and the file ``latest``."""

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views`` one after the other from byte ``offset`` on. Returns the number of bytes read, which is
        smaller than the length of the views only if the file ends before. zckpt calls this for tensor data."""

    def size(self, path: str) -> int:
        """Returns the length of the file, in bytes."""

    def close(self) -> None:
        """Frees what the reader holds, such as open files. The reader is not used afterwards."""

    @property
    def direct(self) -> DirectReads | None:
        """The faster reads that this reader offers besides ``read_into``, or None if it offers none, as in most
        stores."""


class DirectReads(Protocol):
    """Reads tensor data past all caches, portion by portion through the caches, or straight into device memory. These
    methods count their bytes, and raise errors, as those of ``Reader`` do."""

    def is_cached(self, path: str, offset: int, nbytes: int) -> bool:
        """Returns whether most of these bytes, or most of some samples of them, are in memory already. Then it is
        faster to read them through the caches. Starts no I/O."""

    def read_portions(
        self, path: str, portions: Sequence[Sequence[Bytes | memoryview]], offset: int, use: Callable[[int], None]
    ) -> int:
        """Fills the views of all portions one after the other from byte ``offset`` on, through the caches. Calls
        ``use`` with the number of each portion that is full, before it reads the next one, because the bytes of a
        portion are in the processor's own cache only for a short time. Returns the number of bytes read, which is
        smaller than the length of all portions only if the file ends before. Raises what ``use`` raises."""

    def alignment(self, path: str) -> tuple[int, int]:
        """Returns the two alignments, in bytes, that ``read_direct`` needs for this file. Memory addresses have to be
        multiples of the first number, offsets and lengths multiples of the second one. Both are powers of two."""

    def read_direct(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views`` one after the other from byte ``offset`` on, past all caches. Returns the number of bytes
        read: fewer than asked for if the file ends before, and 0 if the file cannot be read in this way. The caller
        makes sure that ``offset`` and all addresses and lengths are multiples of the numbers that ``alignment``
        returns."""

    def read_to_device(self, path: str, target: torch.Tensor, offset: int) -> int:
        """Fills ``target`` from byte ``offset`` on, without a copy in host memory. ``target`` is a 1-D uint8 tensor in
        device memory that nobody else is using. Returns the number of bytes read: fewer than asked for if the file ends
        before, and 0 if the file cannot be read in this way."""


class Writer(Protocol):
    """Writes one new file.

    Several threads write the file at the same time: each part of it once, and the parts in any order. Then ``sync`` is
    called once, and ``close`` once. When both have returned, the file contains all that was written. Before that, other
    processes may see no file, or a file with any part of the content. A ``close`` without ``sync`` may leave such a
    file. Every method raises StorageError or NoSpaceError.
    """

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        """Writes ``data`` to the file from byte ``offset`` on. The address of ``data`` and ``offset`` have the same
        remainder when they are divided by ``PAGE_BYTES``, so each whole page of the file is a whole page of memory. The
        caller changes ``data`` as soon as this method has returned, so keep no reference to it."""

    def sync(self) -> None:
        """Makes the data durable. It is called once, after the last write has returned. After an error it is not called
        at all."""

    def close(self) -> None:
        """Closes the file. It is called once, after a success and after an error."""

    @property
    def sharing(self) -> PageSharing | None:
        """The way in which this writer can share pages with another file, or None if it cannot, as in most stores."""


class PageSharing(Protocol):
    """Makes parts of a new file out of the pages of another file, so that their bytes are not written.

    For each part, zckpt calls ``share`` instead of ``Writer.write``. If that succeeds, it calls ``read_back`` to
    compute the part's digests, and ``write_edges`` to write the bytes outside of whole pages.
    """

    def share(self, source: FileRange, offset: int) -> bool:
        """Makes the file use the pages of ``source`` for all whole pages of the part that begins at byte ``offset`` and
        is as long as ``source``. ``source`` is a range of a local file outside of any checkpoint. Sharing takes neither
        time nor space. Returns False, and changes nothing, if the pages cannot be shared."""

    def read_back(self, room: Bytes, offset: int) -> None:
        """Reads the shared whole pages of the part that begins at byte ``offset`` into ``room``. ``room`` is as long as
        the part, and is aligned like the ``data`` of ``Writer.write``."""

    def write_edges(self, data: Bytes | memoryview, offset: int) -> None:
        """Writes the bytes at both ends of a part that are not whole pages. ``data`` has all bytes of the part, which
        begins at byte ``offset``."""


class Entry(NamedTuple):
    """What is at a path of a store."""

    path: str
    """The path as it was given to ``Store.entry``, or relative to the directory that ``Store.entries`` has listed."""
    nbytes: int | None
    """The length of the file. None if this is a directory, a link, or anything else that is not a regular file."""
    changed_at: float
    """When the file was last written, prepared or touched, in seconds of the store's own clock, which is the same for
    all hosts. The time may be rounded to whole seconds, like the time that ``Store.now`` returns. If the entry comes
    from ``Store.entries``, the time may be an older one, and that of a directory means nothing."""
    is_directory: bool = False
    links: int = 1
    """How many paths in this and other directories lead to the file. Its space is free once all of them are removed."""
    identity: Hashable = None
    """A value that is equal for all paths that lead to this file, and different for all other files of the store. None
    means that no other path leads to it."""


class Creator(Protocol):
    """Makes new files."""

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> Writer:
        """Makes a new file in a directory that exists, and returns its writer. Raises StorageError if the file exists.
        At least ``reserved_bytes`` bytes will be written, so the length of the file does not depend on this number. A
        lack of space for them should raise an error here already. ``direct`` asks that the file be written past all
        caches, if the store can do this."""


class Store(Creator, Protocol):
    """A directory that contains checkpoints, or the directory of one checkpoint.

    Paths of files are relative to the directory, with ``/`` between their components. The empty path is the directory
    itself, which need not exist. Making a ``Store`` does no I/O.
    """

    @property
    def location(self) -> Location:
        """The location that this store was made for."""

    @property
    def parent(self) -> Store:
        """The store at ``location.parent``."""

    def child(self, path: str) -> Store:
        """Returns the store at ``location.child(path)``."""

    # Reading and listing

    def reader(self) -> Reader:
        """Returns a new reader of the files in this directory. The caller closes it."""

    def entry(self, path: str) -> Entry | None:
        """Returns what is at this path, or None if nothing is there. A link is not followed, and counts even if it
        leads nowhere. The store's own directory may be reached through links."""

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        """Returns everything that is directly in the directory ``path``, in any order. With ``deep``, returns all that
        is in and below the directory, except directories. Returns None if there is no such directory, also if a file
        has its name. What is removed during the call is left out, or returned, without an error."""

    def free_bytes(self) -> int | None:
        """Returns how many more bytes this process may store in the directory, which exists. Returns None if the store
        cannot know this. Raises nothing. zckpt calls this before a write, to refuse a write that would not fit."""

    # New files (``create`` is above)

    def make_directories(self, path: str) -> list[Location]:
        """Makes the directory ``path`` and all directories above it, and makes their names durable. Returns those that
        this very call has made, the innermost first, and none that was there or that another process has made at the
        same time. After an error, no new directory is left. zckpt calls this before it makes files in a directory, and
        removes the directories that a failed call has made if they are empty."""

    def share(self, path: str, source: Location) -> bool:
        """Makes a new file at ``path`` that has the bytes of the file ``source``, without writing them: the two files
        share their pages, or are two names of one file. zckpt calls this for a data file that another checkpoint has
        already. ``source`` is durable and never changes. The new file is durable except for its name. What later
        happens to one of the two files, such as its removal, does not affect the other one. Returns False, and changes
        nothing, if the file cannot be shared. Most stores always return False. Raises nothing."""

    def may_share(self, directory: Location) -> bool:
        """Returns whether ``share`` may succeed for files of ``directory``. Returns False if it cannot, for instance
        because ``directory`` is on another file system. zckpt calls this to find out how much space a write needs, when
        this store's own directory may not exist yet. Raises nothing."""

    def put(self, path: str, data: bytes) -> None:
        """Makes a new file with these bytes in a directory that exists. Raises StorageError if the file exists. The
        file is durable except for its name. zckpt calls this for small files, such as the index and the digest
        tables."""

    def sync_names(self, path: str) -> None:
        """Makes the names directly in the directory ``path`` durable. zckpt calls this after it has made or removed
        files there, and always before a commit."""

    # Commits

    def prepare(self, path: str, data: bytes, digits: str = "") -> str:
        """Makes a temporary file with these bytes, which ``commit`` will move to ``path``. Its content is durable, its
        name is not. Returns the path of the temporary file: ``zckpt.format.names.temporary(path, digits)``, with eight
        random hexadecimal digits if ``digits`` is empty. After an error, no file is left. Raises StorageError if the
        temporary file exists already, and may remove this file then."""

    def commit(self, path: str, prepared: str) -> None:
        """Replaces ``path`` by the file ``prepared``, which no longer exists afterwards. At every instant, ``path`` has
        either all of the new content or all of the old content, if there was any. The new content is durable on return.
        Raises StorageError, and changes nothing, if somebody has removed ``prepared``, even if that happened during the
        call. zckpt commits the manifest of a checkpoint, and then the file ``latest`` of the run."""

    # Removal

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with everything in it. Raises nothing: what cannot be removed stays. If a
        prepared file is removed and committed at the same time, one of the two calls comes first: either ``commit``
        raises, or ``path`` has its new content when ``remove`` returns."""

    def remove_if_empty(self, path: str) -> None:
        """Removes a directory if it is empty. Removes no file, and no directory above it. Raises nothing."""

    # The methods that ``zckpt.storage.lock`` calls. ``now`` is also called to find out how old a temporary file is.

    def claim(self, path: str, data: bytes) -> bool:
        """Makes a new file that has these bytes from its first instant on, and returns True. Returns False if the file
        exists already, or if its directory was removed. If several processes claim a path at the same time, one of them
        succeeds. A writer claims the lock of a checkpoint."""

    def withdraw(self, path: str, data: bytes) -> bool:
        """Removes a file that was claimed with ``data``, and returns True. Returns False if the file has other content,
        or does not exist. If several processes withdraw a file at the same time, one of them succeeds. A writer
        withdraws its own lock when it ends, or the lock of a dead writer."""

    def touch(self, path: str) -> None:
        """Sets the time ``changed_at`` of a file to now. Raises StorageError if there is no file. If somebody withdraws
        or removes the file at the same time, it must not come back. A writer touches its lock every few seconds, to
        show that it is alive."""

    def now(self) -> float:
        """Returns the time of the same clock as ``Entry.changed_at``, in seconds. The directory exists."""
