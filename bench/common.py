"""Functions that the comparisons share, for options, states, the page cache, timing and results.

The contestants of a comparison take turns, A B A B ..., so that other programs on the machine slow all of them down
alike. The first round does not count. A ratio is the median, over the rounds, of the ratio within a round. Processor
time is the time that all processors together have spent in a contestant's processes, including the kernel's work for
these processes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import math
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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from raw_io import touched_memory, whole_pages
from zckpt.checkpoint.writing.collect import pack_tree
from zckpt.format.digest import BLOCK_BYTES
from zckpt.geometry import Grid, Span
from zckpt.plan import catalog
from zckpt.plan.inventory import MASTER, Fragment
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PARTS = (MASTER, "exp_avg", "exp_avg_sq")
WRITE_SPEED_MIN = READ_SPEED_MIN = 0.95
"""The least speed of a write, and of a read of files that are not cached, as a fraction of the speed of raw I/O."""
CPU_PER_GIB_MAX = 0.16
"""The most seconds of processor time that writing or reading a GiB may take, with digests."""
QUICK_BYTES = 64 * MIB

# Options


@dataclass(frozen=True)
class Options:
    size: int
    """The number of bytes of the state."""
    runs: int
    """The number of rounds that count."""
    dir: Path
    """The directory on the disk that is measured."""
    results: Path
    """The directory that the JSON goes to."""


def parse_options(description: str | None, *, runs: int = 5, size: int = 3 * GIB) -> Options:
    """Returns the options of the command line. ``description`` is the docstring of the program."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=size, help=f"of the state; default {size / GIB:g}GiB")
    parser.add_argument("--runs", type=int, default=runs, help=f"rounds that count; default {runs}")
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round: only whether it works")
    parser.add_argument("--dir", type=Path, default=ROOT / ".cache" / "bench", help="on the disk to be measured")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where the JSON goes")
    options = parser.parse_args()
    if options.quick:
        options.size, options.runs = QUICK_BYTES, 1
    return Options(options.size, options.runs, options.dir.absolute(), options.results.absolute())


def parse_size(text: str) -> int:
    for unit, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


@contextlib.contextmanager
def workspace(options: Options, room_bytes: int) -> Iterator[Path]:
    """Yields an empty directory on a disk with ``room_bytes`` free, and removes the directory at the end."""
    options.dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.dir).free
    if free < room_bytes * 1.05:
        sys.exit(f"{options.dir} has {free / GIB:.1f} GiB free, this needs {room_bytes * 1.05 / GIB:.1f}")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        yield Path(directory)


# States, and checkpoints of them


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a transformer with ``nbytes`` bytes of fp32 weights.

    The bytes that are left over by whole layers become vectors of up to 64 MiB.
    """
    width = 2048 if nbytes >= GIB // 4 else 256
    layer = {
        "attention.qkv.weight": (3 * width, width),
        "attention.qkv.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "norm.weight": (width,),
        "mlp.in.weight": (4 * width, width),
        "mlp.out.weight": (width, 4 * width),
    }
    layers: dict[str, tuple[int, ...]] = {}
    left_numel = nbytes // 4
    per_layer = sum(map(math.prod, layer.values()))
    for number in range(left_numel // per_layer):
        layers |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        left_numel -= per_layer
    vector = 16 * MIB
    return layers | {
        f"model.rest.{i}": (min(vector, left_numel - i * vector),) for i in range(-(-left_numel // vector))
    }


def make_state(nbytes: int, parts: Sequence[str] = PARTS) -> dict[str, torch.Tensor]:
    """Returns fp32 tensors by key, with an equal share of ``nbytes`` for every part.

    The values are random, so that no disk can compress them.
    """
    return fill({f"{part}/{name}": shape for part in parts for name, shape in shapes(nbytes // len(parts)).items()})


def fill(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Returns random fp32 tensors of these shapes, which follow each other in memory."""
    numel = sum(map(math.prod, shapes.values()))
    values = touched_memory(numel * 4).view(np.float32)
    np.random.default_rng(0).random(dtype=np.float32, out=values)
    whole = torch.from_numpy(values)
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {key: part.view(shapes[key]) for key, part in zip(shapes, whole.split(sizes), strict=True)}


def empty_like(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of the same shapes in memory that was touched before."""
    whole = torch.from_numpy(touched_memory(total_bytes(state)).view(np.float32))
    parts = whole.split([tensor.numel() for tensor in state.values()])
    return {key: part.view(state[key].shape) for key, part in zip(state, parts, strict=True)}


def memory_of(state: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Returns all bytes of a state that ``make_state`` has made, except for the parts of pages at both ends."""
    storage = next(iter(state.values())).untyped_storage()
    return whole_pages([torch.empty(0, dtype=torch.uint8).set_(storage)])[0]


def total_bytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


Ranks = list[list[Fragment]]
"""The fragments that each rank holds."""
METADATA = catalog.SaveMetadata(1, BLOCK_BYTES, {}, pack_tree({"engine": {}, "client_state": {}}, "", [], 0), {})


def cut(state: Mapping[str, torch.Tensor], world_size: int = 1) -> Ranks:
    """Cuts every tensor into one equal share for each rank, as ZeRO-3 does it."""
    ranks: Ranks = [[] for _ in range(world_size)]
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        flat, numel = tensor.reshape(-1), tensor.numel()
        share = -(-numel // world_size)
        for rank, fragments in enumerate(ranks):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                shape = tuple(tensor.shape)
                fragments.append(Fragment(part, name, "F32", Span(Grid(shape), start, stop), data=flat[start:stop]))
    return ranks


def write_rank(path: str, save_id: str, ranks: Ranks, rank: int) -> tuple[bytes, bytes]:
    """Writes the files of one rank of a write that has begun.

    Returns the rank's record, packed, and the digest of its digest table.
    """
    rank_writer = rank_write(path, save_id, ranks, rank, METADATA)
    return catalog.pack(catalog.rank_record(rank, rank_writer.data_files)), rank_writer.write_data_files(Snapshot())


def write_checkpoint(
    path: Path | str, ranks: Ranks, write_all: Callable[[str, str], list[tuple[bytes, bytes]]] | None = None
) -> None:
    """Does what ``zckpt.write`` does, by the same functions, but without an engine.

    ``write_all`` gets the path and the save id, lets all ranks write, and returns the values of ``write_rank``. If it
    is None, the ranks write one after the other in this process.
    """
    save_id = secrets.token_hex(8)
    first_writer = rank_write(path, save_id, [[]], 0, METADATA)
    first_writer.begin(Unlocked(first_writer.store))
    if write_all is None:
        written = [write_rank(str(path), save_id, ranks, rank) for rank in range(len(ranks))]
    else:
        written = write_all(str(path), save_id)
    rank_records, digests = zip(*written, strict=True)
    first_writer.make_manifest(catalog.unpack(rank_records))
    first_writer.commit(digests)


# Files and the page cache


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def make_durable(path: Path) -> None:
    """Calls fsync for the files and for the directories that name them, which the peers leave to their users."""
    for entry in [*files_of(path), *(d for d in path.rglob("*") if d.is_dir()), path, path.parent]:
        fd = os.open(entry, os.O_RDONLY)
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
    buffer = bytearray(MIB)
    for file in files_of(path):
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass


# Timing


class Timing(NamedTuple):
    """The time that one contestant has taken in one round."""

    seconds: float
    cpu_seconds: float
    """The processor time of all processes that have worked for the contestant."""


Rounds = Mapping[str, Sequence[Timing]]
"""The timings of every round that counts, by the label of the contestant."""


@dataclass(frozen=True)
class Contestant:
    """Something whose time is compared with that of others."""

    label: str
    action: Callable[[], object]
    """The function that is timed."""
    before: Callable[[], object] = lambda: None
    """A function that is called before ``action`` and is not timed, such as one that drops files from the cache."""
    after: Callable[[], object] = lambda: None
    """A function that is called after ``action`` and is not timed, such as one that removes the files written."""
    finish: Callable[[], object] = lambda: None
    """A function that waits for work in the background. It is not timed, but its processor time counts."""
    pids: Sequence[int] = ()
    """The ids of other processes that work for the contestant and live on when its action has ended."""


def loading(label: str, path: Path, prepare: Callable[[Path], object], load: Callable[[Path], object]) -> Contestant:
    """Returns a contestant that loads ``path``, once ``prepare`` has brought it into the page cache or out of it."""
    return Contestant(label, partial(load, path), partial(prepare, path), partial(drop_from_cache, path))


def interleaved(
    contestants: Sequence[Contestant],
    runs: int,
    barrier: Callable[[], object] = lambda: None,
    over_ranks: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, list[Timing]]:
    """Returns the timings of all rounds except for the first one, which does not count.

    Each round begins with another contestant, because a disk may be slower after one of them than after another. On
    several ranks, a contestant starts when all ranks are ready and ends when all of them are done. ``over_ranks`` adds
    up the processor time of all ranks.
    """
    rounds: dict[str, list[Timing]] = {contestant.label: [] for contestant in contestants}
    for number in range(runs + 1):
        first = number % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            contestant.before()
            os.sync()  # so that no contestant waits for data that another one, or another program, has left unwritten
            barrier()
            cpu_seconds_used = cpu_seconds(contestant.pids)
            start = time.perf_counter()
            result = contestant.action()
            barrier()
            elapsed = time.perf_counter() - start
            contestant.finish()
            cpu_seconds_used = cpu_seconds(contestant.pids) - cpu_seconds_used
            del result
            contestant.after()
            timing = Timing(elapsed, over_ranks(cpu_seconds_used))
            barrier()
            if number:
                rounds[contestant.label].append(timing)
    return rounds


def cpu_seconds(pids: Sequence[int] = ()) -> float:
    """Returns the processor time so far, user and system.

    It is that of all threads of this process, of its children that have ended, and of the processes ``pids``.
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    clock = ctypes.c_int()
    others = 0.0
    for pid in pids:
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
            raise ProcessLookupError(pid)
        others += time.clock_gettime(clock.value)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + others


def speedup(rounds: Rounds, of: str, over: str) -> float:
    """Returns how many times as fast ``of`` is as ``over``: the median of the rounds."""
    return statistics.median(b.seconds / a.seconds for a, b in zip(rounds[of], rounds[over], strict=True))


def fastest(rounds: Rounds, labels: Iterable[str]) -> str:
    """Returns the label whose median time is the shortest."""
    return min(labels, key=lambda label: statistics.median(timing.seconds for timing in rounds[label]))


def cpu_per_gib(rounds: Sequence[Timing], nbytes: int) -> float:
    """Returns the median, over the rounds, of the seconds of processor time for a GiB. Each round moved ``nbytes``."""
    return statistics.median(timing.cpu_seconds for timing in rounds) / (nbytes / GIB)


# Results


@dataclass(frozen=True)
class Target:
    """A bound that a measured value should keep to."""

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
    """The rows of times that a program has measured, and its targets."""

    name: str
    title: str
    options: Options
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, rounds: Rounds, nbytes: int | None, group: str = "") -> None:
        """Adds a row for each label. In each round, each contestant has moved ``nbytes``. With None, which is for work
        whose time does not depend on the number of bytes, a row has only the time."""
        for label, timings in rounds.items():
            median = statistics.median(timing.seconds for timing in timings)
            self.rows.append(
                {
                    "group": group,
                    "label": label,
                    "seconds": [timing.seconds for timing in timings],
                    "median_seconds": median,
                    "cpu_seconds": [timing.cpu_seconds for timing in timings],
                }
            )
            if nbytes is not None:
                per_gib = {"gib_per_second": nbytes / GIB / median, "cpu_seconds_per_gib": cpu_per_gib(timings, nbytes)}
                self.rows[-1] |= {"bytes": nbytes, **per_gib}

    def at_least(self, what: str, value: float, bound: float, unit: str = "x") -> None:
        self.targets.append(Target(what, value, bound, unit, True))

    def at_most(self, what: str, value: float, bound: float, unit: str = "x") -> None:
        self.targets.append(Target(what, value, bound, unit, False))

    def finish(self) -> None:
        """Prints the rows and the targets, and writes them to ``<results>/<name>.json``."""
        print(f"{self.title}\n")
        for row in self.rows:
            spread = f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f}"
            label = f"{row['group']}: {row['label']}" if row["group"] else row["label"]
            speed = ""
            if "bytes" in row:
                speed = f"{row['gib_per_second']:7.2f} GiB/s {row['cpu_seconds_per_gib']:7.3f} CPU s/GiB"
            print(f"  {label:52} {row['median_seconds']:9.4f} s  ({spread}) {speed}")
        print()
        for target in self.targets:
            print(f"  {target}")
        print(flush=True)
        self.options.results.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "title": self.title,
            "size_bytes": self.options.size,
            "runs": self.options.runs,
            "commit": output_of(
                "git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"
            ),
            "machine": machine(self.options.dir),
            "rows": self.rows,
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            **self.extra,
        }
        (self.options.results / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def machine(directory: Path) -> dict[str, Any]:
    file_system = output_of("findmnt", "--first-only", "--noheadings", "--output", "FSTYPE", "--target", str(directory))
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": file_system or "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        # The average of five minutes. A figure that is higher than these processes explain shows that others ran, too.
        "load_average": os.getloadavg()[1],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def output_of(*command: str) -> str:
    """Returns the output of a command without the white space around it, or an empty string if the command failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
