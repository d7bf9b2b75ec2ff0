"""Remove older checkpoints of a run.

The checkpoint that `latest` names is never removed, nor is one that somebody is writing, nor one that is not
whole.
"""

from __future__ import annotations

import argparse

import zckpt

EXAMPLES = """
  zckpt prune checkpoints --keep-last 3 --dry-run
  zckpt prune checkpoints --keep-last 3 --keep-every 1000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the directory of a run")
    parser.add_argument(
        "--keep-last", type=_at_least_1, metavar="N", required=True, help="keep the N most recent checkpoints"
    )
    parser.add_argument(
        "--keep-every", type=_at_least_1, metavar="STEPS", help="also keep those whose step is a multiple of STEPS"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    cleanup = zckpt.prune(
        arguments.path, keep_last=arguments.keep_last, keep_every=arguments.keep_every, dry_run=arguments.dry_run
    )
    print(cleanup.to_json() if arguments.json else cleanup)
    return 0


def _at_least_1(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return int(text)
