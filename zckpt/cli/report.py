"""Write a page about a checkpoint, or about several of a run, as one HTML file that needs no network.

The page has a treemap of the bytes, the bytes of each rank, a table of all tensors with statistics and histograms, and
the findings of `zckpt validate`. If several checkpoints are given, it also has the norms and the updates of each layer
over the training steps, and what has changed from each checkpoint to the next. If some data are damaged, the page says
so, and the exit status is still 0. Under a launcher such as torchrun, the ranks share the work, and rank 0 prints the
path of the page. This needs the packages plotly, itables and jinja2: pip install 'zckpt[report]'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import output
from zckpt.errors import CheckpointNotFoundError, printable

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt report checkpoints
  zckpt report checkpoints/global_step* -o run.html
  zckpt report checkpoints --no-statistics --overwrite
  torchrun --nproc-per-node 8 -m zckpt report checkpoints/global_step100 --level deep
"""


def configure(parser: argparse.ArgumentParser) -> None:
    from zckpt.tools.validating.report import LEVELS

    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a checkpoint, or the directory of a run with a `latest` file; give several for a page about a run",
    )
    parser.add_argument("-o", "--out", metavar="FILE", default="report.html", help="the page; default: report.html")
    parser.add_argument(
        "--no-statistics", action="store_true", help="leave out the statistics of the tensors, and read no tensor"
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="structure",
        help="how much to check, as for `zckpt validate`; default: structure",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier page")


def run(arguments: argparse.Namespace) -> int:
    from zckpt.tools.reporting.page import find_libraries

    if len(arguments.paths) > 1 and arguments.paths[-1].endswith(".html"):
        raise CheckpointNotFoundError(f"{arguments.paths[-1]} is not a checkpoint", hint="name the page by -o or --out")
    find_libraries()  # If a package is missing, this says so before torch is imported.
    with output.launched() as rank:
        path = zckpt.report(
            arguments.paths,
            arguments.out,
            statistics=not arguments.no_statistics,
            level=arguments.level,
            overwrite=arguments.overwrite,
            progress=output.progress_bar(),
        )
        if rank == 0:
            output.print_text(printable(path))
    return 0
