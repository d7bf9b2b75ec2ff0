"""A measurement of ``thousand_ranks``: ranks that are processes and use gloo do what those of ``ranks_as_threads`` do.
Their open descriptors and their memory are looked at."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import zckpt
from common import PARTS
from sampler import field_bytes
from zckpt.ranks.collectives import Ranks
from zckpt.testing import ReferenceEngine


def measure_processes(directory: str, ranks_text: str) -> dict[str, Any]:
    size = int(ranks_text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.set_num_threads(1)
    for name in ("write", "restore"):  # imported before the fork, so that the ranks share them
        getattr(zckpt, name)
    gc.collect()
    gc.freeze()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            try:
                figures = be_process(directory, rank, size, port)
                Path(directory, f"{rank}.json").write_text(json.dumps(figures))
            except BaseException:
                traceback.print_exc()
            finally:
                while rank == 0 and len(list(Path(directory).glob("*.json"))) < size - 1 and time.monotonic() < give_up:
                    time.sleep(0.1)  # This process has the store.
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    of_ranks = {
        rank: json.loads(file.read_text()) for rank in range(size) if (file := Path(directory, f"{rank}.json")).exists()
    }
    told = [of_rank["lost"] for of_rank in of_ranks.values()]
    return {
        "ranks": size,
        "rank 0": of_ranks[0],
        "leaf": of_ranks[size - 1],
        "lost": {
            "others": size - 1,
            "named_it": sum(one["named_it"] for one in told),
            "seconds": max(one["seconds"] for one in told),
        },
    }


give_up = time.monotonic() + 900


def be_process(directory: str, rank: int, size: int, port: int) -> dict[str, Any]:
    """Is a rank that writes, restores and loses rank 1, which is an inner rank."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    path, gone = f"{directory}/run/c", Path(directory, "gone")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    shapes = {f"layer{number}.weight": (size, 16) for number in range(100)}
    engine, other = (ReferenceEngine(shapes, frozen=(), seed=seed) for seed in (0, 1))
    engine.train(1)
    figures: dict[str, Any] = {"descriptors_before": descriptors()}
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    Ranks(call="bench").together(lambda: None, "connect")
    seconds["connect"] = time.perf_counter() - start
    figures["descriptors_connected"] = descriptors()
    for what, action in (
        ("write", lambda: zckpt.write(engine, path)),
        ("restore", lambda: zckpt.restore(other, path)),
    ):
        torch.distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = field_bytes("/proc/self/status", "VmRSS")
        start = time.perf_counter()
        action()
        seconds[what] = time.perf_counter() - start
        figures[f"{what}_peak_bytes"] = field_bytes("/proc/self/status", "VmHWM") - before
    if any(
        not torch.equal(tensor, other.tensors[part_name][name])
        for part_name in PARTS
        for name, tensor in engine.tensors[part_name].items()
    ):
        raise AssertionError(f"rank {rank} has other values after the restore")
    figures |= {"descriptors_after": descriptors(), "seconds": seconds}

    class Killed:
        def begin(self, action: str, nbytes: int) -> None: ...
        def end(self) -> None: ...
        def advance(self, nbytes: int) -> None:
            gone.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.distributed.barrier()
    try:
        zckpt.write(engine, f"{directory}/lost", progress=Killed() if rank == 1 else None)
    except zckpt.RankError as error:
        figures["lost"] = {
            "named_it": error.rank == 1,
            "seconds": time.time() - gone.stat().st_mtime,
            "said": str(error),
        }
    return figures
