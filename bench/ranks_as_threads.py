"""A measurement of ``thousand_ranks``: ranks that are threads of one process write a checkpoint of tiny tensors, open
it and restore it. Then a rank dies in the middle of a write."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import zckpt
from sampler import field_bytes
from tests.support.thread_ranks import ONE_THREAD, Outcome, ThreadRanks
from zckpt.checkpoint import restore
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.ranks import heartbeat
from zckpt.ranks.collectives import Ranks
from zckpt.storage import local_reader
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_store import LocalStore
from zckpt.storage.local_writer import LocalWriter
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

AT_ONCE = 512
"""How many of the threads write or read files at a time, because one process may have only so many files open."""


def kinds(size: int) -> dict[str, int]:
    """Returns a rank of each kind: rank 0, a child of it, which has children itself if there are enough ranks, and the
    last rank."""
    return {"rank 0": 0, "inner rank": 1, "leaf": size - 1}


class Calls:
    """Counts the calls of the contract of a store, by the rank whose thread makes them. Threads that a rank starts
    count as that of no rank."""

    def __init__(self) -> None:
        self.of_ranks: dict[str, Counter[str]] = {}

    def counted(self, owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def call(own: Any, *arguments: Any, **options: Any) -> Any:
            self.of_ranks.setdefault(threading.current_thread().name, Counter())[name] += 1
            return method(own, *arguments, **options)

        return mock.patch.object(owner, name, call)

    def taken(self, size: int) -> dict[str, Any]:
        """Returns the counts so far, and begins anew."""
        seen, self.of_ranks = self.of_ranks, {}
        of_kinds = {kind: dict(seen.get(f"rank-{rank}", {})) for kind, rank in kinds(size).items()}
        total: Counter[str] = sum(seen.values(), Counter())
        return {**of_kinds, "all": dict(total)}


METHODS = (
    *(
        (LocalStore, name)
        for name in ("entry", "entries", "create", "put", "put_new", "prepare", "remove", "sync_names", "sizes")
    ),
    *((LocalReader, name) for name in ("read", "read_into", "size")),
    *((LocalWriter, name) for name in ("write", "sync", "close")),
)


class Dies:
    """A progress that lets a rank die when it has moved its first bytes."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def begin(self, action: str, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None:
        died.append(time.monotonic())
        self._ranks.die(self._rank)

    def end(self) -> None: ...


died: list[float] = []


def limited(function: Callable[..., Any], places: threading.Semaphore) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with places:
            return function(*arguments, **options)

    return call


def tiny_shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Returns shapes of which each rank has an element of the first two, and some ranks one of the third."""
    return {"matrix": (8, -(-size // 4)), "vector": (size,), "few": (3,)}


def measure_threads(directory: str, ranks_text: str, all_losses: str) -> dict[str, Any]:
    size = int(ranks_text)
    heartbeat.PERIOD_SECONDS = max(1.0, size / 256)  # a process does not have the time for more looks by its threads
    torch.set_num_threads(1)
    places, calls = threading.Semaphore(AT_ONCE), Calls()
    base_bytes = field_bytes("/proc/self/status", "VmRSS")
    figures: dict[str, Any] = {"ranks": size, "period_seconds": heartbeat.PERIOD_SECONDS}
    with (
        # Each rank decodes the manifest. A process has no room for thousands of them, so the ranks share one.
        mock.patch.object(manifest_format, "decode", functools.lru_cache(4)(manifest_format.decode)),
        mock.patch.object(RankWrite, "write_data_files", limited(RankWrite.write_data_files, places)),
        mock.patch.object(restore, "_change", limited(restore._change, places)),
        # A rank keeps the files open that it has read, for later reads.
        mock.patch.object(local_reader, "IDLE_FILES_MAX", 0),
    ):
        patches = [calls.counted(owner, name) for owner, name in METHODS]
        for patch in patches:
            patch.start()
        figures |= write_and_restore(directory, size, calls)
        for patch in patches:
            patch.stop()
        figures["bytes_per_rank"] = (field_bytes("/proc/self/status", "VmHWM") - base_bytes) / size
        cases = kinds(size) if all_losses == "yes" else {"inner rank": 1}
        figures["lost"] = {kind: lose(f"{directory}/lost-{rank}", size, rank) for kind, rank in cases.items()}
    return figures


def write_and_restore(directory: str, size: int, calls: Calls) -> dict[str, Any]:
    ranks, path = ThreadRanks(size), f"{directory}/run/c"
    begun = threading.Barrier(size)
    walls: dict[str, float] = {}
    taken: dict[str, Any] = {}
    traffic: dict[str, list[dict[str, Any]]] = {}

    def between(what: str) -> None:
        """Is called by all ranks after a phase. Rank 0 takes its figures."""
        if begun.wait() == 0:
            walls[what] = time.monotonic()
            taken[what] = calls.taken(size)
            traffic[what] = [asdict(of_rank) for of_rank in ranks.traffic]
            print(f"{size} ranks: {what}", file=sys.stderr, flush=True)
        begun.wait()

    def run(rank: int) -> dict[str, float]:
        seconds: dict[str, float] = {}

        def phase(what: str, action: Callable[[], Any]) -> Any:
            start = time.thread_time()
            value = action()
            seconds[what] = time.thread_time() - start
            between(what)
            return value

        engine = ReferenceEngine(tiny_shapes(size), frozen=())
        engine.train(1)
        between("begin")
        phase("connect", lambda: Ranks(call="bench").together(lambda: None, "connect"))
        phase("write", lambda: zckpt.write(engine, path, budget=ONE_THREAD))
        phase("open", lambda: zckpt.open(path)["master/vector"].pieces if rank in kinds(size).values() else None)
        other = ReferenceEngine(tiny_shapes(size), frozen=(), seed=1)
        phase("restore", lambda: zckpt.restore(other, path, budget=ONE_THREAD))
        for part_name in engine.tensors:
            for name, tensor in engine.tensors[part_name].items():
                if not torch.equal(tensor, other.tensors[part_name][name]):
                    raise AssertionError(f"rank {rank}: {part_name}/{name} differs after the restore")
        return seconds

    def run_or_abort(rank: int) -> dict[str, float]:
        try:
            return run(rank)
        except BaseException:
            begun.abort()
            raise

    outcomes = raised(ranks.run(run_or_abort))
    phases = ["begin", "connect", "write", "open", "restore"]
    figures: dict[str, Any] = {"phases": {}}
    for earlier, what in itertools.pairwise(phases):
        of_kinds = {
            kind: {
                "cpu_seconds": outcomes[rank].value[what],
                **difference(traffic[earlier][rank], traffic[what][rank]),
                "store_of_checkpoints": taken[what][kind],
            }
            for kind, rank in kinds(size).items()
        }
        figures["phases"][what] = {
            "wall_seconds": walls[what] - walls[earlier],
            "all_calls": sum(taken[what]["all"].values()),
            **of_kinds,
        }
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    figures["files"] = len(files)
    figures["manifest_bytes"] = Path(path, names.MANIFEST).stat().st_size
    figures["index_bytes"] = next(file.stat().st_size for file in files if file.name == "index.bin")
    return figures


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: sum(value.values()) - sum(before[name].values()) if isinstance(value, dict) else value - before[name]
        for name, value in after.items()
        if name != "connections"
    } | {"connections": after["connections"]}


def raised(outcomes: list[Outcome]) -> list[Outcome]:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return outcomes


def lose(path: str, size: int, who: int) -> dict[str, Any]:
    """Lets a rank die in the middle of a write. Returns how many of the other ranks have named it, and in how long."""
    ranks = ThreadRanks(size)
    died.clear()

    def run(rank: int) -> tuple[bool, float]:
        engine = ReferenceEngine(tiny_shapes(size), frozen=())
        progress = Dies(ranks, rank) if rank == who else None
        try:
            zckpt.write(engine, path, budget=ONE_THREAD, progress=progress)
        except zckpt.RankError as error:
            return error.rank == who, time.monotonic() - died[0]
        return False, 0.0

    told = [outcome.value for rank, outcome in enumerate(raised(ranks.run(run))) if rank != who]
    seconds = max(seconds for _, seconds in told)
    return {
        "others": len(told),
        "named_it": sum(named for named, _ in told),
        "seconds": seconds,
        "periods": seconds / heartbeat.PERIOD_SECONDS,
        "committed": Path(path, names.MANIFEST).exists(),
    }
