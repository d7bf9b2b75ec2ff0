"""The command line: ``zckpt COMMAND ...`` or ``python -m zckpt COMMAND ...``.

Each command is a module of this folder, which is imported only when the command is called. The docstring of the module
is the description that ``--help`` prints. ``EXAMPLES`` contains the example command lines below the description.
``configure(parser)`` adds the arguments of the command. ``run(arguments)`` runs the command and returns its exit
status:

    0   the command has succeeded, or the answer is yes
    1   the answer is no: a checkpoint is not valid, or two checkpoints differ
    2   the usage was wrong, or an error occurred; the message is on stderr
    130 the command was interrupted by Ctrl-C
    141 the program that read the output, such as `head`, has ended before the command
"""

from __future__ import annotations

import argparse
import sys
import traceback
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import zckpt
from zckpt.cli import output

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

COMMANDS = {
    "info": "summarize a checkpoint, or all checkpoints of a run",
    "ls": "list the tensors of a checkpoint",
    "show": "show where a tensor is stored, and statistics of its values",
    "state": "show the non-tensor state of a checkpoint",
    "diff": "compare two checkpoints",
    "report": "write a page about a checkpoint, or about several of a run",
    "cp": "copy a checkpoint, or some of its tensors",
    "validate": "check a checkpoint against the specification",
    "repair": "rebuild a lost or damaged manifest, index or digest table from the data files",
    "gc": "remove the files that dead writers have left",
    "prune": "remove older checkpoints of a run",
    "export": "write the weights as a Hugging Face model, or as one file for torch.load",
    "convert": "convert a checkpoint of DeepSpeed to one of zckpt, or the other way",
    "run": "run a training script whose DeepSpeed engines and FSDP2 models save and load with zckpt",
    "doctor": "show versions, limits and what a disk can do, for a bug report or before a long run",
    "completion": "print a script that completes zckpt's command lines in a shell",
}
"""The names of the commands, and their lines in the list that ``zckpt --help`` prints. The module of a command has the
name of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Errors go to stderr."""
    with output.guarded():
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        except zckpt.ZckptError as error:
            output.print_text(f"zckpt: {error}", sys.stderr)
        except BrokenPipeError:
            return 141
        except KeyboardInterrupt:
            return 130
        except Exception:
            # This is a defect of zckpt. Python would exit with the status 1, which is an answer.
            traceback.print_exc()
        return 2


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = make_parser(argv).parse_args(argv)
        # The script of `run` prints what it likes.
        with output.unguarded() if arguments.command == "run" else nullcontext():
            status: int = _command(arguments.command).run(arguments)
        return status
    except ValueError as error:
        if isinstance(error, zckpt.ZckptError):
            raise
        # The library raises ValueError for arguments that contradict each other.
        output.print_text(f"zckpt {arguments.command}: {error}", sys.stderr)
        return 2
    finally:
        sys.stdout.flush()


def make_parser(configured: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Returns a parser that knows every command, and the arguments of the commands in ``configured``."""
    parser = argparse.ArgumentParser(
        prog="zckpt",
        description="Look at checkpoints, compare, copy, check, repair, export and convert them, and train with them.",
        epilog="`zckpt COMMAND --help` prints the arguments of a command, and examples.",
    )
    parser.add_argument("--version", action="version", version=f"zckpt {zckpt.__version__}")
    # DeepSpeed's launcher puts this option before all other arguments. `run` passes it to the script.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, summary in COMMANDS.items():
        # An option of the user's script, behind `run`, is never taken for the beginning of one of zckpt's options.
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=name != "run"
        )
        if name in configured:
            module = _command(name)
            command.description = module.__doc__
            command.epilog = f"examples:\n{module.EXAMPLES.rstrip()}"
            module.configure(command)
    return parser


_POSITIONAL = "\0"
"""Marks an argument behind ``--``, which is positional even if it begins with ``-``. No argument of a process contains
this character."""


class _CommandParser(argparse.ArgumentParser):
    """A parser that also accepts options between positional arguments, as in ``zckpt ls PATH --long GLOB``, and takes
    what is behind ``--`` for positional arguments, which argparse forgets when it looks for options first."""

    _intermixed = False

    @property
    def _has_remainder(self) -> bool:
        return any(action.nargs == argparse.REMAINDER for action in self._actions)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._intermixed or self._has_remainder:
            namespace, unknown = super().parse_known_args(args, namespace)
            if unknown and self._has_remainder:
                self.error(f"unrecognized arguments: {' '.join(unknown)}")
            return namespace, unknown
        # argparse calls this method again from within, once for the options and once for the positional arguments.
        self._intermixed = True
        if "--" in args:
            place = args.index("--")
            args = [*args[:place], *(f"{_POSITIONAL}{argument}" for argument in args[place + 1 :])]
        try:
            namespace, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(arg.removeprefix(_POSITIONAL) for arg in unknown)}")
        return namespace, []

    def _get_nargs_pattern(self, action: argparse.Action) -> str:
        pattern: str = super()._get_nargs_pattern(action)
        # What is behind the script is the script's, also a `--`, which argparse would take for the end of our options.
        return pattern.replace("A-*)", "A)") if self._has_remainder else pattern

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return super()._get_value(action, arg_string.removeprefix(_POSITIONAL))


def _command(name: str) -> Any:
    return import_module(f"zckpt.cli.{name}")
