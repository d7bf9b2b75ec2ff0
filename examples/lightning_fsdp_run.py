"""Trains an FSDP2 model with Lightning's ModelParallelStrategy, and can be killed at any point. When it is started
again, it resumes from its last checkpoint, with the same samples and losses as a run that never stopped:

    torchrun --nproc-per-node 2 -m zckpt run examples/lightning_fsdp_run.py [DIRECTORY]

For each step, each rank appends a line to DIRECTORY-<rank>.log: the step, the loss, and the numbers of the samples.
"""

import glob
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

run = sys.argv[1] if len(sys.argv) > 1 else "lightning_fsdp_run"


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))

    def configure_model(self):
        for module in (self.layers[0], self.layers[2], self.layers):
            fully_shard(module)

    def train_dataloader(self):  # Lightning saves the loader's position on each rank
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(104), torch.randn(104, 32))
        return StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=1)

    def training_step(self, batch):
        numbers, inputs = batch
        loss = self.layers(inputs).square().mean()
        with open(f"{run}-{self.global_rank}.log", "a") as log:
            print(self.global_step + 1, loss.item(), *numbers.tolist(), file=log)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


torch.manual_seed(0)
saves = ModelCheckpoint(run, "{step:06}", every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False)
trainer = Trainer(
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=2,
    max_epochs=2,
    callbacks=[saves],
    logger=False,
    use_distributed_sampler=False,
)
saved = glob.glob(f"{run}/*/latest")
trainer.fit(Module(), ckpt_path=max(saved).removesuffix("/latest") if saved else None)
