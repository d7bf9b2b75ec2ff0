"""Loading all weights to the CPU against torch.load, safetensors and PyTorch DCP.

    python bench/load_vs_peers.py [--size 3GiB] [--dir DIR] [--runs 5]

The same fp32 tensors in every format. What is loaded is the caller's own copy. malloc keeps freed memory, so that the
tensors of every contestant lie in memory that was touched before. Cold: the files are dropped from the page cache;
cached: they were read just before. ``out=`` loads into tensors that the caller has; of the peers, only DCP can do that.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

import torch

import zckpt
from common import (
    Contestant,
    Result,
    bring_into_cache,
    cut,
    drop_from_cache,
    empty_like,
    interleaved,
    keep_freed_memory,
    make_state,
    parse_options,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from peers import SAVES, dcp_load, dcp_load_into, safetensors_load, safetensors_pread, torch_load

if TYPE_CHECKING:
    from pathlib import Path


def main() -> None:
    options = parse_options(__doc__)
    keep_freed_memory()
    state = make_state(options.size, ["master"])
    nbytes = total_bytes(state)
    result = Result("load_vs_peers", "Load all weights to the CPU", options)
    with workspace(options, 4 * options.size) as directory:
        checkpoint = directory / "checkpoint"
        write_checkpoint(checkpoint, cut(state))
        for label, save in SAVES.items():
            save(state, directory / label)
        out = empty_like(state)
        state.clear()
        loads = {
            "zckpt": (checkpoint, lambda path: zckpt.open(path).load("master/*")),
            "torch.load": (directory / "torch.save", torch_load),
            "safetensors, map copied": (directory / "safetensors", safetensors_load),
            "safetensors, pread": (directory / "safetensors", safetensors_pread),
            "DCP": (directory / "DCP", dcp_load(out)),
        }
        check_equal(zckpt.open(checkpoint).load("master/*"), torch_load(directory / "torch.save"))
        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            contestants = [
                Contestant(label, partial(load, path), partial(prepare, path), partial(drop_from_cache, path))
                for label, (path, load) in loads.items()
            ]
            seconds = interleaved(contestants, options.runs)
            result.add(seconds, nbytes, group)
            best = best_of(seconds, [label for label in loads if label != "zckpt"])
            value = speedup(seconds, "zckpt", over=best)
            result.at_least(f"load, {group}, against the best peer ({best})", value, 1.3 if group == "cold" else 1.5)
        seconds |= interleaved(
            [
                into_memory("zckpt, out=", checkpoint, lambda: zckpt.open(checkpoint).load("master/*", out=out)),
                into_memory("DCP, into tensors", directory / "DCP", lambda: dcp_load_into(out, directory / "DCP")),
            ],
            options.runs,
        )
        result.add({label: times for label, times in seconds.items() if label not in loads}, nbytes, "cached, given")
        best = best_of(seconds, [label for label in seconds if not label.startswith("zckpt")])
        value = speedup(seconds, "zckpt, out=", over=best)
        result.at_least(f"load into given memory, cached, against the best peer ({best})", value, 4)
    result.finish()


def into_memory(label: str, path: Path, load: object) -> Contestant:
    return Contestant(label, load, partial(bring_into_cache, path), partial(drop_from_cache, path))


def best_of(seconds: dict[str, list[float]], labels: list[str]) -> str:
    return min(labels, key=lambda label: statistics.median(seconds[label]))


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


if __name__ == "__main__":
    main()
