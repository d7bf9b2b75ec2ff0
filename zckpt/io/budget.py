"""The bound on bytes in flight."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """``threads`` workers, each with one staging buffer; together they hold at most ``nbytes``."""

    nbytes: int = 256 * MIB
    threads: int = 4

    def batch_bytes(self, block_bytes: int) -> int:
        """Bytes of one read or write: whole blocks, 8 MiB where the budget allows, and never less than a block."""
        return max(min(8 * MIB, self.nbytes // self.threads) // block_bytes, 1) * block_bytes
