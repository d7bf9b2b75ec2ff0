"""Loading all weights to a GPU against safetensors and the loaders that are made for it. Needs a GPU.

    pip install 'fastsafetensors>=0.5' 'instanttensor>=0.2' runai-model-streamer
    python bench/load_to_gpu.py [--size 3GiB] [--dir DIR] [--runs 5]

The same fp32 tensors, in zckpt's files and in one safetensors file; loaders that are not installed are left out. Of
these versions, all give tensors that own their memory. Cold: the files are dropped from the page cache; cached: they
were read just before. The limit: one copy of as many bytes from pinned memory that stays the same. zckpt checks
digests, the others check nothing; so once more without.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING

import safetensors.torch
import torch

import zckpt
from common import (
    MIB,
    Contestant,
    Result,
    bring_into_cache,
    cut,
    drop_from_cache,
    interleaved,
    make_state,
    parse_options,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from peers import safetensors_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peers import Tensors

PINNED_BYTES = 256 * MIB
LIMIT = "copy from pinned memory"


def main(device: str = "cuda") -> None:
    options = parse_options(__doc__)
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA GPU, and a torch that is built for it")
    result = Result("load_to_gpu", "Load all weights to a GPU", options)
    state = make_state(options.size, ["master"])
    nbytes = total_bytes(state)
    with workspace(options, 2 * options.size) as directory:
        ours, theirs = directory / "checkpoint", directory / "safetensors"
        write_checkpoint(ours, cut(state))
        safetensors_save(state, theirs)
        peers = {label: load for label, (package, load) in PEERS.items() if importlib.util.find_spec(package)}
        loads: dict[str, tuple[Path, Callable[[Path, str], Tensors]]] = {
            "zckpt": (ours, partial(load_ours, verify=True)),
            "zckpt, unverified": (ours, partial(load_ours, verify=False)),
            **{label: (theirs, load) for label, load in peers.items()},
        }
        for label, (path, load) in loads.items():
            found = load(path, device)
            assert found.keys() == state.keys(), label
            assert all(torch.equal(found[key].cpu(), tensor) for key, tensor in state.items()), label
            del found
        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            contestants = []
            for label, (path, load) in loads.items():
                action = partial(finished, load, path, device)
                contestants.append(Contestant(label, action, partial(prepare, path), partial(drop_from_cache, path)))
            contestants.append(Contestant(LIMIT, pinned_copy(nbytes, device)))
            seconds = interleaved(contestants, options.runs)
            result.add(seconds, nbytes, group)
            best = min(peers, key=lambda label: statistics.median(seconds[label]))
            result.at_least(
                f"load to a GPU, {group}, against the best peer ({best})", speedup(seconds, "zckpt", best), 1
            )
        result.at_least(
            "load to a GPU, cached, against a copy from pinned memory", speedup(seconds, "zckpt", LIMIT), 0.8
        )
    result.finish()


def finished(load: Callable[[Path, str], Tensors], path: Path, device: str) -> Tensors:
    found = load(path, device)
    if device == "cuda":
        torch.cuda.synchronize()
    return found


def pinned_copy(nbytes: int, device: str) -> Callable[[], None]:
    pinned = torch.ones(min(PINNED_BYTES, nbytes), dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        for part in target.split(len(pinned)):
            part.copy_(pinned[: len(part)], non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return copy


def load_ours(path: Path, device: str, *, verify: bool) -> Tensors:
    return zckpt.open(path).load("master/*", device=device, verify=verify)


def load_safetensors(path: Path, device: str) -> Tensors:
    return safetensors.torch.load_file(path, device=device)


def load_fastsafetensors(path: Path, device: str) -> Tensors:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(str(path), device=device, nogds=device == "cpu") as file:
        keys = file.keys()
        return {key: file.get_tensor(key) for key in keys}


def load_runai(path: Path, device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {key: tensor.to(device) for key, tensor in streamer.get_tensors()}


def load_instanttensor(path: Path, device: str) -> Tensors:
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device=device) as file:
        return dict(file.tensors())


PEERS: dict[str, tuple[str, Callable[[Path, str], Tensors]]] = {
    "safetensors": ("safetensors", load_safetensors),
    "fastsafetensors": ("fastsafetensors", load_fastsafetensors),
    "Run:ai streamer": ("runai_model_streamer", load_runai),
    "InstantTensor": ("instanttensor", load_instanttensor),
}


if __name__ == "__main__":
    main()
