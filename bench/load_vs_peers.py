"""Compares loading all weights to the CPU with torch.load, safetensors and PyTorch DCP.

    python bench/load_vs_peers.py [--size 3GiB] [--dir DIR] [--runs 5]

Every format has the same fp32 tensors, and every load returns tensors that own their memory. "Cold" means that the
files were dropped from the page cache, and "cached" that they were read just before.

Each contestant allocates memory as it does for its users: fresh memory from the kernel. A virtual machine reports free
memory to its host every two seconds, and the host takes it. A contestant that touches such memory again loses up to a
second. Therefore the bench touches as much memory as a contestant needs, waits for the end of a report, and frees the
memory just before the contestant begins. After a report, the first access to each page of the machine may take many
times as long, so the garbage collector visits the memory of Python before the time begins. A contestant that takes
longer than two seconds may still be disturbed by the next report.

The cached loads are measured a second time into memory that was touched before: zckpt and DCP load into tensors that
the caller has (``out=``), and the others use a malloc that keeps freed memory. "Raw" reads a file of as many bytes by
direct I/O in several threads, into as much fresh memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

import zckpt
from common import (
    CPU_PER_GIB_MAX,
    READ_SPEED_MIN,
    Result,
    bring_into_cache,
    cpu_per_gib,
    cut,
    drop_from_cache,
    empty_like,
    fastest,
    interleaved,
    loading,
    make_state,
    parse_options,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from peers import SAVES, dcp_load, dcp_load_into, safetensors_load, safetensors_pread, torch_load
from raw_io import Raw, keep_freed_memory, prepared_with_free_memory, return_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


BOUNDS = {"cold": 1.3, "cached": 1.5}
"""The least speedup over the best peer. Loads into touched memory have no bound, because there the best peer copies as
fast as the memory can."""


def main() -> None:
    options = parse_options(__doc__)
    state = make_state(options.size, ["master"])
    nbytes = total_bytes(state)
    return_freed_memory()
    result = Result("load_vs_peers", "Load all weights to the CPU", options)
    with workspace(options, 5 * options.size) as directory:
        checkpoint = directory / "checkpoint"
        write_checkpoint(checkpoint, cut(state))
        for label, save in SAVES.items():
            save(state, directory / label)
        raw, file = Raw(), directory / "raw"
        raw.write(file, raw.again(nbytes))
        out = empty_like(state)
        state.clear()
        loads: dict[str, tuple[Path, Callable[[Path], object]]] = {
            "zckpt": (checkpoint, lambda path: zckpt.open(path).load("master/*")),
            "torch.load": (directory / "torch.save", torch_load),
            "safetensors, map copied": (directory / "safetensors", safetensors_load),
            "safetensors, pread": (directory / "safetensors", safetensors_pread),
            "DCP": (directory / "DCP", dcp_load(out)),
        }
        peers = [label for label in loads if label != "zckpt"]
        check_equal(zckpt.open(checkpoint).load("master/*"), torch_load(directory / "torch.save"))
        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            before = prepared_with_free_memory(prepare, nbytes)
            contestants = [loading(label, path, before, load) for label, (path, load) in loads.items()]
            if group == "cold":
                contestants.append(loading("raw", file, before, raw.read))
            rounds = interleaved(contestants, options.runs)
            result.add(rounds, nbytes, group)
            best = fastest(rounds, peers)
            value = speedup(rounds, "zckpt", over=best)
            result.at_least(f"load, {group}, against the best peer ({best})", value, BOUNDS[group])
            if group == "cold":
                value = speedup(rounds, "zckpt", over="raw")
                result.at_least("load, cold, against raw O_DIRECT", value, READ_SPEED_MIN)
                used = cpu_per_gib(rounds["zckpt"], nbytes)
                result.at_most("processor time of a load", used, CPU_PER_GIB_MAX, "s/GiB")
        keep_freed_memory()
        loads |= {
            "zckpt": (checkpoint, partial(load_into, out)),
            "DCP": (directory / "DCP", partial(dcp_load_into, out)),
        }
        contestants = [loading(label, path, bring_into_cache, load) for label, (path, load) in loads.items()]
        result.add(interleaved(contestants, options.runs), nbytes, "cached, touched memory")
    result.finish()


def load_into(out: dict[str, torch.Tensor], path: Path) -> None:
    zckpt.open(path).load("master/*", out=out)


def check_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


if __name__ == "__main__":
    main()
