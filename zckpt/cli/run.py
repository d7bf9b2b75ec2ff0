"""Run a training script whose DeepSpeed engines and FSDP2 models save and load with zckpt."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zckpt
from zckpt.cli import output
from zckpt.cli.prune import at_least_1
from zckpt.errors import printable

if TYPE_CHECKING:
    from types import TracebackType

EXAMPLES = """
  deepspeed --module zckpt run train.py --epochs 3
  torchrun --nproc-per-node 8 -m zckpt run --require-engine -m trainer.main
"""

_NUMBERS = (
    ("--full-every", "N", "save the whole state at every N-th save, and leave out the optimizer state at the others"),
    ("--keep-last", "N", "keep only the N checkpoints that were written last, as `zckpt prune` does; default: all"),
    ("--keep-every", "STEPS", "with --keep-last, also keep checkpoints whose step is a multiple of this number"),
    ("--copy-keep-last", "N", "keep only the N copies that were made last, as `zckpt prune` does; default: all"),
    ("--copy-keep-every", "STEPS", "with --copy-keep-last, also keep copies whose step is a multiple of this number"),
    ("--ranks-per-file", "N", "have N ranks of a host write to one data file, if files are a burden; default: 1"),
)
"""The options whose values are numbers of 1 or more: the name, what stands for the number, and the help."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="run a module; SCRIPT is its name")
    parser.add_argument(
        "--replace-deepspeed",
        action="store_true",
        help="replace checkpoints in DeepSpeed's own format that have the tag of a save, instead of failing",
    )
    parser.add_argument(
        "--background",
        action="store_true",
        help="write checkpoints while the training goes on, as with the environment variable ZCKPT_BACKGROUND=1",
    )
    for option, metavar, says in _NUMBERS:
        parser.add_argument(option, type=at_least_1, metavar=metavar, help=says)
    parser.add_argument(
        "--no-reuse", action="store_true", help="write all files anew, and share none with an earlier checkpoint"
    )
    parser.add_argument(
        "--copy-to",
        metavar="RUN",
        help="copy each checkpoint to this directory while the training goes on, such as s3://bucket/run, and resume "
        "from it too",
    )
    parser.add_argument(
        "--require-engine",
        action="store_true",
        help="end with the exit status 2 if the script has ended without an error and has made no engine to save",
    )
    parser.add_argument(
        "--settings",
        choices=["checkpoint", "engine"],
        default="checkpoint",
        help="with `engine`, a resume keeps the settings of the script, such as a new learning rate or weight decay",
    )
    parser.add_argument("script", help="the script, as you would give it to python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the script")


def run(arguments: argparse.Namespace) -> int:
    script: str = arguments.script
    sys.path[0] = os.getcwd() if arguments.module else os.path.dirname(os.path.realpath(script))
    problem = _no_module(script) if arguments.module else _no_script(script)
    if problem:
        _print(problem)
        return 2
    attached: list[str] = []

    def on_attach(engine: Any) -> None:
        attached.append(type(engine).__name__)
        if len(attached) > 1 or os.environ.get("RANK", "0") != "0":
            return
        if isinstance(engine, zckpt.TrainState):
            _print("attached an FSDP2 model: zckpt saves and loads it from now on")
        else:
            _print(
                f"attached a {attached[0]}: from now on every engine's save_checkpoint and load_checkpoint use zckpt"
            )

    try:
        zckpt.attach_all(
            background=arguments.background or None, full_every=arguments.full_every,
            keep_last=arguments.keep_last, keep_every=arguments.keep_every,
            reuse=None if arguments.no_reuse else "latest", replace_deepspeed=arguments.replace_deepspeed,
            copy_to=arguments.copy_to, copy_keep_last=arguments.copy_keep_last,
            copy_keep_every=arguments.copy_keep_every, settings=arguments.settings,
            ranks_per_file=arguments.ranks_per_file or 1, on_attach=on_attach,
        )  # fmt: skip
    except ValueError as error:  # options, or variables of the environment, that do not go together
        _print(str(error))
        return 2
    local_rank = [] if arguments.local_rank is None else [f"--local_rank={arguments.local_rank}"]
    sys.argv = [script, *local_rank, *arguments.arguments]
    try:
        if arguments.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_of_script:
        if exit_of_script.code not in (None, 0):
            raise
    except (Exception, KeyboardInterrupt) as error:
        # The error is reported as python reports it without this command: only with the frames of the script.
        error.__traceback__ = _frames_of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    if attached:
        return 0
    if arguments.require_engine or os.environ.get("RANK", "0") == "0":
        _print(
            "nothing was attached: the script made neither an engine by deepspeed.initialize nor an FSDP2 model by "
            "Accelerate, Trainer or Lightning that zckpt supports"
        )
    return 2 if arguments.require_engine else 0


def _frames_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of this command and of ``runpy``, which come first."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback


def _print(message: str) -> None:
    with suppress(OSError):  # The script goes on if nobody can be told.
        output.print_text(f"zckpt run: {printable(message)}", sys.stderr)


def _no_script(path: str) -> str | None:
    """Returns the reason why Python cannot run this file or directory, or None if it can."""
    if not os.path.exists(path):
        return f"there is no file {path}"
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        return f"{path} is a directory without a __main__.py"
    return None


def _no_module(name: str) -> str | None:
    """Returns the reason why Python cannot run the module of this name, or None if it can."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return f"there is no module {name}: {error}"
    return None if spec is not None else f"there is no module {name}"
