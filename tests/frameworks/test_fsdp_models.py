"""FSDP2 models whose saves a framework calls: copies, registered objects, and models that are left to the framework."""

from __future__ import annotations

import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.fsdp_on_cpu import fsdp_accelerator
from tests.support.slow_writes import slow
from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import can_resume
from zckpt.checkpoint.open import open_loader
from zckpt.frameworks import lightning_fsdp
from zckpt.frameworks.fsdp_models import engine_of_model

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from tests.support.cluster import Cluster

pytest.importorskip("accelerate")


class Counter:
    """An object of the user's that is saved with the model."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def accelerated(state_dict_type: str = "SHARDED_STATE_DICT", version: int = 2) -> tuple[Any, Any, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    options: dict[str, Any] = {"auto_wrap_policy": "no_wrap", "state_dict_type": state_dict_type}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    accelerator = fsdp_accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Linear(8, 8)
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters())))


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(4, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(directory: str) -> list[Any]:
    """Saves twice, removes the first save and what the second one needs of it, and loads both of the copies."""
    counter = Counter()
    zckpt.attach_all(copy_to=f"{directory}/there", on_attach=lambda state: zckpt.register(state, "counter", counter))
    objects = accelerated()
    accelerator, model, _ = objects
    seen = []
    for number in (1, 2):
        step(*objects)
        counter.count = number
        accelerator.save_state(f"{directory}/here/checkpoint_{number}")
        seen.append(model.weight.full_tensor().clone())
    zckpt.wait()
    shutil.rmtree(f"{directory}/here")
    found: list[Any] = []
    for number in (1, 2):
        # Accelerate keeps the random generators in files of its own, which are not copied.
        Path(f"{directory}/here/checkpoint_{number}").mkdir(parents=True)
        torch.save({}, f"{directory}/here/checkpoint_{number}/random_states_0.pkl")
        step(*objects)
        counter.count = 0
        accelerator.load_state(f"{directory}/here/checkpoint_{number}")
        found.append((counter.count, torch.equal(model.weight.full_tensor(), seen[number - 1])))
    step(*objects)
    accelerator.save_state(f"{directory}/here/checkpoint_3")
    runs = {open_loader(path.parent).contents.lineage.run_id for path in Path(directory).rglob("manifest.msgpack")}
    return [*found, len(runs)]


def test_a_state_is_loaded_from_its_copy_with_what_is_registered(cluster: Cluster, tmp_path: Path) -> None:
    """The saves before and after the load belong to the same run."""
    (found,) = cluster.run(save_and_load, 1, str(tmp_path), init=False)
    assert found == [(1, True), (2, True), 1]


def leave(directory: str, *kind: Any) -> list[str]:
    zckpt.attach_all()
    objects = accelerated(*kind)
    step(*objects)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            objects[0].save_state(f"{directory}/{number}")
    return [str(warning.message) for warning in caught if "Accelerate itself" in str(warning.message)]


def test_what_accelerate_saves_itself_is_told_once(cluster: Cluster, tmp_path: Path) -> None:
    ((told,),) = cluster.run(leave, 1, str(tmp_path), "FULL_STATE_DICT", init=False)
    assert told.endswith("zckpt takes the place of SHARDED_STATE_DICT only")
    assert (tmp_path / "1" / "optimizer.bin").exists()
    assert not [*tmp_path.rglob("manifest.msgpack")]


def load_unfinished(directory: str) -> None:
    zckpt.attach_all()
    objects = accelerated()
    step(*objects)
    objects[0].save_state(directory)
    Path(directory, "optimizer_0", "manifest.msgpack").unlink()
    objects[0].load_state(directory)


def test_a_save_that_was_cut_off_is_not_left_to_accelerate(cluster: Cluster, tmp_path: Path) -> None:
    (outcome,) = cluster.outcomes(load_unfinished, 1, str(tmp_path / "state"), init=False)
    assert "zckpt.errors.UnfinishedWriteError" in str(outcome.error)


def save_in_background(directory: str) -> tuple[bool, list[bool]]:
    """Loads right after a save in the background. Then goes on with the saves, of which every second one is full."""
    zckpt.attach_all(background=True, full_every=2)
    objects = accelerated()
    accelerator, model, _ = objects
    step(*objects)
    with slow(0.1):
        accelerator.save_state(f"{directory}/step1")
        saved = model.weight.full_tensor().clone()
        step(*objects)
        accelerator.load_state(f"{directory}/step1")
    equal = torch.equal(saved, model.weight.full_tensor())
    for number in (2, 3, 4):
        step(*objects)
        accelerator.save_state(f"{directory}/step{number}")
        if number == 2:
            accelerator.load_state(f"{directory}/step1")
    zckpt.wait()
    return equal, [can_resume(find(f"{directory}/step{number}/optimizer_0")) for number in (1, 2, 3, 4)]


def test_a_load_waits_for_the_save_and_begins_the_count_of_full_ones_anew(cluster: Cluster, tmp_path: Path) -> None:
    expected = (True, [True, False, False, True])
    assert cluster.run(save_in_background, 1, str(tmp_path / "run"), init=False) == [expected]


def save_without_zckpt(directory: str) -> tuple[bool, int, bool]:
    """Saves with zckpt, then with PyTorch to the same directory, and loads."""
    from accelerate.utils import fsdp_utils

    zckpt.attach_all()
    accelerator, model, optimizer = accelerated()
    plugin = accelerator.state.fsdp_plugin
    step(accelerator, model, optimizer)
    accelerator.save_state(directory)
    step(accelerator, model, optimizer)
    fsdp_utils.save_fsdp_model.__wrapped__(plugin, accelerator, model, directory, 0)
    fsdp_utils.save_fsdp_optimizer.__wrapped__(plugin, accelerator, optimizer, model, directory, 0)
    saved = model.weight.full_tensor().clone()
    step(accelerator, model, optimizer)
    accelerator.load_state(directory)
    state = engine_of_model(model)
    loaded = state.step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.save_state(directory)
    told = any("has a checkpoint of PyTorch too" in str(warning.message) for warning in caught)
    return torch.equal(saved, model.weight.full_tensor()), loaded, told


def test_a_later_save_without_zckpt_is_loaded(cluster: Cluster, tmp_path: Path) -> None:
    """After the load, the state has the step of what PyTorch has saved. The next save of zckpt into the same directory
    gives a warning."""
    assert cluster.run(save_without_zckpt, 1, str(tmp_path / "state"), init=False) == [(True, 2, True)]


def save_in_part(directory: str) -> list[bool]:
    """Saves twice into one directory. The second save fails between the weights and the optimizer."""
    zckpt.attach_all()
    objects = accelerated()
    accelerator, model, optimizer = objects
    step(*objects)
    accelerator.save_state(directory)
    saved = model.weight.full_tensor().clone()
    moments = optimizer.state[model.weight]["exp_avg"].full_tensor().clone()
    step(*objects)
    with mock.patch("zckpt.frameworks.fsdp_models.save", side_effect=OSError), suppress(OSError):
        accelerator.save_state(directory)
    assert zckpt.open(f"{directory}/pytorch_model_fsdp_0").step == 2
    with pytest.warns(UserWarning, match="step 2.*step 1"):
        accelerator.load_state(directory)
    loaded = optimizer.state[model.weight]["exp_avg"].full_tensor()
    return [torch.equal(model.weight.full_tensor(), saved), torch.equal(loaded, moments)]


def test_a_save_in_part_is_loaded_as_the_save_before(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(save_in_part, 1, str(tmp_path / "state"), init=False) == [[True, True]]


def lightning_weights(directory: str) -> tuple[list[str], int, bool]:
    """Trains with Lightning, which saves weights alone, and then evaluates a new model with them."""
    zckpt.attach_all()
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def configure_model(self) -> None:
            fully_shard(self.layer)

        def train_dataloader(self) -> Any:
            samples: Any = torch.ones(16, 8)
            return torch.utils.data.DataLoader(samples, batch_size=4)

        val_dataloader = train_dataloader

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["teacher"] = torch.ones(2)

    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
    saves = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_weights_only=True)
    trainer = Trainer(strategy=ModelParallelStrategy(2, 1), max_steps=2, callbacks=[saves], **options)
    trained, other = Module(), Module()
    trainer.fit(trained)
    Trainer(strategy=ModelParallelStrategy(2, 1), **options).validate(other, ckpt_path=f"{directory}/step=2.ckpt")
    checkpoint = zckpt.open(f"{directory}/step=2.ckpt")
    weights: list[Any] = []
    for module in (trained, other):
        cast("FSDPModule", module.layer).reshard()
        weights.append(module.layer.weight)
    assert checkpoint.state["client_state"]["state_dict"]["teacher"].tolist() == [1.0, 1.0]
    return [*checkpoint.parts], checkpoint.step, torch.equal(weights[0].full_tensor(), weights[1].full_tensor())


def test_lightning_saves_weights_alone_and_evaluates_with_them(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    for found in cluster.run(lightning_weights, 2, str(tmp_path), init=False):
        assert found == (["master"], 2, True)


def told_of_fsdp1() -> list[str]:
    zckpt.attach_all()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            lightning_fsdp.warn_of_fsdp1(lambda strategy: None, SimpleNamespace(global_rank=0))
    return [str(warning.message) for warning in caught]


def test_fsdp1_of_lightning_is_told_once(cluster: Cluster) -> None:
    """Lightning refuses FSDPStrategy on the CPU, so this calls the function that replaces its ``setup``."""
    ((told,),) = cluster.run(told_of_fsdp1, 1, init=False)
    assert "its FSDPStrategy uses FSDP1" in told
