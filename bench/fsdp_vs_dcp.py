"""Compares zckpt with PyTorch's distributed checkpoints (DCP) and, if it is installed, with torch_checkpointing 0.1,
for an FSDP2 model with AdamW, on 1 and on 2 ranks.

    python bench/fsdp_vs_dcp.py [--size 1.5GiB] [--dir DIR] [--runs 5]

The model is a stack of Linear layers in fp32 after one step, in CPU memory. All files are made durable: zckpt and DCP
do this themselves, and for torch_checkpointing the benchmark does. DCP is called as in PyTorch's tutorial, with
``get_state_dict`` and ``set_state_dict``. Measured are the time of a write, the time for which a write in the
background stops the training, the time of a load whose files are in the page cache and of one whose files are not, and
the peaks of memory, on top of the model: of a write in the background, of a write, and of a first load. zckpt copies
the state for a write in the background. A lazy snapshot copies only as much as its budget (``snapshot_bytes=0``), and
the next step waits for the rest; its memory is what is compared. A first load also makes the moments, whose bytes are
two thirds of the state. A write that stops the training copies nothing with any of the libraries, because the
state is in CPU memory.

"Raw" is direct I/O of as many bytes from and to the memory of the model. The disk may give more to a read through the
page cache: that of a virtual machine reads more slowly into small pages that are scattered over the memory, and the
page cache often has larger ones. Before each load, memory is freed as in ``load_vs_peers.py``, because DCP needs some
for the page cache.
"""

from __future__ import annotations

from importlib.util import find_spec

from common import GIB, Result, parse_options, speedup, workspace
from fsdp import TORCH_CHECKPOINTING, fsdp_memory, fsdp_rounds
from training import start_ranks

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
                for library in ("zckpt", "DCP", *([TORCH_CHECKPOINTING] if find_spec(TORCH_CHECKPOINTING) else []))
            }
        for what in ("write", "background", "load"):
            figures = {name: of_library[what]["peak_mib"] for name, of_library in peaks.items() if what in of_library}
            told = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in figures.items())
            print(f"  {label:9} {what:10} peak of the first rank: {told}")
            if what == "background":
                share = figures["zckpt"] / figures["DCP"]
                result.at_most(f"FSDP2, {label}, memory of a write in the background, against DCP", share, 0.25, "x")
    result.finish()


if __name__ == "__main__":
    main()
