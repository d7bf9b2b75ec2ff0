"""Remove what dead writers have left, and, with --keep, older checkpoints."""

from __future__ import annotations

import argparse

import zckpt

EXAMPLES = """
  zckpt gc checkpoints --dry-run
  zckpt gc checkpoints --keep 3
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the directory of a run, a checkpoint, or one that was given to zckpt.offload")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--keep", type=_at_least_1, metavar="N", help="keep the N newest checkpoints, and the latest")
    parser.add_argument(
        "--discard",
        action="append",
        default=[],
        metavar="DIR",
        help="remove this checkpoint too, which has no manifest and could be repaired; may be given several times",
    )


def run(arguments: argparse.Namespace) -> int:
    print(zckpt.gc(arguments.path, keep=arguments.keep, dry_run=arguments.dry_run, discard=arguments.discard))
    return 0


def _at_least_1(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return int(text)
