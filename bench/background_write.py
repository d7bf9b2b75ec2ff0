"""Compares how long a background write stops the training with the time of one copy of the same state in memory.

    python bench/background_write.py [--size 3GiB] [--dir DIR] [--runs 5]

The engine is a ZeRO-3 engine on 1 rank whose state is in CPU memory. The time of a background write ends when
``zckpt.write(background=True)`` returns, because the training may go on then. With ``snapshot="lazy"`` the call returns
before anything is copied, and the next optimizer step waits for those tensors that have not been copied by then. The
copy in memory is made by torch on all cores. It goes once into memory that was touched before and once into fresh
memory. A snapshot needs fresh memory, too.
"""

from __future__ import annotations

from common import Result, parse_options, speedup, workspace
from training import background_rounds, start_ranks


def main() -> None:
    options = parse_options(__doc__)
    with workspace(options, options.size) as directory:
        (measured,) = start_ranks(background_rounds, 1, directory, options.size, options.runs)
    rounds = measured["rounds"]
    result = Result("background_write", "How long a write in the background stops the training", options)
    result.add(rounds, measured["bytes"])
    for memory in ("touched", "fresh"):
        value = speedup(rounds, f"copy into {memory} memory", over="zckpt, background")
        result.at_most(f"training stopped by a background write, over a copy into {memory} memory", value, 1)
    result.finish()


if __name__ == "__main__":
    main()
