"""Trains with Hugging Face's Trainer, and can be killed at any point. Started again, it goes on behind its last whole
checkpoint, with the samples and the losses of a run that never stopped:

    torchrun --nproc-per-node 2 -m zckpt run examples/trainer_run.py [DIRECTORY]

Each rank appends what it has trained on to DIRECTORY-<rank>.log: step, loss, numbers of the samples.
"""

import glob
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zckpt

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
run = sys.argv[1] if len(sys.argv) > 1 else "trainer_run"
arguments = TrainingArguments(
    run,
    num_train_epochs=2,
    save_steps=3,
    per_device_train_batch_size=4,
    ignore_data_skip=True,  # the data loader knows its place, so there is nothing to skip
    use_cpu=not torch.cuda.is_available(),
    deepspeed=CONFIG,
)


class Logged(Trainer):
    def training_step(self, model, inputs, *others, **options):
        loss = super().training_step(model, inputs, *others, **options)
        with open(f"{run}-{self.args.process_index}.log", "a") as log:
            print(self.state.global_step + 1, loss.item(), *inputs["input_ids"][:, 0].tolist(), file=log)
        return loss


class Resumable(TrainerCallback):
    def on_train_begin(self, args, state, control, train_dataloader, **_):
        zckpt.register(trainer.model_wrapped, "train", train_dataloader)  # each rank's position in the data is saved

    def on_save(self, args, state, control, **_):
        torch.distributed.barrier()  # by then all ranks have written what Trainer itself puts beside zckpt's files
        open(f"{run}/checkpoint-{state.global_step}/whole", "w").close()


torch.manual_seed(0)
config = LlamaConfig(vocab_size=104, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
tokens = torch.cat([torch.arange(104)[:, None], torch.randint(104, (104, 7))], dim=1)  # the first is a sample's number
samples = [{"input_ids": one, "labels": one} for one in tokens]
trainer = Logged(model, arguments, train_dataset=samples, callbacks=[Resumable()])
trainer.accelerator.dataloader_config.use_stateful_dataloader = True
whole = [mark.removesuffix("/whole") for mark in glob.glob(f"{run}/checkpoint-*/whole")]
trainer.train(resume_from_checkpoint=max(whole, key=lambda path: int(path.rpartition("-")[2]), default=None))
