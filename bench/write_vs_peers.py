"""Compares writing tensors in CPU memory with torch.save, safetensors and PyTorch DCP.

    python bench/write_vs_peers.py [--size 3GiB] [--dir DIR] [--runs 5]

All contestants write from the same memory, and all files are durable: the time of a peer includes the fsync of its
files.
"""

from __future__ import annotations

from functools import partial

from common import (
    Contestant,
    Result,
    cut,
    interleaved,
    make_state,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from peers import SAVES


def main() -> None:
    options = parse_options(__doc__)
    state = make_state(options.size)
    with workspace(options, options.size) as directory:
        path = directory / "written"
        contestants = [Contestant("zckpt", partial(write_checkpoint, path, cut(state)), after=partial(remove, path))]
        contestants += [
            Contestant(label, partial(save, state, path), after=partial(remove, path)) for label, save in SAVES.items()
        ]
        rounds = interleaved(contestants, options.runs)
    result = Result("write_vs_peers", "Write tensors in CPU memory, durable", options)
    result.add(rounds, total_bytes(state))
    for label in SAVES:
        result.at_least(f"write, against {label}", speedup(rounds, "zckpt", over=label), 1.7)
    result.finish()


if __name__ == "__main__":
    main()
