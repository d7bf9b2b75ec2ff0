"""Check a checkpoint against the specification; exit status 0 if it conforms, 1 if not.

Under a launcher such as torchrun the ranks share the work, and rank 0 prints.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zckpt

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument(
        "--level",
        choices=["structure", "digests", "deep"],
        default="digests",
        help="structure: all but tensor data; digests: every byte too (default); deep: also NaN, infinities, signs",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    with _launched() as rank:
        report = zckpt.validate(arguments.path, level=arguments.level, progress=zckpt.ProgressBar())
        if rank == 0:
            print(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1


@contextmanager
def _launched() -> Iterator[int]:
    """This process's rank; with the process group of the launcher, if there is one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
