"""Remove older checkpoints of a run.

These checkpoints are never removed: the one that `latest` names, the newest one that has all of the optimizer's state,
one that another process is writing, and one that is incomplete.
"""

from __future__ import annotations

import argparse

import zckpt
from zckpt.cli import output

EXAMPLES = """
  zckpt prune checkpoints --keep-last 3 --dry-run
  zckpt prune checkpoints --keep-last 3 --keep-every 1000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the directory of a run")
    parser.add_argument(
        "--keep-last",
        type=at_least_1,
        metavar="N",
        required=True,
        help="keep the N checkpoints that were committed last",
    )
    parser.add_argument(
        "--keep-every",
        type=at_least_1,
        metavar="STEPS",
        help="also keep checkpoints whose step is a multiple of STEPS",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    cleanup = zckpt.prune(
        arguments.path, keep_last=arguments.keep_last, keep_every=arguments.keep_every, dry_run=arguments.dry_run
    )
    output.print_text(cleanup.to_json() if arguments.json else cleanup)
    return 0


def at_least_1(text: str) -> int:
    """Returns the number that the text of an argument means. argparse prints an error if it is not a whole number of 1
    or more."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return int(text)
