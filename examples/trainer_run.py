"""Trains with Hugging Face's Trainer, and can be killed at any point. When it is started again, it resumes from its
last whole checkpoint, with the same samples and losses as a run that never stopped:

    torchrun --nproc-per-node 2 -m zckpt run --background examples/trainer_run.py [DIRECTORY]

For each step, each rank appends a line to DIRECTORY-<rank>.log: the step, the loss, and the numbers of the samples.
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import zckpt

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
run = sys.argv[1] if len(sys.argv) > 1 else "trainer_run"
os.makedirs(run, exist_ok=True)
arguments = TrainingArguments(
    run,
    num_train_epochs=2,
    save_steps=3,
    save_total_limit=2,
    per_device_train_batch_size=4,
    ignore_data_skip=True,  # the data loader restores its own position
    use_cpu=not torch.cuda.is_available(),
    deepspeed=CONFIG,
)


class Logged(Trainer):
    def training_step(self, model, inputs, *others, **options):
        loss = super().training_step(model, inputs, *others, **options)
        with open(f"{run}-{self.args.process_index}.log", "a") as log:
            print(self.state.global_step + 1, loss.item(), *inputs["input_ids"][:, 0].tolist(), file=log)
        return loss


class KeepPosition(TrainerCallback):
    def on_train_begin(self, args, state, control, train_dataloader, **_):
        zckpt.register(trainer.model_wrapped, "train", train_dataloader)  # saves each rank's position in the data


torch.manual_seed(0)
config = LlamaConfig(vocab_size=104, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
# The first token is the sample's number.
tokens = torch.cat([torch.arange(104)[:, None], torch.randint(104, (104, 7))], dim=1)
samples = [{"input_ids": sample, "labels": sample} for sample in tokens]
trainer = Logged(model, arguments, train_dataset=samples, callbacks=[KeepPosition()])
trainer.accelerator.dataloader_config.use_stateful_dataloader = True
trainer.train(resume_from_checkpoint=get_last_checkpoint(run))  # the newest whole folder, or None
