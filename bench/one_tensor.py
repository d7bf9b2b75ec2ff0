"""Measures how long it takes to open a large checkpoint and load one tensor of 1 MiB.

    python bench/one_tensor.py [--size 3GiB] [--dir DIR] [--runs 20]

The checkpoint has one rank, three parts, and as many tensors of 1 MiB as fit. Its files are in the page cache. Each
round opens the checkpoint anew and loads another tensor.
"""

from __future__ import annotations

import statistics

import zckpt
from common import (
    MIB,
    PARTS,
    Contestant,
    Result,
    bring_into_cache,
    cut,
    fill,
    interleaved,
    parse_options,
    workspace,
    write_checkpoint,
)


def main() -> None:
    options = parse_options(__doc__, runs=20)
    state = fill({f"{part}/w{i}": (512, 512) for part in PARTS for i in range(options.size // len(PARTS) // MIB)})
    keys = iter(list(state) * (options.runs + 1))
    with workspace(options, options.size) as directory:
        path = directory / "checkpoint"
        write_checkpoint(path, cut(state))
        bring_into_cache(path)

        def load() -> None:
            key = next(keys)
            zckpt.open(path).load(key)

        rounds = interleaved([Contestant("open and load", load)], options.runs)
    result = Result("one_tensor", f"One tensor of 1 MiB out of {len(state)}, cached, open included", options)
    result.add(rounds, MIB)
    milliseconds = statistics.median(timing.seconds for timing in rounds["open and load"]) * 1e3
    result.at_most("one 1 MiB tensor, open included, cached", milliseconds, 5, "ms")
    result.finish()


if __name__ == "__main__":
    main()
