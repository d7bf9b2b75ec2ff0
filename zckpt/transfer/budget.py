"""The bounds of input and output: the memory for staging buffers, the number of threads, and the use of direct I/O."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.errors import check_flags
from zckpt.plan.reads import STRAIGHT_BYTES_MAX

if TYPE_CHECKING:
    from zckpt.storage.contract import Store

MIB = 1 << 20
NBYTES, THREADS = 256 * MIB, 4
"""The default of each field of ``Budget`` with the same name."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory, the threads and the kind of I/O that a read or a write takes on every rank.

    Args:
        nbytes: the largest number of bytes that all staging buffers of a rank take together.
        threads: the number of threads that read and write. There are two more staging buffers than threads, if
            ``nbytes`` allow it, or two for each thread if copies to or from a device overlap with reads and writes. One
            further thread computes digests. What is in the page cache is read by no more threads than there are
            processors. An object store has its own number of threads, one for each request that it serves at a time, as
            far as ``nbytes`` allow it.
        direct: whether to go past the page cache if the file system allows it, so that a write does not fill it and a
            read evicts nothing. Pages that are in the cache already are read from there in any case.

    Raises:
        ValueError: ``nbytes`` are too few for ``threads``.
    """

    nbytes: int = NBYTES
    threads: int = THREADS
    direct: bool = True

    def __post_init__(self) -> None:
        for name, number in (("nbytes", self.nbytes), ("threads", self.threads)):
            if not hasattr(number, "__index__"):
                raise TypeError(f"{name} must be a whole number, got {number!r}")
        if self.threads < 1:
            raise ValueError(f"threads must be 1 or more, got {self.threads}")
        if self.nbytes < 2 * MIB * self.threads:
            raise ValueError(f"nbytes must be 2 MiB or more for each thread, got {self.nbytes} for {self.threads}")

    @classmethod
    def from_environment(cls) -> Budget:
        """Returns the default budget with the changes that the environment asks for.

        The variables are ZCKPT_BUDGET_BYTES, ZCKPT_THREADS and ZCKPT_DIRECT (0 or 1).

        Returns:
            The budget.

        Raises:
            ValueError: a variable has another value. The error names the variable.
        """
        return cls(_number("ZCKPT_BUDGET_BYTES", NBYTES), _number("ZCKPT_THREADS", THREADS), flag("ZCKPT_DIRECT", True))

    def serving(self, *stores: Store) -> Budget:
        """Returns the budget for reads from, or writes to, these stores.

        Args:
            stores: the stores. If one of them asks for a number of requests at a time, there are as many threads, or as
                many as the memory allows. Such a store copies the bytes of each request in memory, so half of the
                memory is left to it.

        Returns:
            The same budget if no store asks for a number of requests.
        """
        requests = max(store.requests_in_flight for store in stores)
        if not requests:
            return self
        # A request takes a staging buffer and as much memory of the store's, or, if it is straight, only the latter.
        threads = max(min(requests, self.nbytes // STRAIGHT_BYTES_MAX), 1)
        return Budget(max(self.nbytes // 2, 2 * MIB * threads), threads, self.direct)

    def batch_bytes(self, block_bytes: int) -> int:
        """Returns how many bytes one read or write moves through a staging buffer: 8 MiB if the budget allows it.

        Args:
            block_bytes: the number of bytes of a block of the checkpoint.

        Returns:
            A multiple of ``block_bytes``, and at least one block.
        """
        return max(min(8 * MIB, self.nbytes // self.threads - MIB) // block_bytes, 1) * block_bytes


def budget_or_default(budget: Budget | None) -> Budget:
    """Returns the budget that a caller has passed, or for None that of the environment. Raises TypeError for a value of
    another type, and the errors of ``Budget.from_environment``."""
    if not isinstance(budget, Budget | None):
        raise TypeError(f"budget must be a zckpt.Budget, such as zckpt.Budget(nbytes=256 << 20), got {budget!r}")
    return budget or Budget.from_environment()


def flag(variable: str, default: bool) -> bool:
    """Returns the value of an environment variable that is 0 or 1. Raises ValueError if it has another value."""
    value = os.environ.get(variable, "1" if default else "0")
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {value!r}")
    return value == "1"


def verifies(verify: bool | None) -> bool:
    """Returns whether blocks are compared with their digests. ``verify``: what the caller has passed. None means that
    the environment variable ZCKPT_VERIFY decides. Raises TypeError and ValueError for other values."""
    if verify is None:
        return flag("ZCKPT_VERIFY", True)
    check_flags(verify=verify)
    return verify


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    if not value.isdecimal():
        raise ValueError(f"{variable} must be a number, got {value!r}")
    return int(value)
