"""Trains with ZeRO and a StatefulDataLoader, and can be stopped at any point, by Ctrl-C, by kill -9 or by a power cut.
When it is started again, it resumes from its last checkpoint, even in the middle of an epoch, with the same samples and
losses as a run that never stopped:

    torchrun --nproc-per-node 2 examples/stateful_dataloader.py [DIRECTORY]

For each step, each rank appends a line to DIRECTORY-<rank>.log: the step, the loss, and the numbers of the samples.
"""

import os
import sys

import deepspeed
import torch
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import zckpt

EPOCHS, SAVE_EVERY = 2, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}

run = sys.argv[1] if len(sys.argv) > 1 else "stateful_dataloader"
deepspeed.init_distributed()
rank = torch.distributed.get_rank()

torch.manual_seed(0)
data = TensorDataset(torch.arange(104), torch.randn(104, 32))
sampler = DistributedSampler(data)  # divides the samples among the ranks, in another order in each epoch
loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

zckpt.register(engine, "train", loader)  # each checkpoint now contains the position of each rank in the data
begin = 0
if os.path.exists(f"{run}/latest"):
    begin = zckpt.restore(engine, run)["epoch"]

with open(f"{run}-{rank}.log", "a") as log:
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for numbers, inputs in loader:
            loss = engine(inputs.to(engine.device)).square().mean()
            engine.backward(loss)
            engine.step()
            print(engine.global_steps, loss.item(), *numbers.tolist(), file=log, flush=True)
            if engine.global_steps % SAVE_EVERY == 0:
                path = f"{run}/step{engine.global_steps}"
                zckpt.write(engine, path, client_state={"epoch": epoch}, overwrite=True)
