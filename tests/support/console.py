"""Runs the commands that docs/commands.md shows, and puts their output below them.

    torchrun --nproc-per-node 2 -m tests.support.console

A test compares the page with the output of the commands, except for numbers, ages and the widths of columns.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import torch.distributed as dist

from tests.support.documents import ROOT, furnish
from zckpt.cli import main

PAGE = ROOT / "docs" / "commands.md"
_BLOCK = re.compile(r"(?<=^```text\n)\$ .*?(?=^```$)", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def renewed(page: str, directory: Path) -> str:
    """Returns the page with the output that its commands have now, in a directory that was furnished for pages."""
    return _BLOCK.sub(lambda block: "\n".join(run(line, directory) for line in _COMMAND.findall(block[0])), page)


def run(command: str, directory: Path) -> str:
    """Returns the command as it is typed, and its output on stdout and stderr.

    The command runs in this process, because this process has imported torch already.
    """
    name, *arguments = shlex.split(command)
    assert name == "zckpt"
    shown = io.StringIO()
    with chdir(directory), redirect_stdout(shown), redirect_stderr(shown):
        main(arguments)
    return f"$ {command}\n{shown.getvalue().replace(str(directory.resolve()), '/data')}"


def masked(page: str) -> str:
    """Returns the page with fixed words in the place of ages, save ids and numbers, which differ from run to run."""
    page = re.sub(r"\d+ (second|minute|hour|day)s?\b", "AGE", page)
    page = re.sub(r"\b[0-9a-f]{16}\b", "SAVE-ID", page)
    page = re.sub(r"[-+]?\d[\d.,:+e-]*(cpu|cu\d+)?", "N", page)
    return re.sub(r" +", " ", page)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as directory:
        shared = [directory]
        dist.broadcast_object_list(shared)
        furnish(shared[0])
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if is_first:
            os.environ.pop("WORLD_SIZE")  # the commands run in one process
            PAGE.write_text(renewed(PAGE.read_text(), Path(directory)))
