"""What the comparisons share: options, states, raw I/O, the page cache, interleaved timing, results.

A comparison times its contestants in turns, A B A B ..., so that what else the machine does hits all of them alike, and
after one round that does not count. A ratio is the median, over the rounds, of the ratio within a round. Processor time
is the time that all processors together have spent in a contestant's processes, in the kernel on their behalf too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import itertools
import json
import math
import mmap
import os
import platform
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zckpt.format.digest import BLOCK_BYTES
from zckpt.plan import catalog
from zckpt.state.inventory import MASTER, Fragment
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer.snapshot import Snapshot
from zckpt.writing.collect import pack_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PARTS = (MASTER, "exp_avg", "exp_avg_sq")
RAW_THREADS, RAW_BATCH_BYTES = 4, 8 * MIB
WRITE_SPEED_MIN = READ_SPEED_MIN = 0.95
"""Of the raw loop's, writing, and reading what is not cached."""
CPU_PER_GIB_MAX = 0.16
"""Seconds of processor time to write or read a GiB, with digests."""
QUICK_BYTES = 64 * MIB

# Options


@dataclass(frozen=True)
class Options:
    size: int
    """Bytes of state."""
    runs: int
    dir: Path
    results: Path


def parse_options(description: str | None, *, runs: int = 5, size: int = 3 * GIB) -> Options:
    """From the command line. ``description``: the docstring of the program."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=size, help=f"of the state; default {size / GIB:g}GiB")
    parser.add_argument("--runs", type=int, default=runs, help=f"rounds that count; default {runs}")
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round: only whether it works")
    parser.add_argument("--dir", type=Path, default=ROOT / ".cache" / "bench", help="on the disk to be measured")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where the JSON goes")
    found = parser.parse_args()
    if found.quick:
        found.size, found.runs = QUICK_BYTES, 1
    return Options(found.size, found.runs, found.dir.absolute(), found.results.absolute())


def parse_size(text: str) -> int:
    for unit, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


@contextlib.contextmanager
def workspace(options: Options, room_bytes: int) -> Iterator[Path]:
    """An empty directory with room for so many bytes, removed at the end."""
    options.dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.dir).free
    if free < room_bytes * 1.05:
        sys.exit(f"{options.dir} has {free / GIB:.1f} GiB free, this needs {room_bytes * 1.05 / GIB:.1f}")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        yield Path(directory)


# States, and checkpoints of them


def fresh_memory(nbytes: int) -> np.ndarray:
    """Bytes from the start of a page, not touched. numpy's memory lies in huge pages where the kernel has them, without
    which direct I/O is half as fast."""
    room = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    first = -room.ctypes.data % mmap.PAGESIZE
    return room[first : first + nbytes]


def aligned_memory(nbytes: int) -> np.ndarray:
    """The same, all touched."""
    array = fresh_memory(nbytes)
    array.fill(1)
    return array


def engine_memory(nbytes: int) -> np.ndarray:
    """The same, filled with random bits, in pages as small as those of an engine's tensors: torch does not ask for huge
    ones. A disk that is attached to a virtual machine may be a third slower with small ones."""
    room = torch.empty(nbytes // 8 + mmap.PAGESIZE, dtype=torch.int64).random_().numpy().view(np.uint8)
    first = -room.ctypes.data % mmap.PAGESIZE
    return room[first : first + nbytes]


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Those of a transformer with so many bytes of fp32 weights; what is left over are vectors of up to 64 MiB."""
    width = 2048 if nbytes >= GIB // 4 else 256
    layer = {
        "attention.qkv.weight": (3 * width, width),
        "attention.qkv.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "norm.weight": (width,),
        "mlp.in.weight": (4 * width, width),
        "mlp.out.weight": (width, 4 * width),
    }
    found: dict[str, tuple[int, ...]] = {}
    left = nbytes // 4
    per_layer = sum(map(math.prod, layer.values()))
    for number in range(left // per_layer):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        left -= per_layer
    vector = 16 * MIB
    return found | {f"model.rest.{i}": (min(vector, left - i * vector),) for i in range(-(-left // vector))}


def make_state(nbytes: int, parts: Sequence[str] = PARTS) -> dict[str, torch.Tensor]:
    """fp32 tensors by key: equal shares of ``nbytes`` for every part. Random bits, which no disk can compress."""
    return fill({f"{part}/{name}": shape for part in parts for name, shape in shapes(nbytes // len(parts)).items()})


def fill(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random fp32 tensors of these shapes, one after the other in memory."""
    numel = sum(map(math.prod, shapes.values()))
    values = aligned_memory(numel * 4).view(np.float32)
    np.random.default_rng(0).random(dtype=np.float32, out=values)
    whole = torch.from_numpy(values)
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {key: part.view(shapes[key]) for key, part in zip(shapes, whole.split(sizes), strict=True)}


def empty_like(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Touched memory for the same tensors."""
    whole = torch.from_numpy(aligned_memory(total_bytes(state)).view(np.float32))
    parts = whole.split([tensor.numel() for tensor in state.values()])
    return {key: part.view(state[key].shape) for key, part in zip(state, parts, strict=True)}


def memory_of(state: Mapping[str, torch.Tensor]) -> np.ndarray:
    """All bytes of what ``make_state`` has made."""
    storage = next(iter(state.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def total_bytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


Ranks = list[list[Fragment]]
"""What each rank holds."""
ABOUT = catalog.About(1, BLOCK_BYTES, {}, pack_tree({"engine": {}, "client_state": {}}, "", [], 0), {})


def cut(state: Mapping[str, torch.Tensor], world_size: int = 1) -> Ranks:
    """Equal shares of every tensor, as ZeRO-3 cuts them."""
    ranks: Ranks = [[] for _ in range(world_size)]
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        flat, numel = tensor.reshape(-1), tensor.numel()
        share = -(-numel // world_size)
        for rank, fragments in enumerate(ranks):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                shape = tuple(tensor.shape)
                fragments.append(Fragment(part, name, shape, "F32", start, stop, data=flat[start:stop]))
    return ranks


def write_rank(path: str, save_id: str, ranks: Ranks, rank: int) -> tuple[bytes, bytes]:
    """The files of one rank of a write that has begun; returns its receipt, and the digest of its digest table."""
    own = rank_write(path, save_id, ranks, rank, ABOUT)
    return catalog.pack(catalog.receipt(rank, own.shards)), own.write_own(Snapshot())


def write_checkpoint(
    path: Path, ranks: Ranks, write_all: Callable[[str, str], list[tuple[bytes, bytes]]] | None = None
) -> None:
    """``zckpt.write`` without an engine: the same functions. ``write_all`` has all ranks write, given path and save id,
    and returns what ``write_rank`` does; None: one after the other, here."""
    save_id = secrets.token_hex(8)
    whole = rank_write(path, save_id, [[]], 0, ABOUT)
    whole.begin(Unlocked(whole.store))
    if write_all is None:
        written = [write_rank(str(path), save_id, ranks, rank) for rank in range(len(ranks))]
    else:
        written = write_all(str(path), save_id)
    receipts, digests = zip(*written, strict=True)
    whole.describe([catalog.unpack(receipt) for receipt in receipts])
    whole.commit(digests)


# Files and the page cache


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def make_durable(path: Path) -> None:
    """What the peers leave to their users: fsync of the files and of the directories that name them."""
    for one in [*files_of(path), *(d for d in path.rglob("*") if d.is_dir()), path, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def drop_from_cache(path: Path) -> None:
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bring_into_cache(path: Path) -> None:
    room = bytearray(MIB)
    for file in files_of(path):
        with file.open("rb", buffering=0) as source:
            while source.readinto(room):
                pass


class Raw:
    """The limit: positional direct I/O from and to memory that begins with a page, in several threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(RAW_THREADS)
        self.buffers = aligned_memory(RAW_THREADS * RAW_BATCH_BYTES)
        """What is written where nothing else is given, again and again."""
        self.buffers[:] = np.frombuffer(os.urandom(len(self.buffers)), np.uint8)

    def write(self, path: Path, nbytes: int, memory: np.ndarray | None = None) -> None:
        """A new file of ``nbytes``, rounded up to whole pages, durable along with its name. Its bytes are those of
        ``memory``, rounded down to its whole pages, or of ``buffers``."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if memory is None:
            memory = self.buffers
        else:
            nbytes = min(nbytes, len(memory) // mmap.PAGESIZE * mmap.PAGESIZE)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(fd, 0, nbytes)  # a file that grows is written by one thread at a time
        self._each(os.pwritev, fd, _batches(memory, nbytes))
        os.fsync(fd)
        os.close(fd)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def read(self, path: Path, memory: np.ndarray | None = None) -> np.ndarray:
        """Returns the bytes of a file, but for what is behind its last whole page: in ``memory``, which is used again
        and again if it is smaller than the file, or in fresh memory."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        nbytes = os.fstat(fd).st_size // mmap.PAGESIZE * mmap.PAGESIZE
        memory = fresh_memory(nbytes) if memory is None else memory
        self._each(os.preadv, fd, _batches(memory, nbytes))
        os.close(fd)
        return memory

    def read_into(self, path: Path, memories: Sequence[np.ndarray]) -> None:
        """Reads the beginning of a file into ``memories``, each of them whole pages."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._each(os.preadv, fd, [view for memory in memories for view in _batches(memory, len(memory))])
        os.close(fd)

    def _each(
        self, action: Callable[[int, Sequence[np.ndarray], int], int], fd: int, views: Sequence[np.ndarray]
    ) -> None:
        """``views`` lie one behind the other in the file."""
        offsets = itertools.accumulate(map(len, views), initial=0)
        parts = iter(list(zip(offsets, views, strict=False)))  # shared: whoever is free takes the next

        def work(_: int) -> None:
            for offset, view in parts:
                if action(fd, [view], offset) != len(view):
                    raise OSError("the disk took or gave less than it was asked to")

        list(self._pool.map(work, range(RAW_THREADS)))


def _batches(memory: np.ndarray, nbytes: int) -> list[np.ndarray]:
    """So many bytes of ``memory``, again and again if it has fewer."""
    starts = ((offset, offset % len(memory)) for offset in range(0, nbytes, RAW_BATCH_BYTES))
    return [memory[first : first + min(RAW_BATCH_BYTES, nbytes - offset)] for offset, first in starts]


def keep_freed_memory() -> None:
    """Makes malloc keep what is freed, so that large tensors get memory that was touched before, whoever asks for it:
    fresh memory costs more than reading a file. For every contestant alike."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # malloc.h
    for parameter, value in ((trim_threshold, -1), (mmap_max, 0), (arena_max, 1)):
        libc.mallopt(parameter, value)


# Timing


class Took(NamedTuple):
    """One round of one contestant."""

    seconds: float
    cpu_seconds: float
    """Processor time of all processes that worked for it."""


Rounds = Mapping[str, Sequence[Took]]
"""By label, of every round that counts."""


@dataclass(frozen=True)
class Contestant:
    label: str
    action: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """Not timed, as is ``after``: bring files into the cache or out of it, remove what was written."""
    after: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None
    """Not timed, but its processor time counts: wait for what goes on in the background."""
    pids: Sequence[int] = ()
    """Other processes that work for it, and go on when it has ended."""


def loading(label: str, path: Path, prepare: Callable[[Path], object], load: Callable[[Path], object]) -> Contestant:
    """One that loads ``path``, which ``prepare`` has brought into the page cache or out of it."""
    return Contestant(label, partial(load, path), partial(prepare, path), partial(drop_from_cache, path))


def interleaved(
    contestants: Sequence[Contestant],
    runs: int,
    barrier: Callable[[], object] = lambda: None,
    over_ranks: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, list[Took]]:
    """All rounds but the first one, which does not count. Each round begins with another contestant, for a disk may be
    slower after one of them than after another. On several ranks, a contestant starts when all are ready and ends when
    all are done; ``over_ranks`` adds up the processor time of all."""
    rounds: dict[str, list[Took]] = {contestant.label: [] for contestant in contestants}
    for number in range(runs + 1):
        first = number % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            contestant.before()
            os.sync()  # nobody pays for what another one, or the last program, has left unwritten
            barrier()
            used = cpu_seconds(contestant.pids)
            start = time.perf_counter()
            kept = contestant.action()
            barrier()
            elapsed = time.perf_counter() - start
            contestant.finish()
            used = cpu_seconds(contestant.pids) - used
            del kept
            contestant.after()
            took = Took(elapsed, over_ranks(used))
            barrier()
            if number:
                rounds[contestant.label].append(took)
    return rounds


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """Processor time so far, user and system, of all threads: of this process, of its children that have ended, and of
    the processes ``pids``."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    clock = ctypes.c_int()
    others = 0.0
    for pid in pids:
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
            raise ProcessLookupError(pid)
        others += time.clock_gettime(clock.value)
    return sum(one.ru_utime + one.ru_stime for one in own) + others


def speedup(rounds: Rounds, of: str, over: str) -> float:
    """How many times as fast ``of`` is as ``over``: the median of the rounds."""
    return statistics.median(b.seconds / a.seconds for a, b in zip(rounds[of], rounds[over], strict=True))


def fastest(rounds: Rounds, labels: Iterable[str]) -> str:
    """The label with the shortest median."""
    return min(labels, key=lambda label: statistics.median(took.seconds for took in rounds[label]))


def cpu_per_gib(rounds: Sequence[Took], nbytes: int) -> float:
    """Seconds of processor time for a GiB, where each round has moved ``nbytes``: the median."""
    return statistics.median(took.cpu_seconds for took in rounds) / (nbytes / GIB)


# Results


@dataclass(frozen=True)
class Target:
    what: str
    value: float
    bound: float
    unit: str
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6}  {self.value:8.2f} {self.unit:5} {sign} {self.bound:6.2f}  {self.what}"


@dataclass
class Result:
    """What a program has found: rows of times, and the targets."""

    name: str
    title: str
    options: Options
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, rounds: Rounds, nbytes: int, group: str = "") -> None:
        """Rows: one for each label, all of the same ``nbytes``."""
        for label, took in rounds.items():
            median = statistics.median(one.seconds for one in took)
            self.rows.append(
                {
                    "group": group,
                    "label": label,
                    "bytes": nbytes,
                    "seconds": [one.seconds for one in took],
                    "median_seconds": median,
                    "gib_per_second": nbytes / GIB / median,
                    "cpu_seconds": [one.cpu_seconds for one in took],
                    "cpu_seconds_per_gib": cpu_per_gib(took, nbytes),
                }
            )

    def at_least(self, what: str, value: float, bound: float, unit: str = "x") -> None:
        self.targets.append(Target(what, value, bound, unit, True))

    def at_most(self, what: str, value: float, bound: float, unit: str = "x") -> None:
        self.targets.append(Target(what, value, bound, unit, False))

    def finish(self) -> None:
        """Prints all of it, and writes it to ``<results>/<name>.json``."""
        print(f"{self.title}\n")
        for row in self.rows:
            spread = f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f}"
            label = f"{row['group']}: {row['label']}" if row["group"] else row["label"]
            speed = f"{row['gib_per_second']:7.2f} GiB/s {row['cpu_seconds_per_gib']:7.3f} CPU s/GiB"
            print(f"  {label:52} {row['median_seconds']:9.4f} s  ({spread}) {speed}")
        print()
        for target in self.targets:
            print(f"  {target}")
        print(flush=True)
        self.options.results.mkdir(parents=True, exist_ok=True)
        found = {
            "name": self.name,
            "title": self.title,
            "size_bytes": self.options.size,
            "runs": self.options.runs,
            "commit": output_of("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"),
            "machine": machine(self.options.dir),
            "rows": self.rows,
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            **self.extra,
        }
        (self.options.results / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")


def machine(directory: Path) -> dict[str, Any]:
    file_system = output_of("findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory))
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": file_system or "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg()[1],  # of five minutes: more than these processes make says that others ran too
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def output_of(*command: str) -> str:
    """Of a command, without the spaces around it; nothing if it failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
