"""Run a training script with every DeepSpeed engine attached: its checkpoints are zckpt's."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

import zckpt


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="what you would give to python, or to the launcher in place of zckpt")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    zckpt.attach_all()
    script: str = arguments.script
    local_rank = [] if arguments.local_rank is None else [f"--local_rank={arguments.local_rank}"]
    sys.argv = [script, *local_rank, *arguments.arguments]
    sys.path[0] = os.getcwd() if arguments.module else os.path.dirname(os.path.realpath(script))
    try:
        if arguments.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except zckpt.ZckptError as error:
        # Not of this command but of the script: with its traceback, as python reports it.
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
