"""Trains with Accelerate and its DeepSpeed plugin, and can be killed at any point. When it is started again, it resumes
from its last checkpoint, with the same samples and losses as a run that never stopped:

    torchrun --nproc-per-node 2 -m zckpt run examples/accelerate_run.py [DIRECTORY]

For each step, each rank appends a line to DIRECTORY-<rank>.log: the step, the loss, and the numbers of the samples.
"""

import glob
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import zckpt

EPOCHS, SAVE_EVERY = 2, 3
CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}


class Place:
    """Keeps the number of the epoch in the checkpoints."""

    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


run = sys.argv[1] if len(sys.argv) > 1 else "accelerate_run"
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
rank, place = torch.distributed.get_rank(), Place()

torch.manual_seed(0)
data = TensorDataset(torch.arange(104), torch.randn(104, 32))
sampler = DistributedSampler(data)
loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
zckpt.register(model, "train", loader)  # the state of both objects is saved on each rank
zckpt.register(model, "place", place)
if saved := glob.glob(f"{run}/step*/latest"):
    accelerator.load_state(max(saved).removesuffix("/latest"))
with open(f"{run}-{rank}.log", "a") as log:
    for epoch in range(place.epoch, EPOCHS):
        place.epoch = epoch
        sampler.set_epoch(epoch)
        for numbers, inputs in loader:
            loss = model(inputs.to(accelerator.device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(model.global_steps, loss.item(), *numbers.tolist(), file=log, flush=True)
            if model.global_steps % SAVE_EVERY == 0:
                accelerator.save_state(f"{run}/step{model.global_steps:06}")
