"""Compare two checkpoints: structure, settings, and the values of all tensors.

They may be of any number of ranks, stage and offload. The exit status is 0 if they are equal, 1 if they differ, and 2
if one cannot be read. Values are compared bit for bit, unless there is a tolerance. What has the same digests in both
is not read. Under a launcher such as torchrun the ranks share the work, and rank 0 prints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import zckpt
from zckpt.cli.launched import launched

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt diff checkpoints/global_step100 checkpoints/global_step200
  zckpt diff before after 'master/*' --rtol 1e-5
  torchrun --nproc-per-node 8 -m zckpt diff before after --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("b", help="another one")
    parser.add_argument("keys", nargs="*", metavar="KEY", help="compare these keys and globs alone; no settings then")
    parser.add_argument(
        "--rtol", type=_tolerance, default=0.0, metavar="R", help="values may differ by R of the larger one of both"
    )
    parser.add_argument("--atol", type=_tolerance, default=0.0, metavar="A", help="and by A on top of that")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    with launched() as rank:
        found = zckpt.diff(
            arguments.a,
            arguments.b,
            arguments.keys or None,
            rtol=arguments.rtol,
            atol=arguments.atol,
            progress=zckpt.ProgressBar(),
        )
        if rank == 0:
            print(found.to_json() if arguments.json else found)
    return 0 if found.equal else 1


def _tolerance(text: str) -> float:
    value = float(text)
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError
    return value
