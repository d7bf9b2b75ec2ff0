"""Digests of the values of tensors, by which they are compared."""

from __future__ import annotations

import torch

from zckpt.format.digest import digest
from zckpt.transfer.memory import host_bytes
from zckpt.transfer.stored import in_order, with_values

PORTION_BYTES = 8 << 20
"""The most bytes of a tensor that a digest takes at a time."""
_STEP = -7046029254386353131
"""2^64 divided by the golden ratio, rounded to an odd number, as a signed number."""
_MIXING = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""The shifts and factors of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014,
with the numbers that Stafford has found, "Mix13")."""


def values_digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the values of a tensor, which may be on any device or in a file. It is made of the digests of
    its portions. Raises StorageError."""
    flat = in_order(tensor.detach()).view(-1)
    count = PORTION_BYTES // flat.itemsize
    portions = (with_values(flat[first : first + count]).cpu() for first in range(0, flat.numel(), count))
    return digest(b"".join(digest(host_bytes(portion)) for portion in portions))


def replica_digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the values of a contiguous tensor, to compare them with those of other ranks, whose
    tensors are on the same kind of device. On a GPU, it is computed there, so that the values are not copied."""
    if tensor.device.type != "cuda":
        return values_digest(tensor)
    return digest(host_bytes(portion_sums(tensor).cpu()))


def portion_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what ``hashed_sum`` returns for each portion of a contiguous tensor, as int64 on the device of the
    tensor. The words are the bytes of the portion, eight at a time."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    sums = []
    for first in range(0, len(flat), PORTION_BYTES):
        portion = flat[first : first + PORTION_BYTES]
        # The copy begins at an address at which an int64 may lie.
        sums.append(hashed_sum(torch.nn.functional.pad(portion, (0, -len(portion) % 8)).clone().view(torch.int64)))
    return torch.stack(sums)


def hashed_sum(words: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns the sum, modulo 2^64, of a hash of each of ``words``, as an int64 on their device. The hash depends on
    the word, which is an int64, and on its place, which is counted from ``first``. If it were a mere product of the
    two, some changes of two words would always leave the sum as it is, such as other signs of two numbers. With this
    hash, other words have the same sum only by chance, once in 2^64 times."""
    hashes = torch.arange(first, first + len(words), dtype=torch.int64, device=words.device) * _STEP
    hashes += words
    for shift, factor in _MIXING:
        hashes ^= (hashes >> shift) & ((1 << 64 - shift) - 1)  # The shift repeats the sign, and the mask drops it.
        hashes *= factor
    return hashes.sum()
