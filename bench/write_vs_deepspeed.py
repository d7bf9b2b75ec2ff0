"""``zckpt.write`` against ``engine.save_checkpoint`` on one ZeRO-3 engine: its default writer, and its FAST writer.

    python bench/write_vs_deepspeed.py [--size 3GiB] [--dir DIR] [--runs 5]

On 1 and on 2 ranks. The engine is real: a stack of Linear layers in bf16 with AdamW, after a step, its state in CPU
memory. All is durable in the time measured: DeepSpeed's files are fsynced by the ranks that wrote them (the FAST writer
does so itself). Raw: every rank writes as many bytes by direct I/O.
"""

from __future__ import annotations

from common import WRITE_SPEED_MIN, Result, parse_options, speedup, workspace
from training import start_ranks, write_rounds

RANKS = {1: "1 rank", 2: "2 ranks"}


def main() -> None:
    options = parse_options(__doc__)
    result = Result("write_vs_deepspeed", "Write a ZeRO-3 engine, durable", options)
    for ranks, label in RANKS.items():
        with workspace(options, options.size) as directory:
            found = start_ranks(write_rounds, ranks, directory, options.size, options.runs)
        rounds = found[0]["rounds"]
        result.add(rounds, sum(rank["bytes"] for rank in found), label)
        for writer, bound in (("default", 1.7), ("FAST", 1.2)):
            value = speedup(rounds, "zckpt", over=f"DeepSpeed, {writer}")
            result.at_least(f"write, {label}, against save_checkpoint, {writer} writer", value, bound)
        result.at_least(f"write, {label}, against raw O_DIRECT", speedup(rounds, "zckpt", over="raw"), WRITE_SPEED_MIN)
    result.finish()


if __name__ == "__main__":
    main()
