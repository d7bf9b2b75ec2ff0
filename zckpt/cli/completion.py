"""Print a script for a shell that completes zckpt's commands, options and paths.

This needs the package shtab: pip install 'zckpt[completion]'.
"""

from __future__ import annotations

import argparse
import sys

import zckpt.cli
from zckpt.cli import output

EXAMPLES = """
  zckpt completion bash > ~/.local/share/bash-completion/completions/zckpt
  zckpt completion zsh > ~/.zfunc/_zckpt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell that loads the script")


def run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        output.print_text("zckpt completion: this needs the package shtab: pip install 'zckpt[completion]'", sys.stderr)
        return 2
    parser = zckpt.cli.make_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                for argument in command._get_positional_actions():
                    if argument.choices is None and argument.dest != "keys":
                        argument.complete = shtab.FILE
    output.print_text(shtab.complete(parser, arguments.shell))
    return 0
