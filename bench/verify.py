"""Measures the cost of digests: compares loads into existing memory that check digests with loads that do not.

    python bench/verify.py [--size 3GiB] [--dir DIR] [--runs 5]

A write always computes digests. So their share of a write is given as the time that one thread takes to compute the
digests alone, divided by the time of the write.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

import zckpt
from common import (
    CPU_PER_GIB_MAX,
    Contestant,
    Result,
    Timing,
    bring_into_cache,
    cpu_per_gib,
    cut,
    drop_from_cache,
    interleaved,
    loading,
    make_state,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from zckpt.format.digest import BLOCK_BYTES, digest
from zckpt.transfer.memory import host_bytes

if TYPE_CHECKING:
    from pathlib import Path

ON, OFF = "verified", "unverified"


def main() -> None:
    options = parse_options(__doc__)
    state = make_state(options.size)
    nbytes = total_bytes(state)
    result = Result("verify", "With digests and without", options)
    with workspace(options, 2 * options.size) as directory:
        path = directory / "checkpoint"

        def compute() -> None:
            for tensor in state.values():
                view = host_bytes(tensor)
                for start in range(0, len(view), BLOCK_BYTES):
                    digest(view[start : start + BLOCK_BYTES])

        write = Contestant("write", partial(write_checkpoint, path, cut(state)), before=partial(remove, path))
        rounds = interleaved([write, Contestant("digests alone", compute)], options.runs)
        result.add(rounds, nbytes, "write")
        result.extra["digest_share_of_write"] = 1 / speedup(rounds, "digests alone", over="write")
        other = directory / "other"  # a disk may be quicker with what another contestant has just read
        write_checkpoint(other, cut(state))

        def load(checkpoint: Path, *, verify: bool) -> None:
            zckpt.open(checkpoint).load(list(state), out=state, verify=verify)

        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            # Each label loads both checkpoints, because not all memory of a virtual machine, and not all places of a
            # disk, are equally quick.
            contestants = [
                loading(f"{label}, {checkpoint}", checkpoint, prepare, partial(load, verify=label == ON))
                for label, checkpoint in ((ON, path), (OFF, other), (ON, other), (OFF, path))
            ]
            rounds_of_both = interleaved(contestants, options.runs)
            rounds = {
                label: [
                    Timing(*map(statistics.mean, zip(*pair, strict=True)))
                    for pair in zip(*(rounds_of_both[f"{label}, {c}"] for c in (path, other)), strict=True)
                ]
                for label in (ON, OFF)
            }
            result.add(rounds, nbytes, group)
            if group == "cold":
                slower = (1 / speedup(rounds, ON, over=OFF) - 1) * 100
                result.at_most("digests on, against off, load cold: slower by", slower, 5, "%")
                used = cpu_per_gib(rounds[ON], nbytes)
                result.at_most("processor time of a load into given memory", used, CPU_PER_GIB_MAX, "s/GiB")
    result.finish()


if __name__ == "__main__":
    main()
