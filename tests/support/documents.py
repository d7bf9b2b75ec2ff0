"""Runs the code blocks of README and docs, in the order of each page.

The code of a page can use the files that ``furnish`` puts into its directory: a run in ``checkpoints``, a run in
DeepSpeed's own format in ``deepspeed_checkpoints``, the folder ``llama`` of a Hugging Face model, and the files of
docs/quickstart.md. It can use the names ``engine``, ``model``, ``torch``, ``deepspeed`` and ``zckpt``, and the names
that blocks before it have defined. The language of a block decides how the block is run:

    python                  It runs on two ranks if it has a word of ``_OF_RANKS``, and otherwise in one process, after
                            the blocks that run on two ranks.
    python title="x.py"     It is saved to this file, and run on two ranks as a script.
    json, json title="x"    It has to be JSON, and is saved to this file.
    sh                      It is run by ``sh -e``, in order with the blocks that run in one process. Lines that call a
                            launcher take long, so another test runs them.
    text                    It is not run, because it is output, or cannot run on this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "json", "sh", "text"}
LAUNCHERS = re.compile(r" *(\w+=\S+ +)*(deepspeed|torchrun|accelerate|python) ", re.MULTILINE)
"""Matches a line that calls a launcher, whose processes take seconds to import torch and DeepSpeed."""
_FENCE = re.compile(r' *```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$')
_OF_RANKS = re.compile(r"\b(engine|deepspeed|all_reduce|[Ee]very rank)\b")
_SIZES: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    line: int
    """The number of the first line of the block's code."""
    language: str
    title: str | None
    code: str

    @property
    def is_of_ranks(self) -> bool:
        return self.language == "python" and bool(self.title or _OF_RANKS.search(self.code))


def blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a page. Raises ValueError for a fence that is none of those above."""
    page_blocks, begun, lines = [], None, text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if begun is not None:
            start, indent, opened = begun
            code = "\n".join(code_line[indent:] for code_line in lines[start : number - 1])
            page_blocks.append(Block(start + 1, opened["language"], opened["title"], code))
            begun = None
            continue
        fence = _FENCE.match(line)
        if fence is None or fence["language"] not in LANGUAGES:
            raise ValueError(f"line {number}: {line.strip()} is no language of these pages: {sorted(LANGUAGES)}")
        begun = number, len(line) - len(line.lstrip()), fence
    return page_blocks


# The functions from here to ``run_on_ranks`` run on the ranks.


def furnish(directory: str) -> None:
    """Puts the files that every page can use into the directory in which the blocks run. Every rank calls it."""
    os.chdir(directory)
    import torch

    import zckpt

    engine = make_engine()
    for step in (90, 100):
        train(engine)
        engine.global_steps = step
        zckpt.write(engine, client_state={"epoch": 3})
    engine.save_checkpoint("deepspeed_checkpoints")
    if engine.global_rank == 0:
        make_model().save_pretrained("llama")
        save_files("docs/quickstart.md", Path.cwd())
    torch.distributed.barrier()


def make_model() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_attention_heads=2, max_position_embeddings=64))


def make_engine() -> Any:
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any) -> None:
    import torch

    tokens = torch.arange(16)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    with torch.no_grad():  # without no_grad, DeepSpeed 0.18 cannot step on torch 2.13 at stages 1 and 2
        engine.step()


def run_on_ranks(page: str, directory: str) -> None:
    """Runs the blocks of a page that need ranks, and its scripts. Every rank calls it."""
    import deepspeed
    import torch

    import zckpt

    os.chdir(directory)
    names: dict[str, Any] = {"torch": torch, "deepspeed": deepspeed, "zckpt": zckpt}
    rank_blocks = [block for block in blocks((ROOT / page).read_text()) if block.is_of_ranks]
    if any(block.title is None for block in rank_blocks):
        names.update(engine=make_engine(), model=make_model())
        train(names["engine"])
        names["engine"].global_steps = 110
    for block in rank_blocks:
        execute(page, block, {"__name__": "__main__"} if block.title else names)


def run_alone(page: str, directory: str, commands: Literal["none", "short", "all"]) -> None:
    """Runs all other blocks of a page, in a process that has no other ranks.

    ``commands`` says which lines of shell blocks are run. "short" leaves out the lines that call a launcher.
    """
    import torch

    import zckpt

    os.chdir(directory)
    names: dict[str, Any] = {"torch": torch, "zckpt": zckpt, "model": make_model()}
    for block in blocks((ROOT / page).read_text()):
        if block.language == "python" and not block.is_of_ranks:
            execute(page, block, names)
        elif block.language == "json":
            json.loads(block.code)
        elif block.language == "sh" and commands != "none":
            run_shell(block.code if commands == "all" else without_launchers(block.code))


def save_files(page: str, directory: Path) -> None:
    for block in blocks((ROOT / page).read_text()):
        if block.title:
            (directory / block.title).write_text(here(block.code, directory))


def here(code: str, directory: Path) -> str:
    """Returns the code with directories that this machine has in the place of ``/nvme``, ``/local`` and a bucket."""
    for place in ("/nvme", "/local", "s3://bucket"):
        code = code.replace(f'"{place}', f'"{directory}/{place.rpartition("/")[2]}')
    return code


def execute(page: str, block: Block, names: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + here(block.code, Path.cwd()), ROOT / page, "exec"), names)


def without_launchers(code: str) -> str:
    return "\n".join(line for line in re.split(r"(?<!\\)\n", code) if not LAUNCHERS.match(line))


def run_shell(code: str) -> None:
    """Runs the code by ``sh -e``. ``make`` only prints its commands, because each of its targets takes minutes."""
    rank_variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in rank_variables}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    code = f'make() {{ command make -n -C {ROOT} "$@"; }}\n{code}'
    shell = subprocess.run(["sh", "-e", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert shell.returncode == 0, f"exit status {shell.returncode}\n{code}\n{shell.stdout}\n{shell.stderr}"
