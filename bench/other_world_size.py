"""Compares restoring a checkpoint of another world size with restoring one of the same world size.

    python bench/other_world_size.py [--size 3GiB] [--dir DIR] [--runs 5]

A ZeRO-3 engine on 2 ranks restores the same state from checkpoints that 2, 1 and 3 ranks have written. In the
checkpoint of 3 ranks, no piece ends where the share of one of the 2 ranks ends.
"""

from __future__ import annotations

from common import Result, parse_options, speedup, workspace
from training import other_world_rounds, start_ranks, write_once

READERS, WRITERS = 2, (2, 1, 3)


def main() -> None:
    options = parse_options(__doc__)
    result = Result("other_world_size", f"Restore on {READERS} ranks a checkpoint of another number of ranks", options)
    with workspace(options, len(WRITERS) * options.size) as directory:
        paths = {f"written by {ranks}": directory / str(ranks) for ranks in WRITERS}
        for ranks, path in zip(WRITERS, paths.values(), strict=True):
            written = start_ranks(write_once, ranks, options.size, path)
        measured = start_ranks(other_world_rounds, READERS, paths, options.size, options.runs)[0]
    for group in ("cold", "cached"):
        result.add(measured[group], sum(written), group)
        for ranks in WRITERS:
            if ranks != READERS:
                value = speedup(measured[group], f"written by {ranks}", over=f"written by {READERS}")
                result.at_least(f"restore, {group}, of {ranks} ranks by {READERS}, against the same", value, 0.7)
    result.finish()


if __name__ == "__main__":
    main()
