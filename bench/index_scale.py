"""Size and speed of the index at 1024 ranks x 1000 parameters x 3 parts, without tensor data.

    python bench/index_scale.py [--ranks N] [--parameters N] [--runs N] [--json FILE]

Builds manifest and index of a synthetic ZeRO-3 checkpoint, then measures in fresh processes: bytes per piece, opening
and resolving one key (time, reads, bytes), and decoding the whole index (time, peak memory above the imports).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES
from zckpt.plan import catalog
from zckpt.plan.layout import plan_shards
from zckpt.state.inventory import Fragment

PARTS = ("master", "exp_avg", "exp_avg_sq")

ONE_KEY = """
import sys, time, json, zckpt
start = time.perf_counter()
ck = zckpt.open(sys.argv[1])
info = ck[sys.argv[2]]
n = len(info.pieces)
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "pieces": n, "reads": ck.io.reads, "bytes": ck.io.bytes_read}))
"""
WHOLE = """
import sys, time, json, zckpt
def peak():  # ru_maxrss would be the parent's, from before exec
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
before = peak()
start = time.perf_counter()
ck = zckpt.open(sys.argv[1])
for number in range(len(ck.manifest.chunks)):
    ck.contents.chunk(number)
n = sum(c.pieces for p in ck.manifest.parts for c in ck.manifest.chunks if c.layout == p.layout)
print(json.dumps({"seconds": time.perf_counter() - start, "pieces": n, "reads": ck.io.reads, "bytes": ck.io.bytes_read,
                  "extra_bytes": peak() - before, "peak_bytes": peak()}))
"""


def generate(path: Path, ranks: int, parameters: int, seed: int = 0) -> tuple[int, list[str]]:
    """Writes manifest and index of a checkpoint without its data files; returns the pieces and the keys.

    Shapes are drawn like a transformer's: matrices of many sizes, biases, and tensors with fewer elements than ranks.
    Each parameter is cut as ZeRO-3 does it, into equal shares with a shorter or no share for the last ranks.
    """
    rng = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(parameters):
        kind = rng.random()
        wide, high = 64 * rng.randint(16, 128), 64 * rng.randint(16, 128)
        shape = (wide, high) if kind < 0.6 else (wide,) if kind < 0.95 else (rng.randint(1, ranks),)
        shapes[f"model.layers.{i // 10}.block{i % 10}.weight"] = shape
    save_id = f"{seed:016x}"
    receipts = []
    pieces = 0
    for rank in range(ranks):
        fragments = []
        for name, shape in shapes.items():
            numel = math.prod(shape)
            share = -(-numel // ranks)
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                fragments += [Fragment(part, name, shape, "F32", start, stop) for part in PARTS]
        plans = plan_shards(fragments, save_id, rank, ranks, block_bytes=BLOCK_BYTES)
        pieces += sum(len(plan.fragments) for plan in plans)
        receipts.append(catalog.receipt(rank, plans))
    about = catalog.About(step=100, block_bytes=BLOCK_BYTES, aliases={}, state=b"\xc0", writer={})
    manifest, index = catalog.catalog(receipts, save_id, about)
    (path / names.data_dir(save_id)).mkdir(parents=True)
    (path / names.index_path(save_id)).write_bytes(index)
    (path / names.MANIFEST).write_bytes(manifest)
    return pieces, [f"{part}/{name}" for part in PARTS for name in shapes]


def measure(program: str, *arguments: str) -> dict[str, float]:
    """Runs one of the programs above in a fresh process."""
    out = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        start = time.perf_counter()
        pieces, keys = generate(path, options.ranks, options.parameters)
        seconds = time.perf_counter() - start
        sizes = {file.name: file.stat().st_size for file in path.rglob("*") if file.is_file()}
        one = [
            measure(ONE_KEY, directory, keys[len(keys) * (i + 1) // (options.runs + 1)]) for i in range(options.runs)
        ]
        whole = [measure(WHOLE, directory) for _ in range(options.runs)]
    results = {
        "ranks": options.ranks,
        "parameters": options.parameters,
        "parts": len(PARTS),
        "pieces": pieces,
        "bytes_per_piece": sum(sizes.values()) / pieces,
        "sizes_bytes": sizes,
        "generate_seconds": seconds,
        "one_key": {name: statistics.median(run[name] for run in one) for name in one[0]},
        "whole_index": {name: statistics.median(run[name] for run in whole) for name in whole[0]},
    }
    print(f"{pieces:,} pieces: {options.ranks} ranks x {options.parameters} parameters x {len(PARTS)} parts")
    print(f"on disk          {results['bytes_per_piece']:.3f} bytes per piece {sizes}")
    for name, label in (("one_key", "open, one key"), ("whole_index", "open, whole index")):
        run = results[name]
        extra = f", {run['extra_bytes'] / 2**20:.0f} MiB above the imports" if "extra_bytes" in run else ""
        print(f"{label:16} {run['seconds'] * 1e3:.1f} ms, {run['reads']:.0f} reads, {run['bytes']:,.0f} bytes{extra}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
