"""Measures what commands that read tensors need for their planning alone.

    python bench/commands_at_scale.py [--ranks 1024] [--parameters 1000] [--tensors 100000] [--dir DIR] [--json FILE]

There are many ranks or many tensors, and next to no data: two checkpoints of ``--ranks`` ranks and ``--parameters``
parameters in 3 parts, which differ in their values, and two checkpoints of one rank with ``--tensors`` tensors. Each
command runs once, in a fresh process. Measured are the seconds, the processor seconds of all threads and the peak
memory, all of them without the import of torch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from zckpt.checkpoint.writing.collect import pack_tree
from zckpt.format.digest import BLOCK_BYTES
from zckpt.geometry import Grid, Span
from zckpt.plan import catalog
from zckpt.plan.inventory import Fragment
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer.snapshot import Snapshot

PARTS = ("master", "exp_avg", "exp_avg_sq")
PROGRAM = """
import contextlib, io, json, sys, time
import torch
from pathlib import Path
from zckpt.cli import main
def peak(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])
Path("/proc/self/clear_refs").write_text("5")
before, start, used = peak("VmRSS"), time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(io.StringIO()):
    status = main(sys.argv[1:])
seconds, processor_seconds = time.perf_counter() - start, time.process_time() - used
peak_mib = (peak("VmHWM") - before) / 1024
print(json.dumps(
    {"status": status, "seconds": seconds, "processor_seconds": processor_seconds, "peak_mib": peak_mib}
))
"""


class State(Sequence[list[Fragment]]):
    """The fragments of each rank, which are made when they are asked for.

    Every parameter is cut into equal shares, as ZeRO-3 does it.
    """

    def __init__(self, ranks: int, parameters: int, seed: int) -> None:
        draw = random.Random(0)
        self._ranks = ranks
        self._shapes: dict[str, tuple[int, ...]] = {}
        for number in range(parameters):
            kind, wide, high = draw.random(), draw.randint(16, 128), draw.randint(16, 128)
            shape = (wide, high) if kind < 0.6 else (wide,)
            self._shapes[f"model.layers.{number // 10}.block{number % 10}.weight"] = shape
        torch.manual_seed(seed)
        self._values = torch.randn(128 * 128)

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, rank: int) -> list[Fragment]:  # type: ignore[override]
        fragments = []
        for name, shape in self._shapes.items():
            numel = math.prod(shape)
            share = -(-numel // self._ranks)
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                data = self._values[start:stop]
                fragments += [Fragment(part, name, "F32", Span(Grid(shape), start, stop), data=data) for part in PARTS]
        return fragments


def write(path: Path, state: State, seed: int) -> int:
    """Writes a checkpoint, one rank after the other, and returns the number of its pieces."""
    metadata = catalog.SaveMetadata(
        100 + seed, BLOCK_BYTES, {}, pack_tree({"engine": {}, "client_state": {}}, "", [], 0), {}
    )
    save_id = f"{seed:016x}"
    first_writer = rank_write(path, save_id, [[]], 0, metadata)
    rank_records, digests = [], []
    first_writer.begin(Unlocked(first_writer.store))
    for rank in range(len(state)):
        rank_writer = rank_write(path, save_id, state, rank, metadata)
        rank_records.append(catalog.rank_record(rank, rank_writer.data_files))
        digests.append(rank_writer.write_data_files(Snapshot()))
    first_writer.make_manifest(rank_records)
    first_writer.commit(digests)
    return sum(len(record.piece_columns[file.columns_id]) for record in rank_records for file in record.files)


def measure(arguments: list[str], status: int) -> dict[str, float]:
    """Runs the command in a fresh process and returns its figures. Its exit status has to be ``status``."""
    process = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(process.stdout)
    assert figures.pop("status") == status, process.stderr
    return figures


def commands(run: Path) -> dict[str, tuple[list[str], int]]:
    """Returns the arguments and the expected exit status of each command."""
    a, b, copy = (str(run / name) for name in ("a", "b", "copy"))
    return {
        "cp": (["cp", a, copy], 0),
        "cp KEY": (["cp", a, str(run / "part"), "master/*"], 0),
        "diff, equal": (["diff", a, copy], 0),
        "diff, all differs": (["diff", a, b], 1),
        "show": (["show", a, "*/*"], 0),
        "validate": (["validate", a], 0),
        "export": (["export", a, str(run / "exported")], 0),
        "prune": (["prune", str(run), "--keep-last", "1"], 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for ranks, parameters in ((options.ranks, options.parameters), (1, -(-options.tensors // len(PARTS)))):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            run = Path(directory)
            start = time.perf_counter()
            for seed, name in enumerate("ab"):
                pieces = write(run / name, State(ranks, parameters, seed), seed)
            nbytes = sum(file.stat().st_size for file in (run / "a").rglob("*") if file.is_file())
            title = (
                f"{ranks:,} ranks, {len(PARTS) * parameters:,} tensors, {pieces:,} pieces, {nbytes / 2**20:,.0f} MiB"
            )
            print(f"{title} (written in {(time.perf_counter() - start) / 2:.1f} s)", flush=True)
            results[title] = {}
            for name, (arguments, status) in commands(run).items():
                figures = results[title][name] = measure(arguments, status)
                times = f"{figures['seconds']:8.2f} s {figures['processor_seconds']:8.2f} processor s"
                print(f"  {name:20} {times} {figures['peak_mib']:8.0f} MiB", flush=True)
                if name == "export":
                    shutil.rmtree(run / "exported")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
