"""What the tests of tensor, expert and pipeline parallelism share: runs that write and restore, and the comparison of
all ways of dividing a model. Each way has a module in this folder with the functions ``make``, ``train`` and
``whole``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist

import zckpt
from tests.support.converting import assert_same_checkpoints
from tests.support.runs import link_all, logical, settings
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

Setup = dict[str, Any]
"""The arguments of ``make``."""


def write_trained(module: str, path: str, setup: Setup) -> tuple[dict[str, Any], list[float]]:
    """Trains, writes a checkpoint, and returns the whole tensors, and the losses of two more steps."""
    way: Any = import_module(f"tests.support.{module}")
    engine = way.make(**setup)
    way.train(engine, 3)
    zckpt.write(engine, path)
    return way.whole(engine), way.train(engine, 2)


def save_both(module: str, folder: str, setup: Setup, client_state: dict[str, Any]) -> list[float]:
    """Trains, saves ``folder/stock`` with DeepSpeed and ``folder/own`` with zckpt, and returns the losses of two more
    steps."""
    way: Any = import_module(f"tests.support.{module}")
    engine = way.make(**setup)
    way.train(engine, 3)
    engine.save_checkpoint(f"{folder}/stock", client_state=client_state)
    zckpt.write(engine, f"{folder}/own", latest=False)
    losses: list[float] = way.train(engine, 2)
    return losses


def restore_and_write(module: str, path: str, there: str, setup: Setup) -> list[float]:
    """Restores a checkpoint into another engine, writes it again, and returns the losses of two steps."""
    way: Any = import_module(f"tests.support.{module}")
    engine = way.make(**setup, seed=1)
    zckpt.restore(engine, path)
    zckpt.write(engine, there)
    losses: list[float] = way.train(engine, 2)
    return losses


def restore_whole(module: str, path: str, setup: Setup, trained: int) -> tuple[dict[str, Any], list[float]]:
    """Restores a checkpoint into another engine, which has taken ``trained`` steps, and returns the same."""
    way: Any = import_module(f"tests.support.{module}")
    engine = way.make(**setup, seed=1)
    way.train(engine, trained)
    zckpt.restore(engine, path)
    assert settings(engine)["global_steps"] == 3
    return way.whole(engine), way.train(engine, 2)


def check_division(
    cluster: Cluster, path: str, module: str, setups: list[tuple[Setup, int]], there: int, *, everywhere: bool = False
) -> None:
    """Writes with one engine, compares the checkpoint with its whole tensors, and restores the checkpoint into an
    engine of the same kind, which has to go on alike, and into the next one.

    ``setups``: the engines, each with a number of ranks. ``there``: the number of the engine that writes.
    ``everywhere``: whether the checkpoint is restored into all engines.
    """
    setup, ranks = setups[there]
    written = cluster.run(write_trained, ranks, module, path, setup)
    check_stored(path, written[0][0])
    for number, (other, here) in enumerate(setups):
        if everywhere or number in (there, (there + 1) % len(setups)):
            restored = cluster.run(restore_whole, here, module, path, other, number % 2)
            assert all(frozen(tensors) == frozen(written[0][0]) for tensors, _ in restored), other
            if number == there:
                assert [losses for _, losses in restored] == [losses for _, losses in written]


def check_conversion(
    cluster: Cluster, folder: Path, module: str, setups: list[tuple[Setup, int]], client_state: dict[str, Any]
) -> None:
    """Saves with the first of the engines in DeepSpeed's own format and with zckpt, and compares what zckpt.convert
    makes of the one with the other. Restores the conversion into all of the engines, the first of which has to go on
    alike."""
    setup, ranks = setups[0]
    losses = cluster.run(save_both, ranks, module, str(folder), setup, client_state)
    converted = zckpt.convert(folder / "stock", folder / "converted")
    assert zckpt.validate(converted.path, level="deep").ok
    own, new = zckpt.open(folder / "own"), zckpt.open(converted.path)
    assert_same_checkpoints(own, new, same_files=False)
    assert loader_of(own).manifest.writer["parallelism"] == loader_of(new).manifest.writer["parallelism"]
    tensors = own.load()
    for number, (other, here) in enumerate(setups):
        path = str(folder / str(number))
        resumed = cluster.run(restore_and_write, here, module, converted.path, path, other)
        assert number > 0 or resumed == losses
        again = zckpt.open(path).load()
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[key], tensors[key]) for key in tensors), other


def check_stored(path: str, written: dict[str, torch.Tensor]) -> None:
    """Compares a checkpoint with the whole tensors of the engine that has written it."""
    assert zckpt.validate(path).ok
    stored = zckpt.open(path).load()
    for key, tensor in written.items():
        if not key.startswith("param/") or key in stored:
            assert torch.equal(stored[key], tensor), key
    kept, expected = ({key for key in keys if not key.startswith("param/")} for keys in (stored, written))
    assert kept == expected


def train_on(engine: Any, steps: int, vocab: int, batch: int) -> list[float]:
    """Takes steps, whose data depend on the number of the step. Returns the losses of this rank."""
    losses, group = [], engine.seq_data_parallel_group
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        data = torch.randint(0, vocab, (2, batch, 5), generator=generator)
        x, y = data.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def local_state(engine: Any, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Returns this rank's local tensors by key, without zckpt: master weights, moments, weights, and the buffers that
    the state dict has."""
    if engine.zero_optimization_stage() in (1, 2):
        link_all(engine)
    local = logical(engine, keys)
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            local[f"param/{name}"] = parameter.detach().clone()
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                local[f"buffer/{prefix}.{name}".replace("/.", "/")] = buffer.clone()
    return local


def of_all_ranks(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of all ranks. Those of the same key have to be equal. Every rank calls it."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, named)
    tensors: dict[str, torch.Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank.items():
            assert torch.equal(tensors.setdefault(key, tensor), tensor), key
    return dict(sorted(tensors.items()))
