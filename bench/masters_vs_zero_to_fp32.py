"""Compares loading only the fp32 weights of a full checkpoint, as a state dict, with DeepSpeed's ``zero_to_fp32``.

    python bench/masters_vs_zero_to_fp32.py [--size 3GiB] [--dir DIR] [--runs 3]

A ZeRO-3 engine on 2 ranks writes both checkpoints. DeepSpeed's checkpoint is read by the function behind its script,
``get_fp32_state_dict_from_zero_checkpoint``. That function maps the files, so it reads little else, too, and it checks
nothing. Both contestants allocate fresh memory in each round, as they do for their users, who call them once. They
begin just after a virtual machine has reported free memory to its host, as in ``load_vs_peers.py``. The target for
bytes read is the number of bytes that zckpt asks the operating system for, divided by the bytes of the weights.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import torch

import zckpt
from common import (
    Result,
    bring_into_cache,
    drop_from_cache,
    interleaved,
    loading,
    parse_options,
    speedup,
    total_bytes,
    workspace,
)
from raw_io import prepared_with_free_memory, return_freed_memory
from training import start_ranks, write_once

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2


def with_deepspeed(path: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="tag")
    return weights


def with_zckpt(path: Path) -> dict[str, torch.Tensor]:
    return zckpt.open(path).state_dict(dtype=torch.float32)


def main() -> None:
    options = parse_options(__doc__, runs=3)
    return_freed_memory()
    result = Result("masters_vs_zero_to_fp32", "Load only the fp32 weights of a full checkpoint", options)
    with workspace(options, 2 * options.size) as directory:
        ours, theirs = directory / "zckpt", directory / "deepspeed"
        start_ranks(write_once, RANKS, options.size, ours, theirs)
        weights = with_zckpt(ours)
        expected = with_deepspeed(theirs)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
        nbytes = total_bytes(weights)
        weights, expected = {}, {}
        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            before = prepared_with_free_memory(prepare, nbytes)
            contestants = [
                loading("zckpt", ours, before, with_zckpt),
                loading("zero_to_fp32", theirs, before, with_deepspeed),
            ]
            rounds = interleaved(contestants, options.runs)
            result.add(rounds, nbytes, group)
            value = speedup(rounds, "zckpt", over="zero_to_fp32")
            result.at_least(f"fp32 weights alone, {group}, against zero_to_fp32", value, 1)
        checkpoint = zckpt.open(ours)
        checkpoint.state_dict(dtype=torch.float32)
        result.at_most("bytes read for the fp32 weights alone", checkpoint.io.bytes_read / nbytes, 1.05)
    result.finish()


if __name__ == "__main__":
    main()
