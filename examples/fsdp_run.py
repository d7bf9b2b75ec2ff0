"""Trains with FSDP2 and can be stopped at any point, by Ctrl-C, by kill -9 or by a power cut. When it is started again,
also with another number of ranks, it resumes from its last checkpoint:

    torchrun --nproc-per-node 2 examples/fsdp_run.py [DIRECTORY]

For each step, each rank appends a line to DIRECTORY-<rank>.log: the step, the loss, and the numbers of the samples.
"""

import os
import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import zckpt

EPOCHS, SAVE_EVERY = 2, 3
run = sys.argv[1] if len(sys.argv) > 1 else "fsdp_run"
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = torch.distributed.get_rank()

torch.manual_seed(0)
data = TensorDataset(torch.arange(104), torch.randn(104, 32))
sampler = DistributedSampler(data)  # divides the samples among the ranks, in another order in each epoch
loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = zckpt.TrainState(model, optimizer)

zckpt.register(state, "train", loader)  # each checkpoint now contains the position of each rank in the data
begin = 0
if os.path.exists(f"{run}/latest"):
    begin = zckpt.restore(state, run)["epoch"]

with open(f"{run}-{rank}.log", "a") as log:
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for numbers, inputs in loader:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(state.step, loss.item(), *numbers.tolist(), file=log, flush=True)
            if state.step % SAVE_EVERY == 0:
                zckpt.write(state, f"{run}/step{state.step}", client_state={"epoch": epoch}, overwrite=True)
torch.distributed.destroy_process_group()
