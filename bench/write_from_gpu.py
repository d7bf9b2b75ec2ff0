"""Compares writing tensors from a GPU with torch.save, safetensors and PyTorch DCP. Needs a GPU.

    python bench/write_from_gpu.py [--size 3GiB] [--dir DIR] [--runs 5]

All contestants write from the same device memory, and all files are durable: the time of a peer includes the fsync of
its files. There are two limits: one copy of as many bytes to pinned memory that stays the same, and direct writes of as
many bytes from memory that stays the same. zckpt computes digests of all that it writes, and the others do not.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import torch

from common import (
    MIB,
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
from raw_io import Raw

if TYPE_CHECKING:
    from collections.abc import Callable

PINNED_BYTES = 256 * MIB
COPY, WRITE = "copy to pinned memory", "direct writes"


def main(device: str = "cuda") -> None:
    options = parse_options(__doc__)
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA GPU, and a torch that is built for it")
    state = {key: tensor.to(device) for key, tensor in make_state(options.size).items()}
    nbytes = total_bytes(state)
    raw = Raw()
    with workspace(options, options.size) as directory:
        path = directory / "written"
        contestants = [
            Contestant("zckpt", partial(write_checkpoint, path, cut(state)), after=partial(remove, path)),
            *(
                Contestant(label, partial(save, state, path), after=partial(remove, path))
                for label, save in SAVES.items()
            ),
            Contestant(COPY, copy_to_pinned(state)),
            Contestant(WRITE, partial(raw.write, path, raw.again(nbytes)), after=partial(remove, path)),
        ]
        rounds = interleaved(contestants, options.runs)
    result = Result("write_from_gpu", "Write tensors on a GPU, durable", options)
    result.add(rounds, nbytes)
    for label in SAVES:
        result.at_least(f"write from a GPU, against {label}", speedup(rounds, "zckpt", over=label), 1)
    slower = max((COPY, WRITE), key=lambda label: sum(timing.seconds for timing in rounds[label]))
    result.at_least(f"write from a GPU, against {slower}", speedup(rounds, "zckpt", over=slower), 0.9)
    result.finish()


def copy_to_pinned(state: dict[str, torch.Tensor]) -> Callable[[], None]:
    pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        for tensor in state.values():
            for part in tensor.view(-1).view(torch.uint8).split(PINNED_BYTES):
                pinned[: len(part)].copy_(part, non_blocking=True)
        torch.accelerator.synchronize()

    return copy


if __name__ == "__main__":
    main()
