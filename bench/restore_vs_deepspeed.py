"""Compares ``zckpt.restore`` with ``engine.load_checkpoint`` into the same ZeRO-3 engine, and with raw direct reads.

    python bench/restore_vs_deepspeed.py [--size 3GiB] [--dir DIR] [--runs 5]

The engine runs on 1 and on 2 ranks. Each library loads what it has written from that engine: weights, both moments and
counters. The engine has trained a step, so its memory was touched before. "Cold" means that all files were dropped from
the page cache, and "cached" that they were read just before. "Raw" means that every rank reads a file of its own, of as
many bytes, straight into the whole pages of that same memory. "The transfer alone" means that zckpt reads all that a
restore reads, into the same memory, but derives no weights from it. Each contestant has its own files, because a disk
may be quicker with a file that another contestant has just read.
"""

from __future__ import annotations

from common import CPU_PER_GIB_MAX, READ_SPEED_MIN, Result, cpu_per_gib, parse_options, speedup, workspace
from training import TRANSFER, restore_rounds, start_ranks

RANKS = {1: "1 rank", 2: "2 ranks"}


def main() -> None:
    options = parse_options(__doc__)
    result = Result("restore_vs_deepspeed", "Restore into a live ZeRO-3 engine", options)
    for ranks, label in RANKS.items():
        with workspace(options, 4 * options.size) as directory:
            by_rank = start_ranks(restore_rounds, ranks, directory, options.size, options.runs)
        nbytes = sum(rank["bytes"] for rank in by_rank)
        cold, cached = by_rank[0]["cold"], by_rank[0]["cached"]
        result.add(cold, nbytes, f"{label}, cold")
        result.add(cached, nbytes, f"{label}, cached")
        result.at_least(
            f"restore, {label}, cold, against raw O_DIRECT", speedup(cold, "zckpt", over="raw"), READ_SPEED_MIN
        )
        used = cpu_per_gib(cold[TRANSFER], nbytes)
        result.at_most(f"processor time of the transfer, {label}, cold", used, CPU_PER_GIB_MAX, "s/GiB")
        for group, rounds, bound in (("cold", cold, 1.5), ("cached", cached, 4)):
            value = speedup(rounds, "zckpt", over="DeepSpeed")
            result.at_least(f"restore, {label}, {group}, against load_checkpoint", value, bound)
    result.finish()


if __name__ == "__main__":
    main()
