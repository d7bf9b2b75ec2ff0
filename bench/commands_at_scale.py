"""Commands that read tensors, on many ranks and on many tensors, with next to no data: what planning takes.

    python bench/commands_at_scale.py [--ranks 1024] [--parameters 1000] [--tensors 100000] [--dir DIR] [--json FILE]

Two checkpoints of ``--ranks`` ranks and ``--parameters`` parameters in 3 parts, with other values, and two of one rank
with ``--tensors`` tensors. Each command runs once, in a fresh process: seconds and the peak memory, both without the
import of torch.
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

from zckpt.format.digest import BLOCK_BYTES
from zckpt.plan import catalog
from zckpt.state.inventory import Fragment
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer.snapshot import Snapshot
from zckpt.writing.collect import pack_tree

PARTS = ("master", "exp_avg", "exp_avg_sq")
PROGRAM = """
import contextlib, io, json, sys, time
import torch
from pathlib import Path
from zckpt.cli import main
def peak(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])
Path("/proc/self/clear_refs").write_text("5")
before, start = peak("VmRSS"), time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    status = main(sys.argv[1:])
seconds = time.perf_counter() - start
print(json.dumps({"status": status, "seconds": seconds, "peak_mib": (peak("VmHWM") - before) / 1024}))
"""


class State(Sequence[list[Fragment]]):
    """What each rank holds, made when it is asked for. Every parameter is cut into equal shares, as ZeRO-3 does it."""

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
        found = []
        for name, shape in self._shapes.items():
            numel = math.prod(shape)
            share = -(-numel // self._ranks)
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                data = self._values[start:stop]
                found += [Fragment(part, name, shape, "F32", start, stop, data=data) for part in PARTS]
        return found


def write(path: Path, state: State, seed: int) -> int:
    """Writes a checkpoint, one rank after the other; returns the number of pieces."""
    about = catalog.About(100 + seed, BLOCK_BYTES, {}, pack_tree({"engine": {}, "client_state": {}}, "", [], 0), {})
    save_id = f"{seed:016x}"
    first = rank_write(path, save_id, [[]], 0, about)
    receipts, digests = [], []
    first.begin(Unlocked(first.store))
    for rank in range(len(state)):
        own = rank_write(path, save_id, state, rank, about)
        receipts.append(catalog.receipt(rank, own.shards))
        digests.append(own.write_own(Snapshot()))
    first.describe(receipts)
    first.commit(digests)
    return sum(len(one.geometries[shard.geometry].tensor) for one in receipts for shard in one.shards)


def measure(arguments: list[str], status: int) -> dict[str, float]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(ran.stdout)
    assert found.pop("status") == status, ran.stderr
    return found


def commands(run: Path) -> dict[str, tuple[list[str], int]]:
    """Each with its exit status."""
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
    results = {}
    for ranks, parameters in ((options.ranks, options.parameters), (1, -(-options.tensors // len(PARTS)))):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            run = Path(directory)
            start = time.perf_counter()
            for seed, name in enumerate("ab"):
                pieces = write(run / name, State(ranks, parameters, seed), seed)
            nbytes = sum(one.stat().st_size for one in (run / "a").rglob("*") if one.is_file())
            about = (
                f"{ranks:,} ranks, {len(PARTS) * parameters:,} tensors, {pieces:,} pieces, {nbytes / 2**20:,.0f} MiB"
            )
            print(f"{about} (written in {(time.perf_counter() - start) / 2:.1f} s)", flush=True)
            results[about] = {}
            for name, (arguments, status) in commands(run).items():
                found = results[about][name] = measure(arguments, status)
                print(f"  {name:20} {found['seconds']:8.2f} s {found['peak_mib']:8.0f} MiB", flush=True)
                if name == "export":
                    shutil.rmtree(run / "exported")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
