"""The groups of gloo of a job of ``torch.distributed``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zckpt.ranks.heartbeat import PERIOD_SECONDS

if TYPE_CHECKING:
    import threading

    from torch._C._distributed_c10d import Store

_FOREVER = timedelta(days=365)
"""The timeout of gloo once all ranks have connected. Gloo cannot tell a slow rank from one that hangs, so zckpt looks
at signs of life instead (``heartbeat``)."""


def connect(store: Store, name: str, number: int, size: int, timeout: timedelta, closed: threading.Event) -> Gloo:
    """Does what ``Job.connect`` does."""
    addresses = _Addresses(dist.distributed_c10d.PrefixStore(name, store), closed)
    gloo = dist.ProcessGroupGloo(addresses, number, size, timeout)
    gloo._set_default_timeout(_FOREVER)
    return Gloo(gloo, addresses)


class Gloo:
    """A group of gloo, with the store of its addresses. With TORCH_GLOO_LAZY_INIT=1, gloo connects only when a message
    is sent, and needs the addresses then."""

    def __init__(self, gloo: dist.ProcessGroupGloo, addresses: _Addresses) -> None:
        self._addresses = addresses
        self.rank, self.size = gloo.rank, gloo.size
        operations: Any = gloo  # torch has no types for these
        self.gather, self.scatter = operations.gather, operations.scatter
        self.alltoall_base = operations.alltoall_base


class _Addresses(dist.Store if dist.is_available() else object):  # type: ignore[misc]
    """The store by which the ranks tell each other their addresses. A wait for the address of another rank ends with an
    error once ``closed`` is set. It asks again and again, because no other thread can use the store while one thread
    waits in it. A clone of the store would do, too, but rank 0 would have one more connection to each rank."""

    def __init__(self, store: Store, closed: threading.Event) -> None:
        super().__init__()
        self._store, self._closed = store, closed

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pause = 0.001
        while not self._store.check(keys):
            if self._closed.wait(pause):
                raise RuntimeError("the wait was given up")
            pause = min(2 * pause, PERIOD_SECONDS / 4)
