"""Size and speed of the index at 1024 ranks x 1000 parameters x 3 parts, without tensor data.

    python bench/index_scale.py [--ranks N] [--parameters N] [--runs N] [--json FILE]

Builds manifest and index of a synthetic ZeRO-3 checkpoint, then measures in fresh processes: bytes per piece, opening
and resolving one key (time, reads, bytes), and decoding the whole index (time, peak memory above the imports).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PARTS = ("master", "exp_avg", "exp_avg_sq")

ONE_KEY = """
import sys, time, json, zckpt
start = time.perf_counter()
ck = zckpt.open(sys.argv[1])
info = ck[sys.argv[2]]
n = len(info.pieces)
print(json.dumps({"seconds": time.perf_counter() - start, "pieces": n, "reads": ck.io.reads, "bytes": ck.io.bytes_read}))
"""
WHOLE = """
import sys, time, json, resource, zckpt
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
start = time.perf_counter()
ck = zckpt.open(sys.argv[1])
n = ck.read_index()
print(json.dumps({"seconds": time.perf_counter() - start, "pieces": n, "reads": ck.io.reads, "bytes": ck.io.bytes_read,
                  "extra_bytes": peak() - before, "peak_bytes": peak()}))
"""


def generate(path: Path, ranks: int, parameters: int, seed: int = 0) -> int:
    """Writes manifest and index of a checkpoint without its data files; returns the number of pieces.

    Shapes are drawn like a transformer's: matrices of many sizes, biases, and some tensors with fewer elements than ranks.
    """
    import random

    from zckpt.plan.catalog import Receipt, catalog
    from zckpt.plan.layout import plan_shards
    from zckpt.state.inventory import Fragment

    rng = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(parameters):
        kind = rng.random()
        width = 64 * rng.randint(16, 128)
        shape = (width, 64 * rng.randint(16, 128)) if kind < 0.6 else (width,) if kind < 0.95 else (rng.randint(1, ranks),)
        shapes[f"model.layers.{i // 10}.block{i % 10}.weight"] = shape
    save_id = f"{seed:016x}"
    receipts = []
    for rank in range(ranks):
        fragments = []
        for part in PARTS:
            for name, shape in shapes.items():
                numel = shape[0] * (shape[1] if len(shape) == 2 else 1)
                share = -(-numel // ranks)
                start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
                if start < stop:
                    fragments.append(Fragment(part, name, shape, "F32", start, stop))
        shards = plan_shards(tuple(fragments), save_id, rank, ranks, block_bytes=1 << 20)
        receipts.append(Receipt(rank, b"\\0" * 16, shards))
    manifest, index = catalog(receipts, step=100, block_bytes=1 << 20, aliases={}, state=b"\\xc0", writer={})
    from zckpt.format import manifest as manifest_format
    from zckpt.format import names

    (path / names.data_dir(save_id)).mkdir(parents=True)
    (path / names.index_path(save_id)).write_bytes(index)
    (path / names.MANIFEST).write_bytes(manifest_format.encode(manifest))
    return sum(len(shard.pieces) for receipt in receipts for shard in receipt.shards)
