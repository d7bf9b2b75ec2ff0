"""Copy a checkpoint, or some of its tensors, and print the path of the copy.

All data that are read are compared with their digests. The copy becomes a checkpoint only when all of it is durable. A
copy of a whole checkpoint has the same bytes and the same save id. A copy of some tensors is a checkpoint of its own,
with the same step and the same non-tensor state. Within one file system, a copy of a whole checkpoint takes no space,
because it shares the data files of the source. Damage to one of these files damages both checkpoints; --no-share makes
an independent copy. No file `latest` is changed. Under a launcher such as torchrun, the ranks share the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import output
from zckpt.errors import printable

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt cp checkpoints /backup/global_step100
  zckpt cp checkpoints/global_step100 weights 'master/*' 'buffer/*'
  torchrun --nproc-per-node 8 -m zckpt cp checkpoints /backup/global_step100
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("destination", help="the directory of the copy")
    parser.add_argument(
        "keys", nargs="*", default=[], metavar="KEY", help="copy only these keys and globs, such as 'master/*'"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DESTINATION")
    parser.add_argument("--no-verify", action="store_true", help="copy damaged data as they are, instead of failing")
    parser.add_argument(
        "--no-share", action="store_true", help="write all bytes, instead of sharing the files of the source"
    )


def run(arguments: argparse.Namespace) -> int:
    with output.launched() as rank:
        path = zckpt.cp(
            arguments.source,
            arguments.destination,
            arguments.keys or None,
            verify=not arguments.no_verify,
            overwrite=arguments.overwrite,
            share=not arguments.no_share,
            progress=output.progress_bar(),
        )
        if rank == 0:
            output.print_text(printable(path))
    return 0
