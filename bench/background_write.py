"""How long training is stopped by a write in the background, against copying the same state once in memory.

    python bench/background_write.py [--size 3GiB] [--dir DIR] [--runs 5]

A ZeRO-3 engine on 1 rank, its state in CPU memory. Measured is the time until ``zckpt.write(background=True)``
returns: training may then go on. With ``snapshot="lazy"`` it returns before anything is copied, and the next optimizer
step waits for what is not copied then. The copy is torch's, with all cores, into memory that was touched before, and
into fresh memory, which is what a snapshot needs too.
"""

from __future__ import annotations

from common import Result, parse_options, speedup, workspace
from training import background_rounds, start_ranks


def main() -> None:
    options = parse_options(__doc__)
    with workspace(options, options.size) as directory:
        (found,) = start_ranks(background_rounds, 1, directory, options.size, options.runs)
    rounds = found["rounds"]
    result = Result("background_write", "Training stopped by a write in the background", options)
    result.add(rounds, found["bytes"])
    for memory in ("touched", "fresh"):
        value = speedup(rounds, f"copy into {memory} memory", over="zckpt, background")
        result.at_most(f"training stopped by a background write, over a copy into {memory} memory", value, 1)
    result.finish()


if __name__ == "__main__":
    main()
