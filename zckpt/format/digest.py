"""xxh3-128 digests, and the blocks of a data file that they cover.

A data file is a sequence of regions: its header, then each entry in the order of its bytes. A region of n bytes is cut
into ceil(n / block_bytes) blocks. All blocks of a region have block_bytes bytes, except for the last one, which may be
shorter. So no block has bytes of two tensors, and a tensor can be verified without reading bytes of another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from zckpt.format.rules import broken

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Iterator

DIGEST_BYTES = 16
"""The size of a digest in bytes."""
BLOCK_BYTES = 1 << 20
"""The size of a full block in bytes, in every file that this library writes."""

Count = TypeVar("Count", int, NDArray[np.int64])

digest: Callable[[Buffer], bytes] = xxhash.xxh3_128_digest
"""Returns the xxh3-128 digest of some bytes: 16 bytes in the canonical (big-endian) order, computed with seed 0."""


def block_count(region_bytes: Count, block_bytes: int) -> Count:
    """Returns the number of blocks of a region of ``region_bytes`` bytes, or of each of several regions."""
    return -(-region_bytes // block_bytes)


def blocks(region_start: int, region_bytes: int, first_block: int, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields the number of each block of a region, its first byte in the file, and the byte behind its last one. The
    region begins at byte ``region_start`` of the file. Its first block has the number ``first_block``."""
    for number in range(block_count(region_bytes, block_bytes)):
        start = region_start + number * block_bytes
        yield first_block + number, start, min(start + block_bytes, region_start + region_bytes)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A data file from which bytes are read."""

    path: str
    """The path of the file, relative to the checkpoint's directory."""
    nbytes: int
    """The size of the file in bytes."""
    table: Callable[[], memoryview] = lambda: memoryview(b"")
    """Returns ``digests``. It may have to read them first."""

    @property
    def digests(self) -> memoryview:
        """The digests of the blocks of the file, 16 bytes each. It is empty if the digests are not compared."""
        return self.table()


def check_block(view: NDArray[np.uint8] | memoryview, block: int, file: ReadFile, start: int, key: str | None) -> None:
    """Raises FormatError if the digest table of a file has no digest of a block (D001), or another one (D003).
    ``view``: the bytes of the block. ``block``: its number, counted from the first block of the file. ``start``: its
    first byte in the file. ``key``: the key of its tensor."""
    expected = file.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
    if len(expected) != DIGEST_BYTES:
        raise broken("D001", f"the table has no digest of block {block}", file=file.path, key=key)
    if digest(view) != expected:
        raise broken(
            "D003", "the data is damaged", file=file.path, key=key, start=start, stop=start + view.nbytes,
            hint="restore the file from a copy, or load from another checkpoint",
        )  # fmt: skip
