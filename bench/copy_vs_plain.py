"""A copy of a whole checkpoint that compares all digests: against a plain copy of the same bytes, and fsync.

    python bench/copy_vs_plain.py [--size 3GiB] [--dir DIR] [--runs 5]

The plain copy is ``cp -r`` without shared blocks (``--reflink=never``), and then an fsync of each file and directory.
The files that are read are not in the page cache.
"""

from __future__ import annotations

import subprocess
from functools import partial
from typing import TYPE_CHECKING

import zckpt
from common import (
    Contestant,
    Result,
    cut,
    drop_from_cache,
    interleaved,
    make_durable,
    make_state,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = "cp -r, then fsync"


def plain_copy(source: Path, destination: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, destination], check=True)
    make_durable(destination)


def main() -> None:
    options = parse_options(__doc__)
    result = Result("copy_vs_plain", "A copy of a checkpoint", options)
    with workspace(options, 2 * options.size) as directory:
        source, destination = directory / "checkpoint", directory / "copy"
        state = make_state(options.size)
        nbytes = total_bytes(state)
        write_checkpoint(source, cut(state, 2))
        state.clear()
        actions = {
            PLAIN: partial(plain_copy, source, destination),
            "zckpt.cp": partial(zckpt.cp, source, destination),
            "zckpt.cp, unverified": partial(zckpt.cp, source, destination, verify=False),
        }
        contestants = [
            Contestant(label, action, partial(drop_from_cache, directory), partial(remove, destination))
            for label, action in actions.items()
        ]
        rounds = interleaved(contestants, options.runs)
    result.add(rounds, nbytes)
    result.at_least("zckpt.cp, against cp -r and fsync", speedup(rounds, "zckpt.cp", over=PLAIN), 1)
    result.finish()


if __name__ == "__main__":
    main()
