"""The bound on bytes in flight, and the workers that share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """``threads`` workers, each with one staging buffer; together they hold at most ``nbytes``."""

    nbytes: int = 256 * MIB
    threads: int = 4

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Runs ``tasks`` on the workers; raises the first failure, in their order, once none is running any more."""
        with ThreadPoolExecutor(self.threads, thread_name_prefix="zckpt") as pool:
            futures = [pool.submit(task) for task in tasks]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def batch_bytes(self, block_bytes: int) -> int:
        """Bytes of one read or write: whole blocks, 8 MiB where the budget allows, and never less than a block."""
        return max(min(8 * MIB, self.nbytes // self.threads) // block_bytes, 1) * block_bytes
