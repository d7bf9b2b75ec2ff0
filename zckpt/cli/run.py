"""Run a training script with every DeepSpeed engine attached: its checkpoints are zckpt's."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from typing import TYPE_CHECKING, Any

import zckpt

if TYPE_CHECKING:
    from types import TracebackType

EXAMPLES = """
  deepspeed --module zckpt run train.py --epochs 3
  torchrun --nproc-per-node 8 -m zckpt run -m trainer.main
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    parser.add_argument(
        "--replace-deepspeed",
        action="store_true",
        help="a save to a tag that holds a checkpoint in DeepSpeed's own format removes that, instead of failing",
    )
    parser.add_argument("script", help="what you would give to python, or to the launcher in place of zckpt")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    script: str = arguments.script
    sys.path[0] = os.getcwd() if arguments.module else os.path.dirname(os.path.realpath(script))
    problem = _no_module(script) if arguments.module else _no_script(script)
    if problem:
        print(f"zckpt run: {problem}", file=sys.stderr)
        return 2
    attached: list[str] = []

    def on_attach(engine: Any) -> None:
        attached.append(type(engine).__name__)
        if len(attached) == 1 and engine.global_rank == 0:
            _say(f"attached a {attached[0]}: from now on every engine's save_checkpoint and load_checkpoint use zckpt")

    zckpt.attach_all(replace_deepspeed=arguments.replace_deepspeed, on_attach=on_attach)
    local_rank = [] if arguments.local_rank is None else [f"--local_rank={arguments.local_rank}"]
    sys.argv = [script, *local_rank, *arguments.arguments]
    came_to_its_end = False
    try:
        if arguments.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        came_to_its_end = True
    except SystemExit as end:
        came_to_its_end = end.code in (None, 0)
        raise
    except (Exception, KeyboardInterrupt) as error:
        # Not of this command but of the script: as python reports it, with the script's frames alone.
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        if came_to_its_end and not attached and os.environ.get("RANK", "0") == "0":
            _say("nothing was attached: the script made no engine by deepspeed.initialize")
    return 0


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Without the frames of this command and of ``runpy``, which come first."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback


def _say(what: str) -> None:
    print(f"zckpt run: {what}", file=sys.stderr, flush=True)


def _no_script(path: str) -> str | None:
    """Why Python cannot run this file or directory; None if it can."""
    if not os.path.exists(path):
        return f"there is no file {path}"
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        return f"{path} is a directory without a __main__.py"
    return None


def _no_module(name: str) -> str | None:
    """Why Python cannot run the module of this name; None if it can."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return f"there is no module {name}: {error}"
    return None if spec is not None else f"there is no module {name}"
