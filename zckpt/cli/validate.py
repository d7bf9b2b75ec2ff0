"""Check a checkpoint against the specification.

The exit status is 0 if the checkpoint conforms to the specification, 1 if it does not, and 2 if there is no checkpoint
or it cannot be read. Under a launcher such as torchrun, the ranks share the work, and rank 0 prints the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import output

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt validate checkpoints
  zckpt validate checkpoints/global_step100 --level deep --json
  torchrun --nproc-per-node 8 -m zckpt validate checkpoints
"""


def configure(parser: argparse.ArgumentParser) -> None:
    from zckpt.tools.validating.report import LEVELS

    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="digests",
        help="structure: check all but tensor data; digests: also all bytes; deep: also values; default: digests",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    with output.launched() as rank:
        report = zckpt.validate(arguments.path, level=arguments.level, progress=output.progress_bar())
        if rank == 0:
            output.print_text(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1
