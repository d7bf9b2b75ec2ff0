"""Compares ``zckpt.write`` with ``engine.save_checkpoint``, by its default and its FAST writer, on a ZeRO-3 engine.

    python bench/write_vs_deepspeed.py [--size 3GiB] [--dir DIR] [--runs 5]

The engine runs on 1 and on 2 ranks. It is a real one, a stack of Linear layers in bf16 with AdamW after one step, and
its state is in CPU memory. The time of each contestant includes making its files durable: the ranks fsync the files
that DeepSpeed has written for them (the FAST writer does so itself). "Raw" means that every rank writes as many bytes
by direct I/O.
"""

from __future__ import annotations

from common import CPU_PER_GIB_MAX, WRITE_SPEED_MIN, Result, cpu_per_gib, parse_options, speedup, workspace
from training import start_ranks, write_rounds

RANKS = {1: "1 rank", 2: "2 ranks"}


def main() -> None:
    options = parse_options(__doc__)
    result = Result("write_vs_deepspeed", "Write a ZeRO-3 engine, durable", options)
    for ranks, label in RANKS.items():
        with workspace(options, options.size) as directory:
            by_rank = start_ranks(write_rounds, ranks, directory, options.size, options.runs)
        rounds = by_rank[0]["rounds"]
        result.add(rounds, sum(rank["bytes"] for rank in by_rank), label)
        for writer, bound in (("default", 1.7), ("FAST", 1.2)):
            value = speedup(rounds, "zckpt", over=f"DeepSpeed, {writer}")
            result.at_least(f"write, {label}, against save_checkpoint, {writer} writer", value, bound)
        result.at_least(f"write, {label}, against raw O_DIRECT", speedup(rounds, "zckpt", over="raw"), WRITE_SPEED_MIN)
        used = cpu_per_gib(rounds["zckpt"], sum(rank["bytes"] for rank in by_rank))
        result.at_most(f"processor time of a write, {label}", used, CPU_PER_GIB_MAX, "s/GiB")
    result.finish()


if __name__ == "__main__":
    main()
