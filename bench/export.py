"""Compares exporting the weights of a ZeRO-3 checkpoint as a model's folder with a copy and with zero_to_fp32.

    python bench/export.py [--size 3GiB] [--dir DIR] [--runs 3]

A ZeRO-3 engine with a Llama model on 2 ranks writes both checkpoints. A third of each checkpoint is fp32 weights.
``zckpt.cp`` of the fp32 weights alone reads and writes the same bytes as an export in fp32. An export in bf16 is
compared with what DeepSpeed's users do today: they load the checkpoint into a model by
``load_state_dict_from_zero_checkpoint``, and save the model by ``save_pretrained``. The files that this leaves are made
durable. No file is in the page cache at the start of a round. The peak memory is measured in a fresh process for each
contestant, above the memory that the process had at the start.
"""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

import zckpt
from common import (
    Contestant,
    Result,
    drop_from_cache,
    interleaved,
    make_durable,
    parse_options,
    remove,
    speedup,
    workspace,
)
from sampler import metered
from training import start_ranks, write_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sampler import Metered

RANKS = 2
COPY_SPEED_MIN = 0.7


def with_zckpt(directory: Path, dtype: str) -> None:
    zckpt.export(directory / "zckpt", directory / "out", dtype=dtype, config=directory / "config")


def with_deepspeed(directory: Path, dtype: str) -> None:
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
    from transformers import AutoModelForCausalLM, LlamaConfig

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory / "config"))
        model = load_state_dict_from_zero_checkpoint(model.float(), str(directory / "deepspeed"), tag="tag")
        model.to(getattr(torch, dtype)).save_pretrained(directory / "out", max_shard_size="5GB")
    make_durable(directory / "out")


def copy(directory: Path) -> None:
    zckpt.cp(directory / "zckpt", directory / "out", "master/*")


def memory_of(action: Callable[[], None]) -> Metered:
    import transformers  # noqa: F401  imported here so that the memory of the import is not counted
    from deepspeed.utils import zero_to_fp32  # noqa: F401

    figures: Metered = {}
    with metered(figures, "peak"):
        action()
    return figures


def main() -> None:
    options = parse_options(__doc__, runs=3)
    result = Result("export", "A checkpoint's weights as a model's folder", options)
    with workspace(options, 3 * options.size) as directory:
        start_ranks(write_llama, RANKS, directory, options.size)
        nbytes = sum(info.nbytes for info in zckpt.open(directory / "zckpt").weights().values())
        actions = {
            "copy of the weights, zckpt.cp": partial(copy, directory),
            "export, fp32": partial(with_zckpt, directory, "float32"),
            "export, bf16": partial(with_zckpt, directory, "bfloat16"),
            "zero_to_fp32 + save_pretrained, bf16": partial(with_deepspeed, directory, "bfloat16"),
        }
        contestants = [
            Contestant(label, action, partial(drop_from_cache, directory), partial(remove, directory / "out"))
            for label, action in actions.items()
        ]
        rounds = interleaved(contestants, options.runs)
        result.add(rounds, nbytes)
        copied, fp32, bf16, stock = actions
        result.at_least("export in fp32, against a copy", speedup(rounds, fp32, over=copied), COPY_SPEED_MIN)
        result.at_least("export in bf16, against zero_to_fp32", speedup(rounds, bf16, over=stock), 1)
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as process:
            peaks = {}
            for label in (fp32, bf16, stock):
                peaks[label] = process.submit(memory_of, actions[label]).result()["peak"]["peak_mib"]
                remove(directory / "out")
        result.extra["peak_mib"] = peaks
        for label, peak in peaks.items():
            print(f"  {label:52} {peak:9.0f} MiB")
        result.at_most("peak memory of an export, MiB", max(peaks[fp32], peaks[bf16]), 256 + 64, "MiB")
    result.finish()


if __name__ == "__main__":
    main()
