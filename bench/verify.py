"""What checking digests costs: loads into given memory with and without them.

    python bench/verify.py [--size 3GiB] [--dir DIR] [--runs 5]

A write cannot do without digests. So their cost there is given as the time that computing them takes alone, one thread,
over the time of the write.
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
    Took,
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
    result = Result("verify", "Digests on against off", options)
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

        def load(one: Path, *, verify: bool) -> None:
            zckpt.open(one).load(list(state), out=state, verify=verify)

        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            # Each label with both: memory of a virtual machine is not all equally quick, nor are all places of a disk
            contestants = [
                loading(f"{label}, {one}", one, prepare, partial(load, verify=label == ON))
                for label, one in ((ON, path), (OFF, other), (ON, other), (OFF, path))
            ]
            found = interleaved(contestants, options.runs)
            rounds = {
                label: [
                    Took(*map(statistics.mean, zip(*pair, strict=True)))
                    for pair in zip(*(found[f"{label}, {one}"] for one in (path, other)), strict=True)
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
