"""The contract of stores. zckpt reads and changes the place where checkpoints are stored only by these methods.

The contract is that of an object store, such as S3: files are put as a whole, under conditions, and are listed by the
beginning of their paths. A new store is a class that derives from ``Store`` and has its abstract methods, one line in
the table of ``zckpt.storage.schemes``, and a test class that derives from ``zckpt.testing.StoreContract``. This file
alone defines what the methods have to do. A package outside of zckpt adds its store by an entry point of the group
``zckpt.stores``, whose name is the scheme, or by ``zckpt.storage.schemes.SCHEMES["my"] = MyStore`` in each process.

- Several processes on several hosts use a store at the same time, and several threads use one object. As soon as a
  method has returned, all of them see what it has done.
- Something is *durable* if it survives a loss of power.
- There are no directories to be made: a file may be put at any path, and what is in a directory is what has a path that
  begins with its name. A store that has directories makes those that a new file needs. zckpt never gives a file the
  path of a directory.
- Paths are of any characters that a file of Linux may have, except control characters.
- Every failure raises a StorageError with ``file=str(location of the file or directory)``, which
  ``zckpt.errors.from_os_error`` can make. If there is no space, it is a NoSpaceError. If the store could not be
  reached, the attribute ``transient`` of the error is set to true, and to try again later can help. Only the methods of
  ``Reader`` also raise FormatErrors, which are not StorageErrors: MissingFileError (F001) if there is no such file, and
  FormatError (F002) if the path is a link or anything else that is not a regular file. (A store without directories may
  raise F001 for the path of a directory.) ``zckpt.format.rules.broken`` makes both:
  ``raise broken("F001", "the file is missing", file=...)``.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from zckpt.errors import StorageError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import torch

    from zckpt.plan.inventory import FileRange
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.location import Location


GAP_BYTES = 512 << 10
"""The value of ``Store.gap_bytes`` in stores that set ``requests_in_flight``."""
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
        """Returns ``nbytes`` bytes from byte ``offset`` on, or fewer if the file ends before. ``nbytes`` may be far
        more than the file has, so the memory that this takes depends on the length of the file. zckpt calls this for
        manifests, indexes, digest tables, headers, locks and the file ``latest``."""

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        """Fills ``views`` one after the other from byte ``offset`` on. Each view is contiguous bytes, and may be empty.
        Returns the number of bytes read, which is smaller than the length of the views only if the file ends before.
        zckpt calls this for tensor data. ``zckpt.storage.buffers.scatter`` copies pieces of a file into views."""

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


def read_portions(
    reader: Reader, path: str, portions: Sequence[Sequence[Bytes | memoryview]], offset: int, use: Callable[[int], None]
) -> int:
    """Does what ``DirectReads.read_portions`` does. If the reader has none, calls ``use`` when all are full."""
    if reader.direct is not None:
        return reader.direct.read_portions(path, portions, offset, use)
    views = [view for of_portion in portions for view in of_portion]
    nbytes = reader.read_into(path, views, offset)
    if nbytes == sum(map(len, views)):
        for number in range(len(portions)):
            use(number)
    return nbytes


class Writer(Protocol):
    """Writes one new file.

    Several threads write the file at the same time: each part of it once, without gaps, and the parts in any order. A
    part may be empty. Then ``sync`` is called once, and ``close`` once. When both have returned, the file contains all
    that was written. Before that, other processes may see no file, or a file with any part of the content. A ``close``
    without ``sync`` may leave such a file. Every method raises StorageError or NoSpaceError.
    """

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        """Writes ``data``, which is contiguous bytes, to the file from byte ``offset`` on. The address of ``data`` and
        ``offset`` have the same remainder when they are divided by ``zckpt.storage.buffers.PAGE_BYTES``, so each whole
        page of the file is a whole page of memory. The caller changes ``data`` as soon as this method has returned, so
        keep no reference to it."""

    def is_next(self, offset: int) -> bool:
        """Returns whether the writer can pass on bytes from byte ``offset`` of the file on now. If a server takes the
        bytes only in the order of the file, False means that the writer would have to keep these until those in front
        of them are written. zckpt lets it keep bytes only if it could not go on otherwise."""

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
    """When the file was last put, also with the bytes that it had, in seconds of the store's own clock, which is the
    same for all hosts. For a file that ``create`` has made, this is not before its last write. The time may be rounded
    to whole seconds, like the time that ``Store.now`` returns. If the entry comes from ``Store.entries``, the time may
    be an older one, and that of a directory means nothing."""
    is_directory: bool = False
    links: int = 1
    """How many paths in this and other directories lead to the file. Its space is free once all of them are removed."""
    identity: Hashable = None
    """A value that is equal for all paths that lead to this file, and different for all other files of the store. None
    means that no other path leads to it."""


class UnfinishedUpload(NamedTuple):
    """The upload of a file that was begun. Nobody sees the file before the upload is finished."""

    path: str
    """The path of the file, relative to the store's directory."""
    nbytes: int
    """The number of bytes that the store keeps of the file."""
    upload_id: Hashable
    """A value by which the store tells apart the uploads of one path."""


class Creator(Protocol):
    """Makes new files."""

    @abstractmethod
    def create(self, path: str, nbytes: int, *, direct: bool, reserve: bool = True) -> Writer:
        """Makes a new file and returns its writer. Nobody else makes a file of this path at the same time. If there is
        a file already, it is replaced once ``close`` has returned after ``sync``, or StorageError is raised. zckpt
        replaces only exports and reports in this way, and on file systems none at all. ``nbytes`` is how many bytes
        will be written at least. With ``reserve``, a lack of space for them should raise an error here already. Without
        it, the file may share its pages with another one, and then needs no space. ``direct`` asks that the file be
        written past all caches, if the store can do this."""

    def open_range(self, path: str, *, direct: bool) -> Writer:
        """Opens a file that ``Store.make`` has made, to write whole pages of it. Other processes of this host write
        other pages at the same time. Only stores with ``divides_files`` need this."""
        raise UnsupportedError(f"{path}: this store does not let several processes write to one file")


class Anything(Enum):
    """The type of ``ANYTHING``."""

    ANYTHING = auto()


ANYTHING = Anything.ANYTHING
"""The condition of a put that always holds."""

Condition = bytes | None | Anything
"""What has to be at a path so that a put replaces it: a file with exactly these bytes, nothing (None), or
``ANYTHING``. Files that are put under a condition have bytes of their own. There are two exceptions: the heartbeats of
one lock, and the manifests of two copies of one checkpoint, of which it does not matter which one is there."""


class Prepared(Protocol):
    """A small file that is ready to be put at its path."""

    def commit(self, over: Condition = ANYTHING) -> None:
        """Puts the file at its path. At every instant, there are all of the new bytes or what was there before. They
        are durable on return. If ``over`` does not hold, or somebody has removed what was prepared, raises StorageError
        and changes nothing. zckpt commits the manifest of a checkpoint, over what was there when the write began, and
        then the file ``latest`` of the run."""

    def discard(self) -> None:
        """Removes what was prepared, unless it was committed. Raises nothing."""


class Store(Creator, ABC):
    """A directory that contains checkpoints, or the directory of one checkpoint.

    Paths of files are relative to the directory, with ``/`` between their components. The empty path is the directory
    itself, which need not exist. A location may end in slashes, which mean nothing, and may be that of a file. Then
    ``entry("")`` describes the file. Making a ``Store`` does no I/O, and raises nothing for a directory above the
    topmost one that the store can have: there, nothing is found.
    """

    requests_in_flight: int = 0
    """How many requests this store serves best at a time. 0 means as many as the budget has threads."""

    stops_commits: bool = False
    """Whether a commit fails once another process has removed the file that ``prepare`` has made. Then zckpt removes
    this file of a writer that it takes for dead, and after that also the data of this writer. In all other stores, only
    the condition of a commit stops a writer that was taken for dead. There, zckpt removes the data of others only after
    it has committed itself, or when they are old."""

    divides_files: bool = False
    """Whether several processes of a host can write parts of one new file. Then the store also has the methods ``make``
    and ``open_range``."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @property
    def gap_bytes(self) -> int:
        """The most bytes between two ranges of a file that are read and thrown away, because a further request would
        cost more. In the time that a further request takes, a network transfers about this many bytes."""
        return GAP_BYTES if self.requests_in_flight else 0

    @property
    def parent(self) -> Store:
        """The store at ``location.parent``."""
        return type(self)(self.location.parent)

    def child(self, path: str) -> Store:
        """Returns the store at ``location.child(path)``."""
        return type(self)(self.location.child(path))

    # Reading and listing

    @abstractmethod
    def reader(self) -> Reader:
        """Returns a new reader of the files in this directory. The caller closes it."""

    @abstractmethod
    def entry(self, path: str) -> Entry | None:
        """Returns what is at this path, or None if nothing is there. A link is not followed, and counts even if it
        leads nowhere. The store's own directory may be reached through links."""

    @abstractmethod
    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        """Returns everything that is directly in the directory ``path``, in any order. With ``deep``, returns all that
        is in and below the directory, except directories. Returns None if there is no such directory, also if a file
        has its name. What is removed during the call is left out, or returned, without an error."""

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """Returns the length in bytes of each of these files, which may be many. Raises what ``Reader.size`` raises."""
        with closing(self.reader()) as reader:
            return [reader.size(path) for path in paths]

    # Small files (``create`` makes large ones)

    @abstractmethod
    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        """Puts a file with these bytes at the path, and returns True. The file has all of them from its first instant
        on. In a store that does not override ``prepare``, it is durable on return. If ``over`` does not hold, returns
        False and changes nothing. If several processes call this for one path at the same time, with the same ``over``
        and different ``data``, one of them succeeds. If ``data`` is equal to ``over``, only the time ``changed_at``
        changes. A writer puts the lock of a checkpoint, and puts it again every few seconds to show that it is
        alive."""

    def put_new(self, path: str, data: bytes) -> None:
        """Makes a new file with these bytes, as ``create`` does. It is durable except for its name. zckpt calls this
        for the index and the digest tables."""
        writer = self.create(path, len(data), direct=False, reserve=False)
        try:
            writer.write(memoryview(data), 0)
            writer.sync()
        finally:
            writer.close()

    def prepare(self, path: str, data: bytes, digits: str = "") -> Prepared:
        """Prepares to put a file with these bytes at the path. What can fail beforehand, such as for lack of space,
        fails here. Then nothing is left. A store that needs a temporary file for this, which has to be durable except
        for its name, gives it the path ``zckpt.format.names.temporary(path, digits)``, with eight random hexadecimal
        digits if ``digits`` is empty."""
        return _PutLater(self, path, data)

    # Removal

    @abstractmethod
    def remove(self, *paths: str) -> None:
        """Removes files, and directories that are empty, one after the other. Raises nothing: what cannot be removed
        stays. If what was prepared is removed and committed at the same time, and the store ``stops_commits``, one of
        the two comes first: either ``commit`` raises, or the file is at its path when ``remove`` returns."""

    @abstractmethod
    def remove_if(self, path: str, data: bytes) -> bool:
        """Removes a file that has these bytes, and returns True. Returns False if the file has other bytes, or does not
        exist. If several processes do this at the same time, one of them succeeds. A writer removes its own lock in
        this way when it ends."""

    @abstractmethod
    def now(self) -> float:
        """Returns the time of the same clock as ``Entry.changed_at``, in seconds. zckpt calls this only if something is
        in the directory. The store may put a small file there, and remove it again."""

    # Only some object stores need these methods. The implementations below suit all other stores.

    def unfinished(self, age_seconds: float) -> list[UnfinishedUpload]:
        """Returns the uploads of files in and below the directory that were neither finished nor given up, and that
        were begun more than ``age_seconds`` seconds ago by the store's clock. Such an upload may still be under way, or
        its process may have died. Nobody sees the file, but it takes space until ``zckpt.gc`` gives the upload up."""
        return []

    def give_up(self, upload: UnfinishedUpload) -> None:
        """Removes what the store keeps of an upload that ``unfinished`` has returned. It cannot be finished then."""
        return

    def refuse_read_only(self) -> None:
        """Raises UnsupportedError if files can only be read in this store. Does no I/O."""
        return

    # Only file systems need these methods. The implementations below suit all other stores.

    def sync_names(self, path: str) -> None:
        """Makes the names directly in the directory ``path`` durable. zckpt calls this after it has made or removed
        files there, and always before a commit. In a store without this method, all names are durable at once."""
        return

    def remove_made(self) -> None:
        """Removes each directory above the files of this object that the object has made itself, and that is empty. The
        object is one that ``open_store``, ``child`` or ``parent`` has returned. Raises nothing but an interrupt. zckpt
        calls this after a write has failed."""
        return

    def free_bytes(self) -> int | None:
        """Returns how many more bytes this process may store in the directory, which exists. Returns None if the store
        cannot know this. Raises nothing. zckpt calls this before a write, to refuse a write that would not fit."""
        return None

    def make(self, path: str, nbytes: int, *, reserve: bool) -> None:
        """Makes a new file of ``nbytes`` zeros, of which processes of this host then write parts. ``reserve``: as for
        ``create``. Its content need not be durable. Only stores with ``divides_files`` need this."""
        raise UnsupportedError(f"{path}: this store does not let several processes write to one file")

    def share(self, path: str, source: Location) -> bool:
        """Makes a new file at ``path`` that has the bytes of the file ``source``, without writing them: the two files
        share their pages, or are two names of one file. zckpt calls this for a data file that another checkpoint has
        already. ``source`` is durable and never changes. The new file is durable except for its name. What later
        happens to one of the two files, such as its removal, does not affect the other one. Returns False, and changes
        nothing, if the file cannot be shared. Raises nothing."""
        return False

    def may_share(self, directory: Location) -> bool:
        """Returns whether ``share`` may succeed for files of ``directory``. Returns False if it cannot, for instance
        because ``directory`` is on another file system. zckpt calls this to find out how much space a write needs, when
        this store's own directory may not exist yet. Raises nothing."""
        return False


class _PutLater:
    """What ``Store.prepare`` returns where a put is atomic: the bytes are kept until the commit."""

    def __init__(self, store: Store, path: str, data: bytes) -> None:
        self._store, self._path, self._data = store, path, data

    def commit(self, over: Condition = ANYTHING) -> None:
        if not self._store.put(self._path, self._data, over):
            raise changed_meanwhile(self._store, self._path)

    def discard(self) -> None: ...


def changed_meanwhile(store: Store, path: str) -> StorageError:
    """Returns the error of a commit whose condition does not hold."""
    return StorageError(
        "another process has changed or removed it since this one began",
        file=str(store.location.child(path)),
        hint="let one process at a time write here",
    )
