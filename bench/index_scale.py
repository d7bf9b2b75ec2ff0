"""Measures the size and the speed of the index at 1024 ranks x 1000 parameters x 3 parts, without tensor data.

    python bench/index_scale.py [--ranks N] [--tp N] [--parameters N] [--runs N] [--json FILE]

The program makes the records of the ranks of a synthetic ZeRO-3 checkpoint, as each rank sends one to rank 0. With
--tp, tensor parallelism has cut the matrices over N ranks before, half of them in their rows and half of them in their
columns. Then it measures, in fresh processes: the time and the peak memory that rank 0 takes to build the manifest and
the index of these records, and to add the digests of the ranks; the bytes for each piece; the time, the reads and the
bytes that it takes to open the checkpoint and to look up one key; and the time and the peak memory that it takes to
decode the whole index. Memory is counted above that of the imports, and of the records as they were received.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgpack

from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES
from zckpt.geometry import all_of, section_of
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import Fragment

PARTS = ("master", "exp_avg", "exp_avg_sq")

PEAK = """
import sys, time, json, zckpt
zckpt.open  # imports torch
def peak():  # ru_maxrss would be the peak of the parent, from before exec
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
"""
BUILD = (
    PEAK
    + """
import msgpack
from pathlib import Path
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES
from zckpt.plan import catalog
path, save_id = Path(sys.argv[1]), sys.argv[2]
with (path / "records").open("rb") as file:
    received = list(msgpack.Unpacker(file))
before = peak()
start, cpu_start = time.perf_counter(), time.process_time()
metadata = catalog.SaveMetadata(step=100, block_bytes=BLOCK_BYTES, aliases={}, state=b"\\xc0", writer={})
manifest, index = catalog.catalog(catalog.unpack(received), save_id, metadata)
manifest = catalog.with_digests(manifest, [bytes(16)] * len(received))
figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start,
           "received_bytes": sum(map(len, received)), "extra_bytes": peak() - before}
(path / names.index_path(save_id)).write_bytes(index)
(path / names.MANIFEST).write_bytes(manifest)
print(json.dumps(figures))
"""
)
ONE_KEY = """
import sys, time, json, zckpt
zckpt.open  # imports torch
start = time.perf_counter()
ck = zckpt.open(sys.argv[1])
info = ck[sys.argv[2]]
n = len(info.pieces)
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "pieces": n, "reads": ck.io.reads, "bytes": ck.io.bytes_read}))
"""
WHOLE = (
    PEAK
    + """
from zckpt.checkpoint.open import open_loader
before = peak()
start = time.perf_counter()
ck = open_loader(sys.argv[1])
for number in range(len(ck.manifest.chunks)):
    ck.contents.chunk(number)
n = sum(c.pieces for p in ck.manifest.parts for c in ck.manifest.chunks if c.layout_id == p.layout_id)
print(json.dumps({"seconds": time.perf_counter() - start, "pieces": n, "reads": ck.reader.count.reads,
                  "bytes": ck.reader.count.bytes_read,
                  "extra_bytes": peak() - before, "peak_bytes": peak()}))
"""
)
SAVE_ID = "0" * 16


def generate(path: Path, ranks: int, parameters: int, tp: int, seed: int = 0) -> tuple[int, list[str]]:
    """Writes the records of all ranks of a checkpoint, and makes the directory of its data.

    The shapes are drawn at random, but resemble those of a transformer: there are matrices of many sizes, biases, and
    tensors with fewer elements than there are ranks. Each parameter is cut into equal shares, as ZeRO-3 does it. The
    last ranks have a shorter share or none.

    Returns the number of pieces and the keys.
    """
    rng = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(parameters):
        kind = rng.random()
        wide, high = 64 * rng.randint(16, 128), 64 * rng.randint(16, 128)
        name = f"model.layers.{i // 10}.block{i % 10}.weight"
        shapes[name] = (wide, high) if kind < 0.6 else (wide,) if kind < 0.95 else (rng.randint(1, ranks),)
    records = []
    pieces = 0
    for rank in range(ranks):
        fragments = []
        for number, (name, shape) in enumerate(shapes.items()):
            held = all_of(shape)
            if tp > 1 and len(shape) == 2:
                width = shape[number % 2] // tp
                held = section_of(shape, {number % 2: ([((width * of, width),) for of in range(tp)], rank % tp)})
            elif rank % tp:
                continue  # Another rank writes this replica.
            share = -(-held.numel // (ranks // tp))
            span = held.clip(rank // tp * share, (rank // tp + 1) * share)
            if span.numel:
                fragments += [Fragment(part, name, "F32", span) for part in PARTS]
        plans = plan_data_files(fragments, SAVE_ID, rank, ranks, block_bytes=BLOCK_BYTES)
        pieces += sum(len(plan.fragments) for plan in plans)
        records.append(catalog.pack(catalog.rank_record(rank, plans)))
    (path / names.data_dir(SAVE_ID)).mkdir(parents=True)
    (path / "records").write_bytes(b"".join(map(msgpack.packb, records)))
    return pieces, [f"{part}/{name}" for part in PARTS for name in shapes]


def measure(program: str, *arguments: str) -> dict[str, float]:
    """Runs one of the programs above in a fresh process and returns its figures."""
    out = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--tp", type=int, default=1, choices=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        start = time.perf_counter()
        pieces, keys = generate(path, options.ranks, options.parameters, options.tp)
        seconds = time.perf_counter() - start
        build_runs = [measure(BUILD, directory, SAVE_ID) for _ in range(options.runs)]
        (path / "records").unlink()
        sizes = {file.name: file.stat().st_size for file in path.rglob("*") if file.is_file()}
        one_key_runs = [
            measure(ONE_KEY, directory, keys[len(keys) * (i + 1) // (options.runs + 1)]) for i in range(options.runs)
        ]
        whole_index_runs = [measure(WHOLE, directory) for _ in range(options.runs)]
    results = {
        "ranks": options.ranks,
        "tp": options.tp,
        "parameters": options.parameters,
        "parts": len(PARTS),
        "pieces": pieces,
        "bytes_per_piece": sum(sizes.values()) / pieces,
        "sizes_bytes": sizes,
        "generate_seconds": seconds,
        "build": {name: statistics.median(run[name] for run in build_runs) for name in build_runs[0]},
        "one_key": {name: statistics.median(run[name] for run in one_key_runs) for name in one_key_runs[0]},
        "whole_index": {name: statistics.median(run[name] for run in whole_index_runs) for name in whole_index_runs[0]},
    }
    print(f"{pieces:,} pieces: {options.ranks} ranks x {options.parameters} parameters x {len(PARTS)} parts")
    print(f"on disk          {results['bytes_per_piece']:.3f} bytes per piece {sizes}")
    run = results["build"]
    print(
        f"build            {run['seconds']:.2f} s, {run['cpu_seconds']:.2f} s of a processor, from "
        f"{run['received_bytes'] / 2**20:.0f} MiB of records; {run['extra_bytes'] / 2**20:.0f} MiB above them"
    )
    for name, label in (("one_key", "open, one key"), ("whole_index", "open, whole index")):
        run = results[name]
        extra = f", {run['extra_bytes'] / 2**20:.0f} MiB above the imports" if "extra_bytes" in run else ""
        print(f"{label:16} {run['seconds'] * 1e3:.1f} ms, {run['reads']:.0f} reads, {run['bytes']:,.0f} bytes{extra}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
