"""The command line: ``zckpt COMMAND ...`` or ``python -m zckpt COMMAND ...``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import zckpt
from zckpt.cli import gc, repair, run, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {"gc": gc, "repair": repair, "run": run, "validate": validate}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 or 1, and 2 for wrong usage. Errors go to stderr."""
    parser = argparse.ArgumentParser(
        prog="zckpt", description="Check, repair and clean up checkpoints; train with them."
    )
    parser.add_argument("--version", action="version", version=f"zckpt {zckpt.__version__}")
    # DeepSpeed's launcher puts it in front of everything; it is meant for the script of `run`.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.configure(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args(argv)
    try:
        status: int = COMMANDS[arguments.command].run(arguments)
    except zckpt.ZckptError as error:
        print(f"zckpt: {error}", file=sys.stderr)
        return 1
    return status
