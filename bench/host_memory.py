"""What it buys to find small tensors by their address: cached loads with it, and with a view of each tensor instead.

    python bench/host_memory.py [--size 3GiB] [--dir DIR] [--runs 5]

Of ``--size``, an eighth is loaded as tensors of 4 KiB, as tensors of 40 KiB, and as tensors of 16 MiB.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import zckpt
import zckpt.transfer.memory
from common import (
    KIB,
    MIB,
    Contestant,
    Result,
    bring_into_cache,
    cut,
    fill,
    interleaved,
    parse_options,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from zckpt.transfer.host_memory import HostMemory
from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from zckpt.plan.coalesce import Segments
    from zckpt.storage.buffers import Bytes

TENSOR_BYTES = (4 * KIB, 40 * KIB, 16 * MIB)
ADDRESS, VIEWS = "by address", "a view of each tensor"


class Views(HostMemory):
    """The same without addresses."""

    def __init__(self, targets: Sequence[torch.Tensor], stored: Sequence[torch.dtype]) -> None:
        super().__init__(targets, stored)
        pairs = zip(targets, stored, strict=True)
        self._views = [
            memoryview(host_bytes(one)) if one.is_cpu and one.dtype == dtype else None for one, dtype in pairs
        ]

    def destinations(self, segments: Segments) -> list[memoryview | None]:
        first = np.cumsum(segments.copies) - segments.copies
        alone = (segments.copies == 1) & (segments.copy_bytes[first] == segments.nbytes)
        start = segments.target[first]
        columns = (alone.tolist(), segments.sink[first].tolist(), start.tolist(), (start + segments.nbytes).tolist())
        return [
            view[at:stop] if one and (view := self._views[sink]) is not None else None
            for one, sink, at, stop in zip(*columns, strict=True)
        ]

    def put(self, target: int, start: int, staged: Bytes) -> bool:
        view = self._views[target]
        if view is not None:
            view[start : start + len(staged)] = staged
        return view is not None


def load(path: Path, out: dict[str, torch.Tensor], host_memory: type[HostMemory]) -> None:
    zckpt.transfer.memory.HostMemory = host_memory  # type: ignore[misc]
    try:
        zckpt.open(path).load("master/*", out=out)
    finally:
        zckpt.transfer.memory.HostMemory = HostMemory  # type: ignore[misc]


def main() -> None:
    options = parse_options(__doc__)
    result = Result("host_memory", "Targets in host memory by address, and by a view of each", options)
    with workspace(options, options.size // 8 * len(TENSOR_BYTES)) as directory:
        for nbytes in TENSOR_BYTES:
            count = max(options.size // 8 // nbytes, 1)
            state = fill({f"master/layers.{i}.weight": (nbytes // 4,) for i in range(count)})
            path = directory / str(nbytes)
            write_checkpoint(path, cut(state))
            bring_into_cache(path)
            gc.collect()
            gc.freeze()
            contestants = [
                Contestant(label, partial(load, path, state, kind))
                for label, kind in ((ADDRESS, HostMemory), (VIEWS, Views))
            ]
            rounds = interleaved(contestants, options.runs)
            group = f"{count:,} tensors of {nbytes // KIB:,} KiB"
            result.add(rounds, total_bytes(state), group)
            if nbytes < MIB:  # large ones take as long either way
                result.at_least(f"{ADDRESS} against {VIEWS}, {group}", speedup(rounds, ADDRESS, over=VIEWS), 1.05)
            gc.unfreeze()
    result.finish()


if __name__ == "__main__":
    main()
