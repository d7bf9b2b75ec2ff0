"""Compares a second checkpoint that reuses the unchanged files of the first one with one that writes all bytes.

    python bench/reuse.py [--size 1GiB] [--dir DIR] [--runs 5]

There are three runs, whose checkpoints have ``--size`` bytes each: one that trains LoRA adapters of 1% of the
parameters, one with half of its parameters frozen, and one in which everything has changed. Frozen weights are in bf16.
Each trained parameter has a master and two moments in fp32, and all of them change between two writes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import zckpt
from common import GIB, Contestant, Result, interleaved, parse_options, remove, speedup, workspace
from zckpt.plan.inventory import BUFFER, MASTER
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 20
FROZEN_BYTES, TRAINED_BYTES = 2, 12
"""The bytes of a frozen parameter, and those of a trained one with its moments."""
RUNS = {"LoRA": 0.99, "half of the layers frozen": 0.5, "everything has changed": 0.0}
"""The share of the parameters that is frozen, by the title of the run."""
WRITTEN, REUSED = "everything written", "reuse"


def make_engine(nbytes: int, frozen: float) -> ReferenceEngine:
    numel = nbytes / (frozen * FROZEN_BYTES + (1 - frozen) * TRAINED_BYTES) / LAYERS
    sizes = {"frozen": int(numel * frozen), "trained": int(numel * (1 - frozen))}
    shapes = {f"layers.{i}.{kind}": (size,) for i in range(LAYERS) for kind, size in sizes.items() if size}
    return ReferenceEngine(shapes, frozen=[name for name in shapes if name.endswith("frozen")])


def train(engine: ReferenceEngine) -> None:
    for part in (*[part for part in engine.tensors if part.startswith("exp_avg")], MASTER, BUFFER):
        for tensor in engine.tensors[part].values():
            tensor.add_(1)
    engine.steps += 1


def new_bytes(path: Path) -> int:
    """Returns the bytes of the files in ``path`` that no other checkpoint has."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.stat().st_nlink == 1)


def main() -> None:
    options = parse_options(__doc__, size=GIB)
    result = Result("reuse", "The second checkpoint of a run", options)
    for name, frozen in RUNS.items():
        engine = make_engine(options.size, frozen)
        with workspace(options, 2 * options.size) as directory:
            first, second = directory / "first", directory / "second"
            zckpt.write(engine, first, reuse=None, latest=False)
            new: dict[str, int] = {}

            def after(label: str, second: Path = second, new: dict[str, int] = new) -> None:
                new[label] = new_bytes(second)
                remove(second)

            rounds = interleaved(
                [
                    Contestant(
                        label,
                        partial(zckpt.write, engine, second, reuse=reuse, latest=False),
                        partial(train, engine),
                        partial(after, label),
                    )
                    for label, reuse in ((WRITTEN, None), (REUSED, first))
                ],
                options.runs,
            )
        result.add(rounds, new[WRITTEN], name)
        result.extra.setdefault("new_bytes", {})[name] = new
        ratio = speedup(rounds, REUSED, over=WRITTEN)
        result.at_least(f"{name}: unchanged files shared, against everything written", ratio, 1.0 if frozen else 0.97)
        result.at_most(f"{name}: bytes that are new, of all", new[REUSED] / new[WRITTEN], 1.0)
    result.finish()


if __name__ == "__main__":
    main()
