"""The code blocks of README and docs, and what runs them: every block works, in the order of its page.

What a page may take for granted is what ``furnish`` puts into its directory: a run in ``checkpoints``, a run of
DeepSpeed's own in ``deepspeed_checkpoints``, the folder ``llama`` of a Hugging Face model, and the files of
docs/quickstart.md. Names that it may take for granted are ``engine``, ``model``, ``torch``, ``deepspeed`` and
``zckpt``, and those of the blocks before. A block says by its language how it is run:

    python                  on two ranks if it has a word of ``_OF_RANKS``. Else in one process, after all of these
    python title="x.py"     is saved to this file, and run on two ranks as a script
    json, json title="x"    has to be JSON; is saved to this file
    sh                      by ``sh -e``, in order with what runs in one process. Lines that call a launcher take
                            long, so they are left to a test of their own
    text                    not at all: output, or what this machine cannot do
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
"""Each starts processes that import torch and DeepSpeed, which takes seconds."""
_FENCE = re.compile(r' *```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$')
_OF_RANKS = re.compile(r"\b(engine|deepspeed|[Ee]very rank)\b")
_SIZES = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}


@dataclass(frozen=True)
class Block:
    line: int
    """The number of the first line of its code."""
    language: str
    title: str | None
    code: str

    @property
    def is_of_ranks(self) -> bool:
        return self.language == "python" and bool(self.title or _OF_RANKS.search(self.code))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page. Raises ValueError for a fence that is none of those above."""
    found, begun, lines = [], None, text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if begun is not None:
            start, indent, fence = begun
            code = "\n".join(one[indent:] for one in lines[start : number - 1])
            found.append(Block(start + 1, fence["language"], fence["title"], code))
            begun = None
            continue
        fence = _FENCE.match(line)
        if fence is None or fence["language"] not in LANGUAGES:
            raise ValueError(f"line {number}: {line.strip()} is no language of these pages: {sorted(LANGUAGES)}")
        begun = number, len(line) - len(line.lstrip()), fence
    return found


# Below: on the ranks.


def furnish(directory: str) -> None:
    """What every page finds in the directory in which its blocks run."""
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
    with torch.no_grad():  # without, DeepSpeed 0.18 cannot step on torch 2.13 at stages 1 and 2
        engine.step()


def run_on_ranks(page: str, directory: str) -> None:
    """Runs the blocks of a page that training is about, and the scripts. Every rank calls it."""
    import deepspeed
    import torch

    import zckpt

    os.chdir(directory)
    names: dict[str, Any] = {"torch": torch, "deepspeed": deepspeed, "zckpt": zckpt}
    mine = [block for block in blocks((ROOT / page).read_text()) if block.is_of_ranks]
    if any(block.title is None for block in mine):
        names.update(engine=make_engine(), model=make_model())
        train(names["engine"])
        names["engine"].global_steps = 110
    for block in mine:
        execute(page, block, {"__name__": "__main__"} if block.title else names)


def run_alone(page: str, directory: str, commands: Literal["none", "short", "all"]) -> None:
    """Runs all other blocks of a page, in a process that has no other ranks. ``commands``: which lines of shell blocks;
    "short" leaves out those that call a launcher."""
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
    """The code with what this machine does not have replaced by what it has."""
    return code.replace("/nvme", f"{directory}/nvme").replace('"cuda"', '"cpu"')


def execute(page: str, block: Block, names: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + here(block.code, Path.cwd()), ROOT / page, "exec"), names)


def without_launchers(code: str) -> str:
    return "\n".join(line for line in re.split(r"(?<!\\)\n", code) if not LAUNCHERS.match(line))


def run_shell(code: str) -> None:
    """``make`` shows what it would do: each of its targets takes minutes."""
    theirs = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    code = f'make() {{ command make -n -C {ROOT} "$@"; }}\n{code}'
    shell = subprocess.run(["sh", "-e", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert shell.returncode == 0, f"exit status {shell.returncode}\n{code}\n{shell.stdout}\n{shell.stderr}"
