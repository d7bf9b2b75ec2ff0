"""Rebuild a lost or damaged manifest, index or digest table from the data files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import output

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt repair checkpoints/global_step100
  zckpt repair checkpoints/global_step100 --output rebuilt/global_step100
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the directory of the checkpoint")
    parser.add_argument(
        "--output", metavar="DIR", help="make a complete checkpoint here, and leave the damaged one unchanged"
    )
    parser.add_argument(
        "--accept-unverified",
        action="store_true",
        help="continue even if some data are damaged or cannot be verified",
    )


def run(arguments: argparse.Namespace) -> int:
    report = zckpt.repair(arguments.path, output=arguments.output, accept_unverified=arguments.accept_unverified)
    output.print_text(report)
    return 0
