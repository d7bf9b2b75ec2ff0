"""Remove what dead writers have left. Whole checkpoints are removed by `zckpt prune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt gc checkpoints --dry-run
  zckpt gc checkpoints --discard global_step7
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the directory of a run, a checkpoint, or one that was given to zckpt.offload")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--discard",
        action="append",
        default=[],
        metavar="DIR",
        help="remove this checkpoint too, which has no manifest and could be repaired; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    cleanup = zckpt.gc(arguments.path, dry_run=arguments.dry_run, discard=arguments.discard)
    print(cleanup.to_json() if arguments.json else cleanup)
    return 0
