"""A Hugging Face Trainer whose data loader keeps its position: stateful_trainer.py DIRECTORY LOADER DIES_AT.

LOADER is "own" for a data loader that distributes the samples to the ranks itself, or "accelerate" for that of Trainer.
Rank 1 kills itself before step DIES_AT. Each rank appends the step, the loss and the numbers of the samples of each
step to DIRECTORY-<rank>.log.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import zckpt

directory, kind, dies_at = sys.argv[1:]
rank = int(os.environ["RANK"])
log = open(f"{directory}-{rank}.log", "a")  # noqa: SIM115  it is open until the process ends


class Recording(Trainer):
    def get_train_dataloader(self) -> Any:
        if kind == "accelerate":
            return super().get_train_dataloader()
        sampler: DistributedSampler[Any] = DistributedSampler(self.train_dataset)  # type: ignore[arg-type]
        return StatefulDataLoader(
            self.train_dataset, batch_size=4, sampler=sampler, collate_fn=self.data_collator, num_workers=1
        )

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *arguments, **options)
        print(self.state.global_step + 1, loss.item(), *inputs["input_ids"][:, 0].tolist(), file=log, flush=True)
        return loss


class KeepPosition(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        zckpt.register(trainer.model_wrapped, "train", train_dataloader)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if rank == 1 and state.global_step + 1 == int(dies_at):
            os.kill(os.getpid(), signal.SIGKILL)


arguments = TrainingArguments(
    directory,
    use_cpu=True,
    num_train_epochs=2,
    save_steps=3,
    per_device_train_batch_size=4,
    ignore_data_skip=True,
    report_to=[],
    disable_tqdm=True,
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
torch.manual_seed(0)
tokens = torch.randint(104, (104, 8))
tokens[:, 0] = torch.arange(104)
dataset = [{"input_ids": t, "labels": t} for t in tokens]
sizes: dict[str, Any] = {"vocab_size": 104, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
dropout: dict[str, Any] = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
trainer = Recording(GPT2LMHeadModel(GPT2Config(**sizes, **dropout)), arguments, train_dataset=dataset)
trainer.accelerator.dataloader_config.use_stateful_dataloader = True
trainer.add_callback(KeepPosition())
trainer.train(resume_from_checkpoint=os.path.isdir(directory) and bool(os.listdir(directory)))
