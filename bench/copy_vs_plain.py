"""Compares ``zckpt.cp`` of a whole checkpoint, which verifies all digests, with a plain copy of the same bytes.

    python bench/copy_vs_plain.py [--size 3GiB] [--dir DIR] [--runs 5]

The plain copy is ``cp -r`` without shared blocks (``--reflink=never``), and then an fsync of each file and directory.
The files are not in the page cache when they are read.
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
    from collections.abc import Callable
    from pathlib import Path

PLAIN = "cp -r, then fsync"
COPIED = "zckpt.cp, all bytes written"


def plain_copy(source: Path, destination: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, destination], check=True)
    make_durable(destination)


def main() -> None:
    options = parse_options(__doc__)
    result = Result("copy_vs_plain", "Copy a checkpoint", options)
    with workspace(options, 2 * options.size) as directory:
        source, destination = directory / "checkpoint", directory / "copy"
        state = make_state(options.size)
        nbytes = total_bytes(state)
        write_checkpoint(source, cut(state, 2))
        state.clear()
        actions: dict[str, Callable[[], object]] = {
            PLAIN: partial(plain_copy, source, destination),
            COPIED: partial(zckpt.cp, source, destination, share=False),
            "zckpt.cp, all bytes written, unverified": partial(
                zckpt.cp, source, destination, share=False, verify=False
            ),
            "zckpt.cp, files shared": partial(zckpt.cp, source, destination),
        }
        contestants = [
            Contestant(label, action, partial(drop_from_cache, directory), partial(remove, destination))
            for label, action in actions.items()
        ]
        rounds = interleaved(contestants, options.runs)
    result.add(rounds, nbytes)
    result.at_least(f"{COPIED}, against {PLAIN}", speedup(rounds, COPIED, over=PLAIN), 1)
    result.finish()


if __name__ == "__main__":
    main()
