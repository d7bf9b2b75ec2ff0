"""Measures moving the states of a live ZeRO-3 engine to scratch files and back, and the memory that this frees.

    python bench/offload.py [--size 1GiB] [--dir DIR] [--runs 3]

The engine runs on one rank, has trained a step, and is on the GPU if there is one. These contestants take turns, for
all parts together and for each part alone:

- ``zckpt.offload`` and ``zckpt.reload``;
- direct writes of the same memory by four threads (of other memory if the states are on a GPU), and direct reads of as
  many bytes into fresh memory;
- ``torch.save`` of the same tensors, with fsync and without, and ``torch.load``;
- ``engine.offload_states`` to pinned memory of the host and back, if there is a GPU.

No file is in the page cache when it is read. Only zckpt checks what it reads. Only ``torch.save`` without fsync leaves
data that the kernel writes later, and only ``torch.save`` with fsync makes its data durable.

Every contestant reads while the states are on the disk, so that the same memory is free for all of them. The reason is
that the host of a virtual machine takes back memory that is free for a while, so memory that was just freed is quicker
to touch than other memory.

The memory that an offload frees is the difference between what the process has before and after, as the operating
system or the device counts it. Buffers that DeepSpeed has emptied are freed by the first offload and come back
untouched. They are not written, so from then on the parts have fewer bytes than before.
"""

from __future__ import annotations

import mmap
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import zckpt
from common import (
    GIB,
    Contestant,
    Result,
    drop_from_cache,
    interleaved,
    make_durable,
    parse_options,
    remove,
    speedup,
    workspace,
)
from raw_io import Raw, whole_pages
from sampler import field_bytes
from training import CONFIG, make_engine
from zckpt.engines import adapt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from zckpt.plan.inventory import Holding

OURS, RAW = "zckpt", "raw"
ALL = "all parts"


def main() -> None:
    options = parse_options(__doc__, runs=3, size=GIB)
    result = Result("offload", "Live states to disk and back", options)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    deepspeed.init_distributed()
    del CONFIG["checkpoint"]  # the FAST writer locks memory, which makes it slow to ask the system what is locked
    engine = make_engine(options.size)
    raw = Raw()
    with workspace(options, 3 * options.size) as directory:
        for tensor in tensors_of(adapt(engine).memory()):
            tensor[:: mmap.PAGESIZE] += 0  # touches the buffers of DeepSpeed that no step has used yet
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
    """Returns the contestants that move the parts out, and those that move them back. The parts have ``nbytes``."""
    written, saved = directory / "raw", directory / "saved"
    tensors = tensors_of(
        holding for holding in adapt(engine).memory() if holding.part in parts and not holding.workspace
    )
    on_gpu = torch.cuda.is_available()
    out = partial(zckpt.offload, engine, directory, parts=parts)
    back = partial(zckpt.reload, engine)

    def write() -> None:
        raw.write(written, raw.again(nbytes) if on_gpu else whole_pages(tensors), durable=False)

    def save(durable: bool) -> None:
        torch.save(tensors, saved)
        if durable:
            make_durable(saved)

    def reading(label: str, make: Callable[[], object], path: Path, read: Callable[[Path], object]) -> Contestant:
        def before() -> None:
            make()
            drop_from_cache(path)
            out()

        def after() -> None:
            back()
            remove(path)

        return Contestant(label, partial(read, path), before, after)

    contestants = {
        "out": [
            Contestant(RAW, write, after=partial(remove, written)),
            Contestant(OURS, out, after=back),
            Contestant("torch.save", partial(save, durable=False), after=partial(remove, saved)),
            Contestant("torch.save, fsync", partial(save, durable=True), after=partial(remove, saved)),
        ],
        "back": [
            reading(RAW, write, written, raw.read),
            Contestant(OURS, back, before=out),
            reading("torch.load", partial(save, durable=False), saved, torch.load),
        ],
    }
    if on_gpu:
        states = partial(engine.offload_states, pin_memory=True)
        contestants["out"].append(Contestant("engine.offload_states, all", states, after=engine.reload_states))
        contestants["back"].append(Contestant("engine.reload_states, all", engine.reload_states, before=states))
    return contestants


def tensors_of(holdings: Iterable[Holding]) -> list[torch.Tensor]:
    """Returns a tensor of bytes for each storage of the holdings."""
    storages = {}
    for holding in holdings:
        if isinstance(holding.data, torch.Tensor):
            storage = holding.data.untyped_storage()
            storages[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return list(storages.values())


def taken_bytes() -> int:
    """Returns the bytes in use on the device. If there is no device, it returns the resident bytes of this process."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return field_bytes("/proc/self/status", "VmRSS")


if __name__ == "__main__":
    main()
