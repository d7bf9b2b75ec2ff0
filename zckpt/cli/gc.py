"""Remove the files that dead writers have left in a run or in a checkpoint.

Complete checkpoints are not removed; `zckpt prune` does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import output

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt gc checkpoints --dry-run
  zckpt gc checkpoints --discard global_step7
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a run, a checkpoint, or a directory that was given to zckpt.offload")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument(
        "--discard",
        action="append",
        default=[],
        metavar="DIR",
        help="also remove this checkpoint, which has no manifest but could be repaired; can be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    cleanup = zckpt.gc(arguments.path, dry_run=arguments.dry_run, discard=arguments.discard)
    output.print_text(cleanup.to_json() if arguments.json else cleanup)
    return 0
