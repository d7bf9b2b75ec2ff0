"""Compares validating a checkpoint that is not cached, at every level, with ``cat`` of its files.

    python bench/validate.py [--size 3GiB] [--dir DIR] [--runs 5]

The checkpoint has two ranks and three parts. The memory that each level needs (VmHWM) is measured in a fresh process.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import zckpt
from common import (
    GIB,
    Contestant,
    Result,
    cut,
    drop_from_cache,
    files_of,
    interleaved,
    make_state,
    parse_options,
    speedup,
    workspace,
    write_checkpoint,
)
from sampler import metered

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.tools.validating.report import Level

LEVELS: tuple[Level, ...] = ("structure", "digests", "deep")
BOUND_MIB = 256 + 64


def validate(path: Path, level: Level) -> None:
    report = zckpt.validate(path, level=level)
    assert report.ok, str(report)


def memory_of(path: Path, level: Level) -> dict[str, float]:
    figures: dict[str, dict[str, float]] = {}
    with metered(figures, level):
        validate(path, level)
    return figures[level]


def main() -> None:
    options = parse_options(__doc__)
    with workspace(options, options.size) as directory:
        path = directory / "checkpoint"
        write_checkpoint(path, cut(make_state(options.size), 2))
        drop = partial(drop_from_cache, path)

        def cat() -> None:
            subprocess.run(["cat", *files_of(path)], stdout=subprocess.DEVNULL, check=True)

        memory = {}
        for level in LEVELS:
            drop()
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                memory[level] = fresh.submit(memory_of, path, level).result()
        contestants = [Contestant("cat", cat, drop)]
        contestants += [Contestant(level, partial(validate, path, level), drop) for level in LEVELS]
        rounds = interleaved(contestants, options.runs)
    result = Result("validate", f"Validation of {options.size / GIB:.3g} GiB, cold", options)
    result.add(rounds, options.size)
    for level in LEVELS[1:]:
        result.at_least(f"validate --level {level}, against cat, cold", speedup(rounds, level, "cat"), 0.9)
    for level, growth in memory.items():
        result.at_most(f"extra memory of validate --level {level}", growth["peak_mib"], BOUND_MIB, "MiB")
    result.extra["memory"] = memory
    result.finish()


if __name__ == "__main__":
    main()
