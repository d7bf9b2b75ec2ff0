"""Compares loading all weights to a GPU with safetensors and with loaders that are made for it. Needs a GPU.

    pip install 'fastsafetensors>=0.5' 'instanttensor>=0.2' runai-model-streamer
    python bench/load_to_gpu.py [--size 3GiB] [--dir DIR] [--runs 5]

The same fp32 tensors are in zckpt's files and in one safetensors file. Loaders that are not installed are left out. In
these versions, all loaders return tensors that own their memory. "Cold" means that the files were dropped from the page
cache, and "cached" that they were read just before. There are two limits: one copy of as many bytes from pinned memory
that stays the same, and direct reads of as many bytes into the same few buffers. zckpt checks digests, and the others
check nothing. Therefore zckpt is also measured without the check, and by GPUDirect Storage where kvikio and a driver
for it are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

import safetensors
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
from peers import safetensors_save
from raw_io import Raw
from zckpt.storage import gpudirect

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peers import Tensors

PINNED_BYTES = 256 * MIB
COPY, READ = "copy from pinned memory", "direct reads"


def main(device: str = "cuda:0") -> None:
    options = parse_options(__doc__)
    if device != "cpu" and not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA GPU, and a torch that is built for it")
    result = Result("load_to_gpu", "Load all weights to a GPU", options)
    state = make_state(options.size, ["master"])
    nbytes = total_bytes(state)
    with workspace(options, 2 * options.size) as directory:
        ours, theirs = directory / "checkpoint", directory / "safetensors"
        write_checkpoint(ours, cut(state))
        safetensors_save(state, theirs)
        peers = {label: load for label, (is_installed, load) in PEERS.items() if is_installed()}
        loads: dict[str, tuple[Path, Callable[[Path, str], Tensors]]] = {
            "zckpt": (ours, partial(load_ours, verify=True)),
            "zckpt, unverified": (ours, partial(load_ours, verify=False)),
            **{label: (theirs, load) for label, load in peers.items()},
        }
        if gpudirect.serves(torch.device(device)):
            loads["zckpt, GPUDirect Storage"] = (ours, partial(load_ours, verify=False, direct=True))
        for label, (path, load) in loads.items():
            tensors = load(path, device)
            assert tensors.keys() == state.keys(), label
            assert all(torch.equal(tensors[key].cpu(), tensor) for key, tensor in state.items()), label
            del tensors
        raw = Raw()
        for group, prepare in (("cold", drop_from_cache), ("cached", bring_into_cache)):
            contestants = [
                loading(label, path, prepare, partial(finished, load, device=device))
                for label, (path, load) in loads.items()
            ]
            contestants.append(Contestant(COPY, pinned_copy(nbytes, device)))
            if group == "cold":
                contestants.append(loading(READ, theirs, prepare, lambda path: raw.read(path, raw.buffers)))
            rounds = interleaved(contestants, options.runs)
            result.add(rounds, nbytes, group)
            best = fastest(rounds, peers)
            result.at_least(
                f"load to a GPU, {group}, against the best peer ({best})", speedup(rounds, "zckpt", best), 1
            )
            if group == "cold":
                slower = max((COPY, READ), key=lambda label: sum(timing.seconds for timing in rounds[label]))
                result.at_least(f"load to a GPU, cold, against {slower}", speedup(rounds, "zckpt", slower), 0.9)
    result.finish()


def finished(load: Callable[[Path, str], Tensors], path: Path, device: str) -> Tensors:
    tensors = load(path, device)
    if device != "cpu":
        torch.accelerator.synchronize()
    return tensors


def pinned_copy(nbytes: int, device: str) -> Callable[[], None]:
    pinned = torch.ones(min(PINNED_BYTES, nbytes), dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        for part in target.split(len(pinned)):
            part.copy_(pinned[: len(part)], non_blocking=True)
        if device != "cpu":
            torch.accelerator.synchronize()

    return copy


def load_ours(path: Path, device: str, *, verify: bool, direct: bool = False) -> Tensors:
    """Loads all masters. GPUDirect Storage is used if ``direct`` is true, and never otherwise."""
    with mock.patch.object(gpudirect, "serves", return_value=direct):
        return zckpt.open(path).load("master/*", device=device, verify=verify)


def load_safetensors(path: Path, device: str) -> Tensors:
    return safetensors.torch.load_file(path, device=device)


def load_safetensors_prefetch(path: Path, device: str) -> Tensors:
    with safetensors.safe_open(path, framework="pt", device=device, backend="pread") as file:
        file.prefetch()
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict


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


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


PEERS: dict[str, tuple[Callable[[], bool], Callable[[Path, str], Tensors]]] = {
    "safetensors": (partial(installed, "safetensors"), load_safetensors),
    "safetensors, prefetch": (partial(hasattr, safetensors.safe_open, "prefetch"), load_safetensors_prefetch),
    "fastsafetensors": (partial(installed, "fastsafetensors"), load_fastsafetensors),
    "Run:ai streamer": (partial(installed, "runai_model_streamer"), load_runai),
    "InstantTensor": (partial(installed, "instanttensor"), load_instanttensor),
}
"""For each peer by label, a function that says whether it is installed, and a function that loads a file with it."""


if __name__ == "__main__":
    main()
