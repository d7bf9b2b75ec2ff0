"""Runs of Hugging Face's Trainer on two ranks, after ``attach_all`` or as a script."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from tests.support.fsdp_on_cpu import fsdp_accelerator
from tests.support.interrupted import read_log
from tests.support.slow_writes import slow

STEPS = 13
"""The number of steps of a whole run, which has one epoch."""


def train(
    directory: str,
    options: dict[str, Any],
    *,
    stage: int | str = 2,
    tp: int = 1,
    best_at: int | None = None,
    killed_at: int | None = None,
    signalled: list[int] | None = None,
    step_seconds: float = 0,
) -> dict[str, Any]:
    """Trains on from the last checkpoint, if there is one, and returns facts about the end of the training.

    Each rank appends the step, the loss and the numbers of the samples of each step to DIRECTORY-<rank>.log.
    ``best_at`` is the step whose evaluation has the best result. Each rank kills itself before the step ``killed_at``.
    ``signalled`` has a rank, and the step before which it sends itself a SIGTERM. Each step takes ``step_seconds``
    longer.
    ``stage`` is that of ZeRO, or "fsdp". ``tp`` is the number of ranks over which DeepSpeed cuts the layers.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
            step, rank = self.state.global_step + 1, self.args.process_index
            time.sleep(step_seconds)
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if [rank, step] == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = super().training_step(model, inputs, *arguments, **keywords)
            with open(f"{directory}-{rank}.log", "a") as log:
                print(step, loss.item(), *inputs["input_ids"][:, 0].tolist(), file=log)
            return loss

        def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
            if best_at is None:
                return super().evaluate(*arguments, **keywords)
            return {"eval_loss": float(abs(self.state.global_step - best_at))}

    kind: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": False},
        "zero_allow_untested_optimizer": True,
    }
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    if stage != "fsdp":
        kind = {"deepspeed": config}
    if best_at is not None:
        options = {"eval_strategy": "steps", "metric_for_best_model": "loss", "load_best_model_at_end": True, **options}
    defaults: dict[str, Any] = {"save_steps": 3, "num_train_epochs": 1, "eval_steps": 3, "report_to": []}
    arguments = TrainingArguments(
        directory, use_cpu=True, per_device_train_batch_size=4, disable_tqdm=True, **kind,
        **{**defaults, **options},
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(104, (104, 8))
    tokens[:, 0] = torch.arange(104)
    samples = [{"input_ids": t, "labels": t} for t in tokens]
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2
    }  # fmt: skip
    model = (
        GPT2LMHeadModel(GPT2Config(vocab_size=104, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        if tp == 1
        else LlamaForCausalLM(LlamaConfig(vocab_size=104, max_position_embeddings=8, use_cache=False, **sizes))
    )
    with mock.patch("transformers.trainer.Accelerator", fsdp_accelerator) if stage == "fsdp" else nullcontext():
        trainer = Recording(model, arguments, train_dataset=samples, eval_dataset=samples[:16])
    os.makedirs(directory, exist_ok=True)
    last = get_last_checkpoint(directory)
    trainer.train(resume_from_checkpoint=last is not None)
    assert trainer.optimizer is not None
    masters = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    return {
        "last": None if last is None else os.path.basename(last),
        "best": trainer.state.best_model_checkpoint,
        "after training": folders(directory),
        "masters": [] if stage == 3 else [whole_tensor(master.detach()).clone() for master in masters],
        "steps": trainer.state.global_step,
    }


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def folders(directory: str | Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory."""
    return sorted(int(name.rpartition("-")[2]) for name in os.listdir(directory) if name.startswith("checkpoint-"))


def attached(
    directory: str,
    attach: dict[str, Any],
    options: dict[str, Any],
    write_seconds: float = 0,
    uncommitted: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Calls ``attach_all`` and ``train``, and waits for the end of all writes.

    Each piece of a write takes ``write_seconds`` longer. The checkpoint of step ``uncommitted`` is never committed.
    """
    import zckpt
    from zckpt.checkpoint.writing.rank_write import RankWrite

    commit_write = RankWrite.prepare_commit

    def commit(rank_write: RankWrite, *described: bytes) -> None:
        if f"checkpoint-{uncommitted}/" in str(rank_write.store.location):
            time.sleep(600)
        commit_write(rank_write, *described)

    zckpt.attach_all(**attach)
    with slow(write_seconds), mock.patch.object(RankWrite, "prepare_commit", commit):
        facts = train(directory, options, **more)
        zckpt.wait()
    return {**facts, "at the end": folders(directory)}


def killed_at_random(
    directory: str, attach: dict[str, Any], options: dict[str, Any], seed: int, seconds: float, **more: Any
) -> dict[str, Any]:
    """Does what ``attached`` does, with writes that take long. A rank is killed within ``seconds`` after its first
    step.
    """
    choice = random.Random(seed)
    rank, delay = choice.randrange(2), choice.random() * seconds
    if rank == int(os.environ["RANK"]):
        log = Path(f"{directory}-{rank}.log")
        before = len(read_log(log))

        def end() -> None:
            while len(read_log(log)) == before:
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end, daemon=True).start()
    return attached(directory, attach, options, write_seconds=0.02, **more)


def assert_losses_equal(run: Path, through: Path) -> None:
    """Checks that each step of the interrupted run had the samples and the loss of the same step of the other run.

    All steps have to be there.
    """
    for rank in range(2):
        expected, trained = (read_log(Path(f"{directory}-{rank}.log")) for directory in (through, run))
        by_step = {step: (loss, numbers) for step, loss, numbers in expected}
        assert [step for step, *_ in expected] == list(range(1, STEPS + 1))
        assert all(by_step[step] == (loss, numbers) for step, loss, numbers in trained)
        assert {step for step, *_ in trained} == by_step.keys()


if __name__ == "__main__":
    train(sys.argv[1], json.loads(sys.argv[2]), **json.loads(sys.argv[3]))
