"""If a restore fails on one rank, at whatever point, every rank raises an error, no rank waits, and the next restore
works."""

from __future__ import annotations

import functools
import os
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import assert_same, settings, tensors_of
from zckpt.checkpoint.listing.find import find_and_open
from zckpt.checkpoint.open import open_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster

ADAPTERS = "zckpt.adapters"
DEEPSPEED = f"{ADAPTERS}.deepspeed"
POINTS = (
    "zckpt.checkpoint.restoring.machines.find_and_open",
    "zckpt.checkpoint.reading.loader.Loader.read",
    "zckpt.checkpoint.reading.loader.Loader.rank_state",
    f"{ADAPTERS}.module_restoring.set_in_place",
    f"{ADAPTERS}.module_restoring.rng.restore",
    f"{DEEPSPEED}.restoring.rng.to_tensor",
    f"{DEEPSPEED}.restoring.cpu_adam.replay",
    f"{DEEPSPEED}.restoring.scaler.restore",
    f"{ADAPTERS}.optimizer.OptimizerRestoring.problems",
    f"{ADAPTERS}.optimizer.OptimizerRestoring.restore",
    f"{ADAPTERS}.optimizer.restoring.placed",
    f"{DEEPSPEED}.adapter.DeepSpeedAdapter.wanted",
    f"{DEEPSPEED}.adapter.DeepSpeedAdapter.restoring",
    f"{DEEPSPEED}.restoring.DeepSpeedRestoring.fill",
    f"{ADAPTERS}.module_restoring.SavedScheduler.take_steps",
    f"{ADAPTERS}.module_restoring.SavedScheduler.restore",
    f"{ADAPTERS}.replicas.gathering",
    f"{DEEPSPEED}.zero12.Zero12.before_restore",
    f"{DEEPSPEED}.zero12.Zero12.after_masters",
    f"{DEEPSPEED}.zero12.Zero12.after_fill",
    f"{DEEPSPEED}.zero12.Zero12._drop_gradients",
    f"{DEEPSPEED}.zero12.Bf16Optimizer._drop_gradients",
    f"{DEEPSPEED}.zero3.Zero3.before_restore",
    f"{DEEPSPEED}.zero3.Zero3._derive_weights",
    f"{DEEPSPEED}.zero3.Zero3.after_masters",
    f"{ADAPTERS}.unwrapped.Unwrapped.after_fill",
    f"{DEEPSPEED}.stage0.PerParameter.after_fill",
)
"""The functions that a rank calls in a restore and that can fail on one rank alone."""


@contextmanager
def failing(at: int | None) -> Iterator[list[str]]:
    """Makes call number ``at`` of all functions in ``POINTS`` fail, counted from 0. Yields the list of the calls that
    have begun."""
    calls: list[str] = []
    lock = threading.Lock()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                calls.append(name)
                fails = len(calls) - 1 == at
            if fails:
                raise MemoryError(name)
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        for name in POINTS:
            patcher = mock.patch(name)
            original, _ = patcher.get_original()
            stack.enter_context(mock.patch(name, counted(name, original)))
        yield calls


def fail_everywhere(path: str, setup: dict[str, Any]) -> set[str]:
    """Restores again and again. Each time, rank 1 fails one call later. Returns the functions that were called."""
    engine = make_engine(**setup)
    train(engine, 1)
    zckpt.write(engine, path)
    expected, expected_settings = tensors_of(engine), settings(engine)
    train(engine, 1, 1)
    with failing(None) as points:
        zckpt.restore(engine, path, rng=True)
    number = torch.tensor(len(points))
    torch.distributed.broadcast(number, 1)
    for at in range(int(number)):
        fails = os.environ["RANK"] == "1"
        with (
            failing(at if fails else None) as calls,
            pytest.raises(MemoryError if fails else zckpt.RankError) as caught,
        ):
            zckpt.restore(engine, path, rng=True)
        assert not fails or (calls[at] == str(caught.value) and len(calls) == at + 1)
        assert fails or getattr(caught.value, "rank", None) == 1
    zckpt.restore(engine, path, rng=True)
    tensors = tensors_of(engine)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert settings(engine) == expected_settings
    train(engine, 1, 1)
    return set(points)


SETUPS: dict[str, dict[str, Any]] = {
    "2": {"stage": 2, "model": "odd", "scheduler": True},
    "3": {"stage": 3, "model": "odd", "scheduler": True},
    "0-fp16": {"stage": 0, "dtype": "fp16"},
    "0-fp32": {"stage": 0, "dtype": "fp32", "optimizer": "factored"},
    "1-bf16-optimizer": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "2-factored": {"stage": 2, "optimizer": "factored"},
    "3-factored": {"stage": 3, "optimizer": "factored"},
}
EVERY_COMMIT = ("2-factored", "3", "0-fp16")


@pytest.mark.parametrize(
    "setup", [name if name in EVERY_COMMIT else pytest.param(name, marks=pytest.mark.matrix) for name in SETUPS]
)
def test_a_failure_at_any_point_is_an_error_on_every_rank(cluster: Cluster, tmp_path: Path, setup: str) -> None:
    points = cluster.run(fail_everywhere, 2, str(tmp_path / "c"), SETUPS[setup])[1]
    wrappers = {"0-fp16": "stage0", "0-fp32": "unwrapped", "3": "zero3", "3-factored": "zero3"}
    wrapper = wrappers.get(setup, "zero12")
    assert any(wrapper in point for point in points)
    assert len(points) > 8


def restore_two(path: str) -> str:
    engine = make_engine()
    train(engine, 1)
    for name in ("a", "b"):
        zckpt.write(engine, f"{path}/{name}")
    train(engine, 1)
    before = tensors_of(engine)
    seen = f"{path}/{'ab'[engine.global_rank]}"
    found = find_and_open(seen)
    patched = mock.patch("zckpt.checkpoint.restoring.machines.find_and_open", return_value=found)
    with patched, pytest.raises(zckpt.RankError) as caught:
        zckpt.restore(engine, path)
    assert_same(tensors_of(engine), before)
    return str(caught.value)


def test_ranks_that_see_different_checkpoints_at_one_path(cluster: Cluster, tmp_path: Path) -> None:
    for message in cluster.run(restore_two, 2, str(tmp_path)):
        assert "different checkpoints" in message


def restore_damaged(path: str) -> list[tuple[str, int | None, str]]:
    """Restores a checkpoint in which one byte of a tensor of rank 1 has changed. The optimizer has bound this tensor to
    its flat buffers. Then removes a data file and restores again."""
    engine = make_engine(stage=2, optimizer="factored")
    train(engine, 1)
    zckpt.write(engine, path)
    zckpt.write(engine, f"{path}-whole", latest=False)
    if engine.global_rank == 0:
        contents = open_loader(path).contents
        part = contents.manifest.parts[contents.manifest.part_ids["state"]]
        (name, *_) = (
            name for name in map(contents.manifest.names.__getitem__, part.name_ids) if name.startswith("tree/1/")
        )
        piece = contents.find("state", name).pieces[0]  # type: ignore[union-attr]
        with (Path(path) / piece.file).open("r+b") as file:
            file.seek(piece.offset)
            byte = file.read(1)[0]
            file.seek(piece.offset)
            file.write(bytes([byte ^ 1]))
    torch.distributed.barrier()
    errors = []
    for _ in range(2):
        with pytest.raises(zckpt.ZckptError) as caught:
            zckpt.restore(engine, path)
        errors.append((type(caught.value).__name__, caught.value.rank, str(caught.value)))
        torch.distributed.barrier()
        if engine.global_rank == 0:
            next(Path(path).rglob("master.safetensors")).unlink(missing_ok=True)
        torch.distributed.barrier()
    zckpt.restore(engine, f"{path}-whole")
    train(engine, 1, 1)
    return errors


def test_a_damaged_tensor_of_one_ranks_tree(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    (first, missing), (second, missing_too) = cluster.run(restore_damaged, 2, path)
    assert first[:2] == ("RankError", 1)
    assert second[0] == "DigestError"
    assert "DigestError" in first[2]
    assert "the engine is restored in part" in second[2]
    assert second[2].endswith(f"{path}-whole")
    for error, _, message in (missing, missing_too):
        assert error in ("MissingFileError", "RankError")
        assert "nothing was changed" in message
        assert f"{path}-whole" in message
