"""Compares zckpt with PyTorch's distributed checkpoints (DCP) for an FSDP2 model with AdamW, on 1 and on 2 ranks.

    python bench/fsdp_vs_dcp.py [--size 1.5GiB] [--dir DIR] [--runs 5]

The model is a stack of Linear layers in fp32 after one step, in CPU memory. Both libraries make their files durable.
DCP is called as in PyTorch's tutorial, with ``get_state_dict`` and ``set_state_dict``. Measured are the time of a
write, the time for which a write in the background stops the training, the time of a load whose files are in the page
cache and of one whose files are not, and the peak of the memory that a first write and a first load take, on top of the
model. A first load also makes the moments, whose bytes are two thirds of the state.
"""

from __future__ import annotations

from common import GIB, Result, parse_options, speedup, workspace
from training import fsdp_memory, fsdp_rounds, start_ranks

RANKS = {1: "1 rank", 2: "2 ranks"}


def main() -> None:
    options = parse_options(__doc__, size=3 * GIB // 2)
    result = Result("fsdp_vs_dcp", "An FSDP2 model, beside DCP", options)
    for ranks, label in RANKS.items():
        with workspace(options, 4 * options.size) as directory:
            by_rank = start_ranks(fsdp_rounds, ranks, directory, options.size, options.runs)
        nbytes = sum(rank["bytes"] for rank in by_rank)
        for what, rounds in by_rank[0]["rounds"].items():
            result.add(rounds, nbytes, f"{label}, {what}")
            bound = 1.0 if what.startswith("pause") else 1.7
            result.at_least(f"FSDP2, {label}, {what}, against DCP", speedup(rounds, "zckpt", over="DCP"), bound)
        with workspace(options, 2 * options.size) as directory:
            peaks = {
                library: start_ranks(fsdp_memory, ranks, directory, options.size, library)[0]
                for library in ("zckpt", "DCP")
            }
        for what in ("write", "load"):
            ours, theirs = (peaks[library][what]["peak_mib"] for library in ("zckpt", "DCP"))
            print(f"  {label:9} {what:6} peak of the first rank: zckpt {ours:7.1f} MiB, DCP {theirs:7.1f} MiB")
            if what == "write":
                result.at_most(f"FSDP2, {label}, memory of a write, against DCP", ours / theirs, 0.25, "x")
    result.finish()


if __name__ == "__main__":
    main()
