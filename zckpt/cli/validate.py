"""Check a checkpoint against the specification; exit status 0 if it is valid, 1 if not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zckpt

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("--no-data", action="store_true", help="check names, sizes, headers and index only")


def run(arguments: argparse.Namespace) -> int:
    report = zckpt.validate(arguments.path, data=not arguments.no_data, progress=zckpt.ProgressBar())
    print(report)
    return 0 if report.ok else 1
