"""States of a live ZeRO-3 engine to scratch files and back, and the memory that this frees.

    python bench/offload.py [--size 3GiB] [--dir DIR] [--runs 5]

One rank, which has trained a step, on the GPU if there is one. For all parts together and for each alone, in turns:
``zckpt.offload`` and ``zckpt.reload``; direct writes of as many bytes by four threads, and direct reads of these into
as much fresh memory; ``torch.save`` of the same tensors, with fsync and without, and ``torch.load``; with a GPU, also
``engine.offload_states`` to pinned memory of the host and back. Nothing that is read is in the page cache. Only zckpt
checks what it reads. Only ``torch.save`` without fsync leaves something to be written later.

What is freed is what the operating system, or the device, counts: the memory that the process has before and after.
Buffers that DeepSpeed has emptied are freed once and come back untouched: they are not written, so that from then on
the parts have fewer bytes than before.
"""

from __future__ import annotations

import mmap
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import zckpt
from common import (
    Contestant,
    Raw,
    Result,
    drop_from_cache,
    engine_memory,
    interleaved,
    make_durable,
    parse_options,
    remove,
    speedup,
    workspace,
)
from sampler import field_bytes
from training import make_engine
from zckpt.engines import adapt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

OURS, RAW = "zckpt", "raw"
ALL = "all parts"


def main() -> None:
    options = parse_options(__doc__)
    result = Result("offload", "Live states to disk and back", options)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    deepspeed.init_distributed()
    engine = make_engine(options.size)
    raw = Raw()
    with workspace(options, 3 * options.size) as directory:
        for tensor in tensors_of(engine, {holding.part for holding in adapt(engine).memory()}):
            tensor[:: mmap.PAGESIZE] += 0  # DeepSpeed has buffers that no step has used yet
        before = taken_bytes()
        moved = zckpt.offload(engine, directory)
        freed = (before - taken_bytes()) / moved.nbytes
        zckpt.reload(engine)
        for label, parts in {ALL: moved.parts, **{part: (part,) for part in moved.parts}}.items():
            before = taken_bytes()
            zckpt.offload(engine, directory, parts=parts)
            nbytes = before - taken_bytes()
            zckpt.reload(engine)
            for way, contestants in ways(engine, raw, directory, parts, nbytes).items():
                rounds = interleaved(contestants, options.runs)
                result.add(rounds, nbytes, f"{label}, {way}")
                if label == ALL:
                    value = speedup(rounds, OURS, over=RAW)
                    result.at_least(f"{label}, {way}, against raw O_DIRECT", value, 0.9)
    result.at_least("memory freed, of the bytes of all parts", 100 * freed, 99, "%")
    result.finish()


def ways(engine: Any, raw: Raw, directory: Path, parts: Collection[str], nbytes: int) -> dict[str, list[Contestant]]:
    """The contestants out and back."""
    written, saved = directory / "raw", directory / "saved"
    tensors, memory = tensors_of(engine, parts), engine_memory(nbytes)
    out = partial(zckpt.offload, engine, directory, parts=parts)
    back = partial(zckpt.reload, engine)

    def save(durable: bool) -> None:
        torch.save(tensors, saved)
        if durable:
            make_durable(saved)

    def cold(path: Path, make: Callable[[], object]) -> Callable[[], None]:
        def prepare() -> None:
            make()
            drop_from_cache(path)

        return prepare

    read = cold(written, lambda: raw.write(written, nbytes))
    load = cold(saved, partial(save, durable=False))
    found = {
        "out": [
            Contestant(RAW, partial(raw.write, written, nbytes, memory), after=partial(remove, written)),
            Contestant(OURS, out, after=back),
            Contestant("torch.save", partial(save, durable=False), after=partial(remove, saved)),
            Contestant("torch.save, fsync", partial(save, durable=True), after=partial(remove, saved)),
        ],
        "back": [
            Contestant(RAW, partial(raw.read, written), before=read, after=partial(remove, written)),
            Contestant(OURS, back, before=out),
            Contestant("torch.load", partial(torch.load, saved), before=load, after=partial(remove, saved)),
        ],
    }
    if torch.cuda.is_available():
        states = partial(engine.offload_states, pin_memory=True)
        found["out"].append(Contestant("engine.offload_states, all", states, after=engine.reload_states))
        found["back"].append(Contestant("engine.reload_states, all", engine.reload_states, before=states))
    return found


def tensors_of(engine: Any, parts: Collection[str]) -> list[torch.Tensor]:
    """One for each storage that holds these parts."""
    storages = {}
    for holding in adapt(engine).memory():
        if holding.part in parts and isinstance(holding.data, torch.Tensor):
            storage = holding.data.untyped_storage()
            storages[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return list(storages.values())


def taken_bytes() -> int:
    """What this process has of the device's memory, or without one of the host's."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return field_bytes("/proc/self/status", "VmRSS")


if __name__ == "__main__":
    main()
