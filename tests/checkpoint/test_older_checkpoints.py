"""Accelerate and Lightning remove an older checkpoint only after a newer one is committed. This also holds for saves in
the background."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zckpt
from tests.support.fsdp_on_cpu import fsdp_accelerator
from tests.support.lightning import let_lightning_use_cpus
from tests.support.slow_writes import slow
from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import can_resume

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
removed: list[bool] = []
"""Has a value for each folder that this rank has removed: whether another checkpoint was committed at that time."""


def watched(remove: Any, above: Path) -> Any:
    """Returns a function that does what ``remove`` does, and records in ``removed`` each folder that it removes
    directly in ``above``."""

    def call(path: Any, *args: Any, **options: Any) -> None:
        folder = Path(path)
        if folder.parent == above:
            removed.append(any(folder not in manifest.parents for manifest in above.rglob("manifest.msgpack")))
        remove(path, *args, **options)

    return call


def save_by_accelerate(directory: str, full_every: int, *, fsdp: bool = False) -> list[bool]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ProjectConfiguration

    zckpt.attach_all(background=True, full_every=full_every)
    project = ProjectConfiguration(directory, total_limit=2, automatic_checkpoint_naming=True)
    if fsdp:
        options: dict[str, Any] = {"auto_wrap_policy": "no_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
        accelerator = fsdp_accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    else:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG), project_config=project)
    model = torch.nn.Linear(32, 32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    above = Path(directory, "checkpoints")
    above.mkdir(parents=True)
    with slow(0.1), mock.patch("accelerate.accelerator.shutil.rmtree", watched(shutil.rmtree, above)):
        for _ in range(4):
            accelerator.backward(model(torch.ones(4, 32)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state()
        zckpt.wait()
    return removed


def save_by_accelerate_with_fsdp(directory: str, full_every: int) -> list[bool]:
    return save_by_accelerate(directory, full_every, fsdp=True)


def save_by_lightning(directory: str, full_every: int, *, fsdp: bool = False) -> list[bool]:
    let_lightning_use_cpus()
    from lightning.pytorch import LightningModule, Trainer, strategies
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def configure_model(self) -> None:
            if fsdp:
                fully_shard(self.layer)

        def train_dataloader(self) -> Any:
            samples: Any = torch.ones(64, 32)
            return torch.utils.data.DataLoader(samples, batch_size=4)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    zckpt.attach_all(background=True, full_every=full_every)
    saves = ModelCheckpoint(directory, "{step:06}", every_n_train_steps=2, save_top_k=1, save_on_train_epoch_end=False)
    strategy: Any = strategies.ModelParallelStrategy(2, 1) if fsdp else strategies.DeepSpeedStrategy(config=CONFIG)
    cpu: dict[str, Any] = {"accelerator": "cpu"} if fsdp else {}
    trainer = Trainer(strategy=strategy, devices=2, max_steps=6, callbacks=[saves], logger=False, **cpu)
    files = trainer.strategy.checkpoint_io
    with slow(0.1), mock.patch.object(files, "remove_checkpoint", watched(files.remove_checkpoint, Path(directory))):
        trainer.fit(Module())
        zckpt.wait()
    return removed


def save_by_lightning_with_fsdp(directory: str, full_every: int) -> list[bool]:
    return save_by_lightning(directory, full_every, fsdp=True)


def skip_without(save: Any) -> None:
    """Skips a test if the framework of one of the functions above is not installed."""
    pytest.importorskip("lightning" if "lightning" in save.__name__ else "accelerate")


@pytest.mark.matrix
@pytest.mark.parametrize(
    # Only one rank with Accelerate: without a GPU, each rank believes that it is the first, and removes folders
    ("save", "ranks", "stay"),
    [
        (save_by_accelerate, 1, 2),
        (save_by_accelerate_with_fsdp, 1, 4),  # two for each save
        (save_by_lightning, 2, 1),
        (save_by_lightning_with_fsdp, 2, 1),
    ],
)
def test_an_older_checkpoint_is_removed_after_a_newer_one_is_committed(
    cluster: Cluster, tmp_path: Path, save: Any, ranks: int, stay: int
) -> None:
    skip_without(save)
    first, *others = cluster.run(save, ranks, str(tmp_path / "run"), 1, init=False)
    assert (first, others) == ([True, True], [[]] * (ranks - 1))
    left = [manifest.parent for manifest in (tmp_path / "run").rglob("manifest.msgpack")]
    assert len(left) == stay
    assert all(zckpt.validate(checkpoint).ok for checkpoint in left)


@pytest.mark.parametrize(
    ("save", "ranks", "full_every", "left"),
    [
        (save_by_accelerate, 1, 3, {"checkpoints/checkpoint_2": False, "checkpoints/checkpoint_3": True}),
        (save_by_accelerate, 1, 4, {"checkpoints/checkpoint_0": True, "checkpoints/checkpoint_3": False}),
        (save_by_accelerate_with_fsdp, 1, 3, {"checkpoints/checkpoint_2": False, "checkpoints/checkpoint_3": True}),
        (save_by_accelerate_with_fsdp, 1, 4, {"checkpoints/checkpoint_0": True, "checkpoints/checkpoint_3": False}),
        (save_by_lightning, 2, 3, {"step=000002.ckpt": True, "step=000006.ckpt": False}),
        (save_by_lightning_with_fsdp, 2, 3, {"step=000002.ckpt": True, "step=000006.ckpt": False}),
    ],
)
def test_the_last_checkpoint_to_resume_from_stays(
    cluster: Cluster, tmp_path: Path, save: Any, ranks: int, full_every: int, left: dict[str, bool]
) -> None:
    """Accelerate keeps two of four checkpoints, and Lightning one of three. ``left`` says of each that stays whether a
    run can be resumed from it. The others hold only weights."""
    skip_without(save)
    run = tmp_path / "run"
    cluster.run(save, ranks, str(run), full_every, init=False)
    folders = {str(latest.parent.relative_to(run)): find(latest.parent) for latest in run.rglob("latest")}
    assert {name: can_resume(checkpoint) for name, checkpoint in folders.items()} == left
