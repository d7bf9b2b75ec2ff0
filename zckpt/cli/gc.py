"""Remove what dead writers have left, and, with --keep, older checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the directory of a run, or a checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the N newest checkpoints, and what `latest` names")


def run(arguments: argparse.Namespace) -> int:
    print(zckpt.gc(arguments.path, keep=arguments.keep, dry_run=arguments.dry_run))
    return 0
