"""Measures what ranks send, keep open and wait for, at 16 to 4096 ranks.

    python bench/thousand_ranks.py [--quick] [--dir DIR] [--results DIR]

There are three measurements, each in fresh processes:

- Ranks that are threads of one process (``tests.support.thread_ranks``) write a checkpoint of tiny tensors, open it and
  restore it, bit for bit. Then a rank dies in the middle of a write. All of this is the code of real ranks; only gloo
  and the store of the job are replaced. Each figure is that of rank 0, of an inner rank of the tree and of a leaf.
- 64 ranks that are processes and use gloo do the same. Their open descriptors and their memory are looked at.
- Rank 0 writes a checkpoint of 1000 parameters with 3 parts, while one thread plays all other ranks: it answers with
  what they would send. So the time and the memory are those of rank 0 alone.

``--dir`` should be on a file system in memory, because what is measured is not the disk.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import zckpt
from common import MIB, PARTS, Options, Result, parse_options
from index_scale import ONE_KEY, measure
from sampler import field_bytes
from tests.support.thread_ranks import ONE_THREAD, Outcome, ThreadRanks
from zckpt.checkpoint import restore
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.writing.prepare import plan, prepare
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.format import manifest as manifest_format
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES
from zckpt.geometry import all_of
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import Fragment
from zckpt.ranks import family, heartbeat, tree
from zckpt.ranks.collectives import Ranks, _pack
from zckpt.ranks.groups import close_groups
from zckpt.ranks.job import Job, in_job
from zckpt.storage import local_reader
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_store import LocalStore
from zckpt.storage.local_writer import LocalWriter
from zckpt.system.linux import trim_heap
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

NAME, TITLE = "thousand_ranks", "Many ranks"
THREADS = (16, 64, 256, 1024, 4096)
PROCESSES = 64
AT_ONCE = 512
"""How many of the threads write or read files at a time, because one process may have only so many files open."""
PLAYED = (1024, 4096)
PARAMETERS = 1000
INDEX_BYTES = 25
"""The bytes of a piece in the decompressed index."""


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--part":
        print(json.dumps(MEASURED[sys.argv[2]](*sys.argv[3:])), flush=True)
        os._exit(0)  # The ranks that were killed have left threads.
    options = parse_options(__doc__, runs=1, size=0)
    quick = "--quick" in sys.argv
    result = Result(NAME, TITLE, options)
    threads = [
        part("threads", options, ranks, "yes" if ranks < 4096 else "no")
        for ranks in (THREADS[:2] if quick else THREADS)
    ]
    processes = part("processes", options, 4 if quick else PROCESSES)
    played = [
        part("played", options, ranks, 50 if quick else PARAMETERS) for ranks in (PLAYED[:1] if quick else PLAYED)
    ]
    result.extra = {
        "threads": threads,
        "processes": processes,
        "played": played,
        "notes": notes(threads, processes, played),
    }
    judge(result, threads, processes, played)
    result.finish()


def part(name: str, options: Options, *arguments: object) -> dict[str, Any]:
    """Runs one measurement in a fresh process, and returns its figures."""
    print(f"{name} {' '.join(map(str, arguments))}", flush=True)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        command = [sys.executable, __file__, "--part", name, directory, *map(str, arguments)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


def kinds(size: int) -> dict[str, int]:
    """Returns a rank of each kind: rank 0, a child of it, which has children itself if there are enough ranks, and the
    last rank."""
    return {"rank 0": 0, "inner rank": 1, "leaf": size - 1}


# Ranks that are threads


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


# Ranks that are processes


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


# Rank 0, and a thread that plays all others


class Player(Job):
    """The job as rank 0 sees it. All other ranks are played: they answer at once, with what they would send."""

    is_over = False

    def __init__(self, size: int, records: list[tuple[bytes, int]]) -> None:
        super().__init__()
        self.size = size
        self.seconds = 0.0
        """The processor time that the player has taken itself."""
        self.received_bytes = self.sent_bytes = self.messages = 0
        self._records = records
        self._below: dict[int, list[int]] = {child: [] for child in tree.children(0, size)}
        for rank in range(1, size):
            child = rank
            while tree.parent(child):
                child = tree.parent(child)
            self._below[child].append(rank)
        self.told: dict[str, Any] = {}
        """What rank 0 has told in each step."""

    rank = 0

    def members(self, group: object) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def store(self) -> Any:
        return PlayedStore()

    def connect(self, *_: object) -> Any:
        return PlayedChildren(self)

    def reports(self) -> list[bytes]:
        """Returns what the children of rank 0 send in this step."""
        (group,) = self.groups.values()
        doing = str(group.lives._doing)
        step = f"{group.lives._call}, to {doing}"
        return [
            _pack(
                tree.StepReport(
                    step, {rank: _pack(result) for rank in ranks if (result := self.result(doing, rank)) is not None}
                )
            )
            for ranks in self._below.values()
        ]

    def result(self, doing: str, rank: int) -> Any:
        if doing == "prepare the write":
            return self.told["prepare"]._replace(buffers={}, host=f"host-{rank // 8}")
        if doing == "plan the write":
            record, nbytes = self._records[rank]
            return self.told["plan"]._replace(rank_record=record, data_bytes=nbytes)
        return bytes(DIGEST_BYTES) if doing == "write" else None


class PlayedStore:
    """A store in which each rank is there and shows that it runs."""

    _looks = 0

    def check(self, keys: list[str]) -> bool:
        return not any(key.endswith("/gone") for key in keys)

    def get(self, key: str) -> bytes:
        PlayedStore._looks += 1
        return f"1 {PlayedStore._looks} {PlayedStore._looks}".encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [*map(self.get, keys)]

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int:
        return amount

    def delete_key(self, key: str) -> bool:
        return True

    def has_extended_api(self) -> bool:
        return True


class PlayedChildren:
    """The connections of rank 0 with its children."""

    def __init__(self, player: Player) -> None:
        self._player, self._reports = player, list[bytes]()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1 + len(tree.children(0, self._player.size))

    def gather(self, outputs: Any, inputs: Any, _: object) -> Any:
        start = time.thread_time()
        player, reports = self._player, self._player.reports()
        sent = [family._slot(len(report), 0, report) for report in reports]
        if max(map(len, reports)) > family._FITTING_BYTES:
            self._reports = reports
        for target, message in zip(outputs[0][1:], sent, strict=True):
            target.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self._count(received=sum(map(len, sent)), messages=len(sent))
        player.seconds += time.thread_time() - start
        return Ended()

    def scatter(self, outputs: Any, inputs: Any, _: object) -> Any:
        self._count(sent=sum(message.nbytes for message in inputs[0][1:]), messages=len(inputs[0]) - 1)
        return Ended()

    def alltoall_base(self, received: Any, sent: Any, received_bytes: Any, sent_bytes: Any) -> Any:
        start = time.thread_time()
        at = 0
        for report in self._reports:
            received[at : at + len(report)] = torch.frombuffer(bytearray(report), dtype=torch.uint8)
            at += len(report)
        self._reports = []
        self._count(received=received.nbytes, sent=sent.nbytes, messages=len(sent_bytes) - 1)
        self._player.seconds += time.thread_time() - start
        return Ended()

    def _count(self, *, received: int = 0, sent: int = 0, messages: int) -> None:
        self._player.received_bytes += received
        self._player.sent_bytes += sent
        self._player.messages += messages


class Ended:
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object) -> None: ...


SAVE_ID = "5a" * 8


def measure_played(directory: str, ranks_text: str, parameters_text: str) -> dict[str, Any]:
    size, parameters, path = int(ranks_text), int(parameters_text), f"{directory}/run/c"
    torch.set_num_threads(1)
    rng = random.Random(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(parameters):  # shares of several sizes, and tensors with fewer elements than there are ranks
        kind, few = rng.random(), (rng.randint(1, size),)
        name = f"model.layers.{number // 10}.block{number % 10}.weight"
        shapes[name] = (rng.randint(2, 5), rng.randint(size, 2 * size)) if kind < 0.95 else few
    records, pieces = [], 0
    for rank in range(size):
        shares = {name: -(-math.prod(shape) // size) for name, shape in shapes.items()}
        spans = [
            (name, all_of(shape).clip(rank * shares[name], (rank + 1) * shares[name])) for name, shape in shapes.items()
        ]
        fragments = [Fragment(of_part, name, "F32", span) for of_part in PARTS for name, span in spans if span.numel]
        pieces += len(fragments)
        plans = plan_data_files(fragments, SAVE_ID, rank, size, block_bytes=BLOCK_BYTES)
        records.append((catalog.pack(catalog.rank_record(rank, plans)), sum(plan.nbytes for plan in plans)))
    player = Player(size, records)

    def noted(function: Callable[..., Any], message: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made = function(*arguments, **options)
            player.told[function.__name__] = getattr(made, message)
            return made

        return mock.patch(f"zckpt.checkpoint.write.{function.__name__}", call)

    with (
        in_job(player),
        noted(prepare, "facts"),
        noted(plan, "told"),
        mock.patch.object(RankWrite, "check_files"),  # The files of another rank are not there.
        mock.patch("zckpt.checkpoint.writing.decide.secrets", mock.Mock(token_hex=lambda _: SAVE_ID)),
    ):
        engine = ReferenceEngine(shapes, frozen=())
        gc.collect()
        trim_heap()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = field_bytes("/proc/self/status", "VmRSS")
        own, wall = time.thread_time(), time.perf_counter()
        zckpt.write(engine, path, parts=PARTS, budget=ONE_THREAD)
        own, wall = time.thread_time() - own - player.seconds, time.perf_counter() - wall
        peak_bytes = field_bytes("/proc/self/status", "VmHWM") - before
        close_groups(player)
    manifest = open_loader(path).manifest
    runs = [measure(ONE_KEY, path, f"master/model.layers.{number}.block1.weight") for number in range(9)]
    sizes = [Path(path, names.MANIFEST).stat().st_size, manifest.index_bytes]
    return {
        "ranks": size,
        "parameters": parameters,
        "pieces": pieces,
        "own_seconds": own,
        "player_seconds": player.seconds,
        "wall_seconds": wall,
        "peak_bytes": peak_bytes,
        "messages": player.messages,
        "received_bytes": player.received_bytes,
        "sent_bytes": player.sent_bytes,
        "index_bytes_decompressed": sum(chunk.pieces for chunk in manifest.chunks) * INDEX_BYTES,
        "manifest_bytes": sizes[0],
        "index_bytes": sizes[1],
        "bytes_per_piece": sum(sizes) / pieces,
        "one_key": min(runs, key=lambda run: run["seconds"]),  # The others were held up by other programs.
    }


MEASURED: dict[str, Callable[..., dict[str, Any]]] = {
    "threads": measure_threads,
    "processes": measure_processes,
    "played": measure_played,
}


# Results


def judge(result: Result, threads: list[Any], processes: dict[str, Any], played: list[Any]) -> None:
    small, large = next(each for each in threads if each["ranks"] >= 64), threads[-1]
    for what in ("write", "restore"):
        leaf, leaf_of_small = large["phases"][what]["leaf"], small["phases"][what]["leaf"]
        for figure in ("sent_bytes", "received_bytes", "sent_messages"):
            ratio = leaf[figure] / leaf_of_small[figure]
            name = figure.replace("_", " ")
            text = f"{what}: {name} of a leaf at {large['ranks']} ranks, times that at {small['ranks']}"
            result.at_most(text, ratio, 1.05)
        calls = (sum(of["store_of_checkpoints"].values()) for of in (leaf, leaf_of_small))
        result.at_most(
            f"{what}: calls of the store of checkpoints by a leaf, {large['ranks']} to {small['ranks']} ranks",
            next(calls) / max(next(calls), 1),
            1.05,
        )
    connections = max(each["phases"]["restore"][kind]["connections"] for each in threads for kind in kinds(1))
    result.at_most("connections of any rank", connections, 2 * tree.FAN_OUT, "")
    all_lost = [lost for each in threads for lost in each["lost"].values()]
    for who, cases in (("threads", all_lost), (f"{processes['ranks']} processes", [processes["lost"]])):
        share = min(lost["named_it"] / lost["others"] for lost in cases)
        result.at_least(f"{who}: share of the others that name a rank that died, least of {len(cases)}", share, 1, "")
    for each in played:
        about = f"{each['ranks']} ranks x {each['parameters']} parameters x 3 parts"
        result.at_most(f"{about}: own time of rank 0", each["own_seconds"], 5 * each["ranks"] / 1024, "s")
        result.at_most(
            f"{about}: memory of rank 0, times the decompressed index",
            each["peak_bytes"] / each["index_bytes_decompressed"],
            2,
        )
        result.at_most(f"{about}: open and one key", each["one_key"]["seconds"] * 1e3, 50, "ms")
        result.at_most(f"{about}: manifest and index for each piece", each["bytes_per_piece"], 4, "B")


def notes(threads: list[Any], processes: dict[str, Any], played: list[Any]) -> list[str]:
    """Returns the tables of the page of results."""
    lines = ["![many ranks](many_ranks.svg)", ""]
    for what in ("write", "restore"):
        lines += [
            f"Ranks that are threads: {what}. KiB sent and received, and calls of the store of checkpoints:",
            "",
            "| ranks | seconds | rank 0 | inner rank | leaf | calls, all ranks |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for each in threads:
            phase = each["phases"][what]
            kib = [
                [f"{of[way] / 1024:.0f}" for way in ("sent_bytes", "received_bytes")] for of in map(phase.get, kinds(1))
            ]
            calls = [sum(phase[kind]["store_of_checkpoints"].values()) for kind in kinds(1)]
            cells = [f"{' and '.join(moved)}; {count}" for moved, count in zip(kib, calls, strict=True)]
            lines.append(
                f"| {each['ranks']} | {phase['wall_seconds']:.1f} | {' | '.join(cells)} | {phase['all_calls']} |"
            )
        lines.append("")
    lines += [
        "A rank dies in the middle of a write. The last of the others names it after so many periods of looks:",
        "",
        "| ranks | rank 0 | inner rank | leaf |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for each in threads:
        cells = [f"{each['lost'][kind]['periods']:.1f}" if kind in each["lost"] else "" for kind in kinds(1)]
        lines.append(f"| {each['ranks']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{processes['ranks']} processes on gloo:",
        "",
        "| | rank 0 | leaf |",
        "| --- | ---: | ---: |",
    ]
    of_kinds = [processes["rank 0"], processes["leaf"]]
    for label, value in (
        ("descriptors that zckpt keeps open", lambda of: of["descriptors_after"] - of["descriptors_before"]),
        ("memory of a write, MiB", lambda of: f"{of['write_peak_bytes'] / MIB:.1f}"),
        ("memory of a restore, MiB", lambda of: f"{of['restore_peak_bytes'] / MIB:.1f}"),
        ("seconds of a write", lambda of: f"{of['seconds']['write']:.2f}"),
        ("seconds of a restore", lambda of: f"{of['seconds']['restore']:.2f}"),
    ):
        lines.append(f"| {label} | {' | '.join(str(value(of)) for of in of_kinds)} |")
    lines += [
        "",
        "Rank 0 commits a checkpoint of many pieces, and all other ranks are played:",
        "",
        "| ranks | pieces | own seconds | memory, MiB | received, MiB | two files, MiB | open and one key, ms |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in played:
        lines.append(
            f"| {each['ranks']} | {each['pieces']:,} | {each['own_seconds']:.1f} | {each['peak_bytes'] / MIB:.0f} | "
            f"{each['received_bytes'] / MIB:.1f} | {(each['manifest_bytes'] + each['index_bytes']) / MIB:.1f} | "
            f"{each['one_key']['seconds'] * 1e3:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
