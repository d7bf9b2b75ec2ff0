"""Keeps blocks of a remote checkpoint in a directory of a local disk. All processes of a machine share the directory,
at the same time and later, so each block is read from the store once."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from zckpt.errors import FormatError, UnsupportedError, from_os_error
from zckpt.progress import logger
from zckpt.storage.buffers import scatter
from zckpt.storage.location import Location
from zckpt.storage.process_names import left_over, own_temporary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Reader
    from zckpt.storage.location import StrPath

CACHE_BLOCK_BYTES = 4 << 20
"""The size in bytes of a block. The last block of a file may be shorter."""
LOCK_SECONDS = 10
"""How long a process waits for another one that reads the same block, in seconds. Then it reads the block itself."""
LOCKS = 64
"""How many blocks are read from stores at a time, at most, by all processes that share a directory."""
_DIGEST_BYTES = 16
"""The size in bytes of the digest at the end of the file of each block."""


class BlockCache:
    """A directory of blocks. Each block is a file, with a digest of its bytes at its end. Together they take at most
    half of the space that the disk would have free without them. The blocks that were not used for the longest time are
    removed first."""

    def __init__(self, directory: StrPath) -> None:
        """Makes the directory. Raises StorageError, and UnsupportedError if it is not on a file system."""
        if Location.of(directory).scheme:
            raise UnsupportedError("a cache has to be on a local disk", file=str(directory), hint="give a path")
        self._directory = Path(directory).absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise from_os_error(error, "make the cache", str(directory)) from error
        self._least_free_bytes = sys.maxsize
        """If fewer bytes are free on the disk, the cache has too many blocks. The first ``put`` finds out the
        number."""

    def files(self, path: str) -> Path:
        """Returns the directory of the blocks of the file with this URL."""
        key = f"{CACHE_BLOCK_BYTES} {path}".encode(errors="surrogateescape")
        return self._directory / f"{xxhash.xxh3_128_hexdigest(key)}.blocks"

    @contextmanager
    def lock(self, block: Path) -> Iterator[None]:
        """Holds a lock, so that one process at a time reads this block from the store. If the directory cannot be
        written, or another process holds the lock for long, several processes may do so."""
        from filelock import FileLock  # Most processes have no cache.

        number = xxhash.xxh3_64_intdigest(os.fsencode(block)) % LOCKS
        lock = FileLock(self._directory / f"{number}.lock", timeout=LOCK_SECONDS, poll_interval=0.005)
        try:
            lock.acquire()
        except OSError as error:  # also that of the time limit
            logger.debug("%s is not locked: %s", block, error)
        try:
            yield
        finally:
            lock.release()

    def get(self, block: Path) -> Bytes | None:
        """Returns the bytes of a block. Returns None if the block is not there or is damaged."""
        try:
            status = block.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > CACHE_BLOCK_BYTES + _DIGEST_BYTES:
                return None
            raw = np.fromfile(block, np.uint8)
        except OSError:
            return None
        with suppress(OSError):  # The block may belong to another user.
            os.utime(block)
        data, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
        return data if xxhash.xxh3_128_digest(data) == digest.tobytes() else None

    def put(self, block: Path, data: Bytes | memoryview) -> None:
        """Keeps a block. Does nothing if this fails, such as for lack of space."""
        part = Path(own_temporary(str(block)))
        try:
            block.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._directory).free < self._least_free_bytes:
                self._clean()
            with open(part, "wb") as file:
                file.write(data)
                file.write(xxhash.xxh3_128_digest(data))
            os.replace(part, block)
        except OSError as error:  # The cache only saves time.
            logger.debug("%s is not kept: %s", block, error)
            with suppress(OSError):
                part.unlink()

    def _clean(self) -> None:
        """Finds out how much space the blocks may take. Removes blocks until they take a little less, and the
        temporary files of dead processes."""
        found: list[tuple[float, int, Path]] = []
        for directory in self._directory.glob("*.blocks"):
            with suppress(FileNotFoundError):
                names = os.listdir(directory)
                for name in left_over(names):
                    (directory / name).unlink(missing_ok=True)
                for name in names:
                    with suppress(FileNotFoundError):
                        status = (directory / name).stat()
                        nbytes = max(status.st_size, getattr(status, "st_blocks", 0) * 512)
                        found.append((status.st_mtime, nbytes, directory / name))
        free = shutil.disk_usage(self._directory).free
        self._least_free_bytes = (free + sum(nbytes for _, nbytes, _ in found)) // 2
        wanted = self._least_free_bytes * 17 // 16 if free < self._least_free_bytes else 0
        for _, nbytes, path in sorted(found):
            if free >= wanted:
                break
            path.unlink(missing_ok=True)
            free += nbytes
            with suppress(OSError):  # It has other blocks.
                path.parent.rmdir()


class CachedReader:
    """Reads the files of a checkpoint through a cache. Only files in directories of the checkpoint are kept, because
    these never change. So its manifest is always read from the store."""

    direct = None

    def __init__(self, reader: Reader, checkpoint: Location, cache: BlockCache) -> None:
        """``reader``: reads the files from the store. ``checkpoint``: the directory of the checkpoint."""
        self.count = reader.count
        self._reader, self._checkpoint, self._cache = reader, checkpoint.absolute(), cache
        self._used: set[Path] = set()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        if "/" not in path:
            return self._reader.read(path, offset, nbytes)
        return b"".join(bytes(piece) for piece in self._pieces(path, offset, offset + nbytes))

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        if "/" not in path:
            return self._reader.read_into(path, views, offset)
        return scatter(self._pieces(path, offset, offset + sum(map(len, views))), views)

    def size(self, path: str) -> int:
        return self._reader.size(path)

    def close(self) -> None:
        self._reader.close()

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Removes the blocks of all files that were read if the code in the context finds that the checkpoint is
        damaged, because they may have been damaged on their way from the store."""
        try:
            yield
        except FormatError:
            for directory in self._used:
                shutil.rmtree(directory, ignore_errors=True)
            raise

    def _pieces(self, path: str, start: int, stop: int) -> Iterator[Bytes]:
        """Yields the bytes ``[start, stop)`` of a file piece by piece, or fewer if the file ends before."""
        directory = self._cache.files(str(self._checkpoint.child(path)))
        self._used.add(directory)
        for number in count(start // CACHE_BLOCK_BYTES):
            first = number * CACHE_BLOCK_BYTES
            if first >= stop:
                return
            data = self._block(path, directory / str(number), first)
            yield data[max(start - first, 0) : stop - first]
            if len(data) < CACHE_BLOCK_BYTES:
                return

    def _block(self, path: str, block: Path, start: int) -> Bytes:
        """Returns the block of a file that begins at the byte ``start``."""
        data = self._cache.get(block)
        if data is None:
            with self._cache.lock(block):
                data = self._cache.get(block)  # Another process may have put it there meanwhile.
                if data is None:
                    room = np.empty(CACHE_BLOCK_BYTES, np.uint8)
                    data = room[: self._reader.read_into(path, [room], start)]
                    self._cache.put(block, data)
        return data
