"""Trains LoRA adapters of PEFT with ZeRO, and can be killed at any point. When it is started again, it resumes from its
last checkpoint, with the same samples and losses as a run that never stopped. At the end it exports the adapter:

    torchrun --nproc-per-node 2 examples/peft_run.py [DIRECTORY]

For each step, each rank appends a line to DIRECTORY-<rank>.log: the step, the loss, and the numbers of the samples.
"""

import os
import sys

import deepspeed
import peft
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import zckpt

EPOCHS, SAVE_EVERY = 2, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}

run = sys.argv[1] if len(sys.argv) > 1 else "peft_run"
deepspeed.init_distributed()
rank = torch.distributed.get_rank()

torch.manual_seed(0)
# The first token is the sample's number.
tokens = torch.cat([torch.arange(104)[:, None], torch.randint(104, (104, 7))], dim=1)
sampler = DistributedSampler(tokens)
loader = StatefulDataLoader(tokens, batch_size=4, sampler=sampler, num_workers=1)
config = LlamaConfig(vocab_size=104, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
base = LlamaForCausalLM(config)  # or from_pretrained
model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=CONFIG)

zckpt.register(engine, "train", loader)  # each checkpoint now contains the position of each rank in the data
begin = 0
if os.path.exists(f"{run}/latest"):
    begin = zckpt.restore(engine, run)["epoch"]

with open(f"{run}-{rank}.log", "a") as log:
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = engine(input_ids=batch.to(engine.device), labels=batch.to(engine.device)).loss
            engine.backward(loss)
            engine.step()
            print(engine.global_steps, loss.item(), *batch[:, 0].tolist(), file=log, flush=True)
            if engine.global_steps % SAVE_EVERY == 0:
                path = f"{run}/step{engine.global_steps}"
                zckpt.write(engine, path, client_state={"epoch": epoch}, overwrite=True)
zckpt.export(engine, f"{run}/adapter", adapter="default", overwrite=True)
