"""xxh3-128 digests, and how a file is cut into the blocks that they cover.

A file is a sequence of regions: its header (from the first byte to the data), then each entry in the order of its
offset. A region of n bytes has ceil(n / block_bytes) blocks, all of block_bytes but the last; so a block never holds
bytes of two tensors, and a whole tensor is verified by reading nothing but itself.
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
BLOCK_BYTES = 1 << 20
"""The size of a full block in every file that this library writes."""

Count = TypeVar("Count", int, NDArray[np.int64])

digest: Callable[[Buffer], bytes] = xxhash.xxh3_128_digest
"""16 bytes: xxh3-128, seed 0, in the canonical (big-endian) order."""


def block_count(region_bytes: Count, block_bytes: int) -> Count:
    """Of one region, or of each of several."""
    return -(-region_bytes // block_bytes)


def blocks(region_start: int, region_bytes: int, first_block: int, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """``(block number, start, stop)`` of each block of one region; ``start`` and ``stop`` are bytes of the file."""
    for number in range(block_count(region_bytes, block_bytes)):
        start = region_start + number * block_bytes
        yield first_block + number, start, min(start + block_bytes, region_start + region_bytes)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A data file that is read."""

    path: str
    """The path of the file in its checkpoint."""
    nbytes: int
    """The size of the file in bytes."""
    digests: memoryview
    """The digests of the blocks of the file, 16 bytes each. It is empty if they are not to be checked."""


def check_block(view: NDArray[np.uint8] | memoryview, block: int, file: ReadFile, start: int, key: str | None) -> None:
    """Raises FormatError (D001, D003) unless ``view`` has the digest of ``block``."""
    expected = file.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
    if len(expected) != DIGEST_BYTES:
        raise broken("D001", f"the table has no digest of block {block}", file=file.path, key=key)
    if digest(view) != expected:
        raise broken(
            "D003", "the data is damaged", file=file.path, key=key, start=start, stop=start + view.nbytes,
            hint="restore the file from a copy, or load from another checkpoint",
        )  # fmt: skip
