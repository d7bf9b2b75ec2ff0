"""Compare two checkpoints: their structure, their non-tensor state, and the values of all tensors.

The checkpoints may have been written with different numbers of ranks, ZeRO stages and kinds of offload. The exit status
is 0 if they are equal, 1 if they differ, and 2 if one of them cannot be read. Values are compared bit for bit unless a
tolerance is given. Data with the same digests in both checkpoints are not read. Under a launcher such as torchrun, the
ranks share the work, and rank 0 prints the result.
"""

from __future__ import annotations

import argparse
import math

import zckpt
from zckpt.cli import output

EXAMPLES = """
  zckpt diff checkpoints/global_step100 checkpoints/global_step200
  zckpt diff before after 'master/*' --rtol 1e-5
  torchrun --nproc-per-node 8 -m zckpt diff before after --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("b", help="another checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument(
        "keys", nargs="*", default=[], metavar="KEY", help="compare only these keys and globs, and no non-tensor state"
    )
    parser.add_argument(
        "--rtol",
        type=_tolerance,
        default=0.0,
        metavar="R",
        help="the relative tolerance: values are equal if |a - b| <= A + R * max(|a|, |b|); default: 0",
    )
    parser.add_argument(
        "--atol",
        type=_tolerance,
        default=0.0,
        metavar="A",
        help="the absolute tolerance, which is A in this formula; default: 0",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    with output.launched() as rank:
        difference = zckpt.diff(
            arguments.a,
            arguments.b,
            arguments.keys or None,
            rtol=arguments.rtol,
            atol=arguments.atol,
            progress=output.progress_bar(),
        )
        if rank == 0:
            output.print_text(difference.to_json() if arguments.json else difference)
    return 0 if difference.equal else 1


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")
    return value
