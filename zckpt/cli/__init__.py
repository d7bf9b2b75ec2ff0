"""The command line: ``zckpt COMMAND ...`` or ``python -m zckpt COMMAND ...``.

A command is a module of this folder, imported only when it is called. Its docstring is the description that
``--help`` prints, ``EXAMPLES`` has command lines to begin with, ``configure(parser)`` adds its arguments, and
``run(arguments)`` carries it out and returns the exit status:

    0   done; the answer is yes
    1   the answer is no: a checkpoint is not valid, two checkpoints differ
    2   wrong usage, or an error, which is on stderr
    130 interrupted by Ctrl-C; 141: whoever read the output went away
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import zckpt

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

COMMANDS = {
    "info": "say what a checkpoint is, or which checkpoints a run has",
    "ls": "list the tensors of a checkpoint",
    "show": "show where a tensor lies, and what its values are like",
    "state": "show what a checkpoint holds beside tensors",
    "diff": "compare two checkpoints",
    "cp": "copy a checkpoint, or some of its tensors",
    "validate": "check a checkpoint against the specification",
    "repair": "rebuild a lost or damaged manifest, index or digest table from the data files",
    "gc": "remove what dead writers have left",
    "prune": "remove older checkpoints of a run, whole",
    "export": "write a model's folder as Hugging Face has it, or one file of torch's",
    "convert": "convert a checkpoint of DeepSpeed to one of zckpt, and back",
    "run": "run a training script whose checkpoints are zckpt's",
    "completion": "print the completion of command lines for a shell",
}
"""Each command with its line in the list of commands. A command is the module of the same name in this folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Errors go to stderr."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = make_parser(argv).parse_args(argv)
    try:
        status: int = _command(arguments.command).run(arguments)
        sys.stdout.flush()
    except zckpt.ZckptError as error:
        print(f"zckpt: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # such as `head`, which has seen enough
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what Python still flushes at its end
        return 141
    except KeyboardInterrupt:
        return 130
    return status


def make_parser(configured: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """A parser that knows every command, and the arguments of those that are named in ``configured``."""
    parser = argparse.ArgumentParser(
        prog="zckpt",
        description="Look at checkpoints, check, repair and clean them up, and train with them.",
        epilog="`zckpt COMMAND --help` has the arguments of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"zckpt {zckpt.__version__}")
    # DeepSpeed's launcher puts it in front of everything; it is meant for the script of `run`.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in configured:
            module = _command(name)
            command.description = module.__doc__
            command.epilog = f"examples:\n{module.EXAMPLES.rstrip()}"
            module.configure(command)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """Takes options between positional arguments too, as in ``zckpt ls PATH --long GLOB``."""

    _intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._intermixed or any(action.nargs == argparse.REMAINDER for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._intermixed = True  # argparse's own way calls this method again, for the options and for the rest
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False


def _command(name: str) -> Any:
    return import_module(f"zckpt.cli.{name}")
