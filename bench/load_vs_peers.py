"""Loading all weights to the CPU against torch.load, safetensors and PyTorch DCP.

    python bench/load_vs_peers.py [--size 3GiB] [--dir DIR] [--runs 5]

The same fp32 tensors in every format. What is loaded is the caller's own copy. Cold: the files are dropped from the
page cache; cached: they were read just before. Each allocates as it does for its users, fresh memory from the kernel,
which was in use until just before: a virtual machine gives back what it has not used for a while, and who is first to
touch it again would pay for all. Once more with a malloc that keeps freed memory, so that all load into memory that was
touched before. ``out=`` loads into tensors that the caller has; of the peers, only DCP can do that.
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
    aligned_memory,
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
    from collections.abc import Callable
    from pathlib import Path


TOUCHED = "cached, touched memory"


def main() -> None:
    options = parse_options(__doc__)
    best: dict[str, str] = {}
    peers: dict[str, list[float]] = {}
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
        for group, prepare, bound in (
            ("cold", drop_from_cache, 1.3),
            ("cached", bring_into_cache, 1.5),
            (TOUCHED, bring_into_cache, 1.5),
        ):
            if group == TOUCHED:
                keep_freed_memory()

            def before(path: Path, prepare: Callable[[Path], None] = prepare) -> None:
                prepare(path)
                aligned_memory(nbytes)

            contestants = [
                Contestant(label, partial(load, path), partial(before, path), partial(drop_from_cache, path))
                for label, (path, load) in loads.items()
            ]
            seconds = interleaved(contestants, options.runs)
            result.add(seconds, nbytes, group)
            best[group] = best_of(seconds, [label for label in loads if label != "zckpt"])
            value = speedup(seconds, "zckpt", over=best[group])
            result.at_least(f"load, {group}, against the best peer ({best[group]})", value, bound)
            peers[group] = seconds[best[group]]
        seconds = interleaved(
            [
                into_memory("zckpt, out=", checkpoint, lambda: zckpt.open(checkpoint).load("master/*", out=out)),
                into_memory("DCP, into tensors", directory / "DCP", lambda: dcp_load_into(out, directory / "DCP")),
            ],
            options.runs,
        )
        result.add(seconds, nbytes, "cached, into given memory")
        for group in ("cached", TOUCHED):
            value = speedup(seconds | {"peer": peers[group]}, "zckpt, out=", over="peer")
            result.at_least(f"load into given memory, cached, against {best[group]}, {group}", value, 4)
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
