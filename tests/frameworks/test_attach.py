"""The save_checkpoint and load_checkpoint of an attached engine do what DeepSpeed's own do. A checkpoint can also be
restored in part."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.config import ValidationMode

import zckpt
from tests.support.hub import cached
from tests.support.models import batch, make_engine, train
from tests.support.runs import AFTER, BEFORE, assert_same, logical, settings, tensors_of, weights
from zckpt.frameworks import deepspeed_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster

MOMENTS = ("exp_avg", "exp_avg_sq")


def run_with(directory: str, stage: int, attached: bool) -> dict[str, Any]:
    """Saves twice under one tag and once more under another, then trains on. Returns what the saves returned, the state
    and the losses."""
    engine = make_engine(stage=stage, groups=stage == 3, scheduler=True)
    if attached:
        assert zckpt.attach(engine) is engine
        zckpt.attach(engine)
    train(engine, 1)
    saved = [engine.save_checkpoint(directory, tag="best", client_state={"epoch": 1})]
    train(engine, BEFORE - 1, 1)
    saved.append(engine.save_checkpoint(directory, "best", {"epoch": 3}))
    saved.append(engine.save_checkpoint(directory, save_latest=False))
    state = logical(engine, MOMENTS), settings(engine)
    return {"saved": saved, "state": state, "losses": train(engine, AFTER, BEFORE)}


def load_with(directory: str, stage: int, trained: int, options: dict[str, Any]) -> dict[str, Any]:
    engine = zckpt.attach(make_engine(stage=stage, groups=stage == 3, scheduler=True, seed=1))
    if trained:
        train(engine, trained, 100)
    before = logical(engine, MOMENTS if trained else ()), settings(engine)
    path, client_state = engine.load_checkpoint(directory, **options)
    after = logical(engine, MOMENTS if trained or not options else ()), settings(engine)
    return {
        "path": path,
        "client": client_state,
        "before": before,
        "after": after,
        "losses": train(engine, AFTER, BEFORE),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_is_saved_and_loaded_as_deepspeed_does(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    run = cluster.run(run_with, 2, ours, stage, True)
    stock = cluster.run(run_with, 2, theirs, stage, False)
    assert [rank["saved"] for rank in run] == [rank["saved"] for rank in stock]
    assert [rank["losses"] for rank in run] == [rank["losses"] for rank in stock]
    scripts = {name for name in os.listdir(theirs) if name.endswith(".py")}  # DeepSpeed copies its own converters there
    assert set(os.listdir(ours)) == set(os.listdir(theirs)) - scripts
    assert (Path(ours) / "latest").read_text().strip() == (Path(theirs) / "latest").read_text() == "best"
    for trained in (0, 2):
        for saved, loaded in zip(run, cluster.run(load_with, 2, ours, stage, trained, {}), strict=True):
            assert loaded["path"] == os.path.join(ours, "best")
            assert loaded["client"] == {"epoch": 3}
            assert_same(saved["state"][0], loaded["after"][0])
            assert saved["state"][1] == loaded["after"][1]
            assert saved["losses"] == loaded["losses"]


@pytest.mark.parametrize(
    ("options", "counters", "scheduler"),
    [
        ({"load_module_only": True}, False, False),
        ({"load_optimizer_states": False}, True, True),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, True, False),
    ],
)
def test_options_of_load_checkpoint_restore_a_part(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], counters: bool, scheduler: bool
) -> None:
    run = cluster.run(run_with, 2, str(tmp_path), 3, True)
    for saved, loaded in zip(run, cluster.run(load_with, 2, str(tmp_path), 3, 2, options), strict=True):
        for key, tensor in loaded["after"][0].items():
            source = saved["state"][0] if key.startswith("master/") else loaded["before"][0]
            assert torch.equal(tensor, source[key]), key
        from_checkpoint, from_engine = saved["state"][1], loaded["before"][1]
        for name in ("global_steps", "global_samples"):
            assert loaded["after"][1][name] == (from_checkpoint if counters else from_engine)[name]
        assert loaded["after"][1]["scheduler"] == (from_checkpoint if scheduler else from_engine)["scheduler"]


@contextmanager
def warns_on_rank_0(engine: Any, message: str) -> Iterator[None]:
    """Expects a warning on rank 0, and none on the other ranks."""
    if engine.global_rank == 0:
        with pytest.warns(UserWarning, match=message):
            yield
    else:
        yield


def stock_folder_and_detach(directory: str) -> None:
    engine = make_engine()
    train(engine, 2)
    engine.save_checkpoint(directory)
    before = tensors_of(engine)
    other = zckpt.attach(make_engine(seed=1))
    with warns_on_rank_0(engine, "there is no .*latest"):
        assert other.load_checkpoint(directory + "-nowhere") == (None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # rank 0's warning, now an error, reaches all ranks
        with pytest.raises((UserWarning, zckpt.RankError), match=r"there is no .*latest"):
            other.load_checkpoint(directory + "-nowhere")
        with pytest.raises((UserWarning, zckpt.RankError), match="different tags"):
            other.save_checkpoint(directory, tag=f"rank{engine.global_rank}")
    path, _ = other.load_checkpoint(directory)
    assert path.endswith(".pt")
    assert_same(before, tensors_of(other))
    with pytest.raises(zckpt.CheckpointNotFoundError):
        other.load_checkpoint(directory, tag="nothing")
    other.save_checkpoint(directory, tag="ours")
    assert other.load_checkpoint(f"{directory}/ours")[0] == f"{directory}/ours"  # as after a conversion
    latest = Path(directory, "latest")
    torch.distributed.barrier()
    if engine.global_rank == 0:
        latest.write_text("ours \n\n")
    with pytest.raises((zckpt.FormatError, zckpt.RankError), match="L001"):  # zckpt.open raises the same
        other.load_checkpoint(directory)
    with pytest.raises(zckpt.UnsupportedError, match="custom_load_fn"):
        other.load_checkpoint(directory, tag="ours", custom_load_fn=print)
    assert zckpt.detach(other) is other
    other.save_checkpoint(directory, tag="theirs")
    assert not (Path(directory) / "theirs" / "manifest.msgpack").exists()


def test_deepspeed_loads_its_own_folders_and_detach_undoes_attach(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(stock_folder_and_detach, 2, str(tmp_path / "run"))


def save_as_deepspeed_would(directory: str) -> None:
    root = Path(directory)
    engine = zckpt.attach(make_engine(config={"gradient_accumulation_steps": 2}))
    rank, validation = engine.global_rank, engine._config.checkpoint_config
    train(engine, 2)

    engine.save_checkpoint(directory, tag="epoch0/step1", client_state={"sampler": rank, "epoch": 0})
    assert (root / "latest").read_text() == "epoch0/step1\n"
    assert not (root / "epoch0" / "latest").exists()

    validation["tag_validation"] = ValidationMode.FAIL
    with pytest.raises(zckpt.TagError, match=r"'of-0' on rank 0.*'of-1' on rank 1") as caught:
        engine.save_checkpoint(directory, tag=f"of-{rank}")
    assert isinstance(caught.value, AssertionError)
    validation["tag_validation"] = ValidationMode.WARN
    with warns_on_rank_0(engine, "saved under rank 0's tag"):
        engine.save_checkpoint(directory, tag=f"of-{rank}", save_latest=False)
    validation["tag_validation"] = ValidationMode.IGNORE
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine.save_checkpoint(directory, tag=f"quiet-{rank}", save_latest=False)
    assert not list(root.glob("*-1"))
    for wrong in ("", None):
        with pytest.raises(ValueError, match="save_dir must"):
            engine.save_checkpoint(wrong)
    with pytest.raises(zckpt.RankError if rank == 0 else ValueError):
        engine.save_checkpoint("" if rank == 1 else directory)
    with pytest.raises(zckpt.RankError if rank == 1 else ValueError, match=r"directory called 'manifest\.msgpack'"):
        engine.save_checkpoint(directory, tag="manifest.msgpack")
    assert not (root / "manifest.msgpack").exists()

    engine.backward(engine(**batch(engine, 2)))
    with warns_on_rank_0(engine, r"does not hold gradients that no optimizer step has used yet \([^)]*\)$"):
        engine.save_checkpoint(directory, tag="between", save_latest=False)


def load_as_deepspeed_would(directory: str) -> None:
    """Loads what ``save_as_deepspeed_would`` has saved. Rank 1 finds neither ``latest`` nor a manifest, as on a network
    file system that still shows it an older state."""
    engine = zckpt.attach(make_engine(seed=1))
    rank, find = engine.global_rank, deepspeed_calls._find
    with mock.patch.object(deepspeed_calls, "_find", find if rank == 0 else lambda *arguments: (None, False)):
        path, client_state = engine.load_checkpoint(directory)
    assert path == os.path.join(directory, "epoch0/step1")
    assert client_state == {"sampler": rank, "epoch": 0}
    assert type(client_state) is dict

    engine._config.load_universal_checkpoint = True
    assert engine.load_checkpoint(directory)[0] == path
    (Path(directory) / "latest_universal").write_text("of-0")
    assert engine.load_checkpoint(directory)[0] == path
    with pytest.raises(ValueError, match="latest_universal"):
        engine.load_checkpoint(directory + "/epoch0")


def load_on_fewer_ranks(directory: str) -> None:
    engine = zckpt.attach(make_engine(seed=1))
    with pytest.warns(UserWarning, match="a client_state of its own"):
        assert engine.load_checkpoint(directory)[1] == {"sampler": 0, "epoch": 0}
    engine.load_checkpoint(directory, "between")
    latest = Path(directory, "latest")
    latest.rename(latest.with_name("newest"))
    latest.symlink_to("newest")
    with pytest.warns(UserWarning, match="a client_state of its own"):
        assert engine.load_checkpoint(directory)[0] == os.path.join(directory, "epoch0/step1")
    latest.unlink()
    latest.mkdir()
    engine._config.load_universal_checkpoint = True
    assert engine.load_checkpoint(directory)[0] == os.path.join(directory, "of-0")


def test_values_that_differ_by_rank_and_that_rank_0_decides(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_as_deepspeed_would, 2, str(tmp_path))
    cluster.run(load_as_deepspeed_would, 2, str(tmp_path))
    cluster.run(load_on_fewer_ranks, 1, str(tmp_path))


def save_over_deepspeeds_and_without_an_optimizer(directory: str) -> None:
    tag = Path(directory) / "best"
    engine = make_engine()
    engine.save_checkpoint(directory, tag="best")
    theirs = sorted(os.listdir(tag))
    zckpt.attach(engine)
    with pytest.raises(zckpt.CheckpointExistsError, match="DeepSpeed"):
        engine.save_checkpoint(directory, tag="best")
    assert sorted(os.listdir(tag)) == theirs
    zckpt.attach(zckpt.detach(engine), replace_deepspeed=True)
    engine.save_checkpoint(directory, tag="best")
    assert not set(theirs) & set(os.listdir(tag))

    train(engine, 1)
    engine.save_checkpoint(directory)
    evaluating = zckpt.attach(make_engine(optimizer="none", stage=0, seed=1))
    evaluating.load_checkpoint(directory)
    assert evaluating.global_steps == 1
    assert_same(weights(engine), weights(evaluating))
    evaluating.save_checkpoint(directory, "weights", exclude_frozen_parameters=True)
    other = zckpt.attach(make_engine(seed=2, scheduler=True))
    with pytest.raises(zckpt.MismatchError, match="optimizer: none") as caught:
        other.load_checkpoint(directory, "weights")
    for hint in (
        "load_module_only=True restores the weights alone",
        "load_optimizer_states=False restores the counters",
    ):
        assert hint in str(caught.value)
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        other.load_checkpoint(directory, "weights", **options)
        assert_same(weights(engine), weights(other))


def test_deepspeeds_files_are_replaced_on_request_and_an_engine_without_optimizer_is_saved(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.run(save_over_deepspeeds_and_without_an_optimizer, 1, str(tmp_path))


def save_and_load_from_the_hub(directory: str) -> None:
    engine, snapshot = zckpt.attach(make_engine()), ""
    train(engine, 2)
    engine.save_checkpoint(f"{directory}/run")
    if engine.global_rank == 0:
        snapshot = str(cached(Path(directory, "run"), Path(directory, "hub")))
    names = [snapshot]
    torch.distributed.broadcast_object_list(names)
    attached, restored = zckpt.attach(make_engine(seed=1)), make_engine(seed=2)
    assert attached.load_checkpoint(names[0])[0] == f"{names[0]}/global_step2"
    zckpt.restore(restored, names[0])
    for other in (attached, restored):
        assert_same(tensors_of(engine), tensors_of(other))
    assert train(engine, 1, 2) == train(attached, 1, 2) == train(restored, 1, 2)


def test_a_checkpoint_from_the_hub_is_loaded_from_its_cache(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load_from_the_hub, 2, str(tmp_path))


def save_without_frozen(directory: str) -> dict[str, torch.Tensor]:
    engine = zckpt.attach(make_engine(model="odd"))
    train(engine, 2)
    engine.save_checkpoint(directory, exclude_frozen_parameters=True)
    return weights(engine)


def load_without_frozen(directory: str) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = zckpt.attach(make_engine(model="odd", seed=1))
    before, errors = weights(engine), list[str]()
    for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        with pytest.raises(zckpt.MismatchError) as caught:
            engine.load_checkpoint(directory, **options)
        errors.append(str(caught.value))
        assert_same(before, weights(engine))
    engine.load_checkpoint(directory, load_module_strict=False)
    return errors, before, weights(engine)


def test_frozen_weights_can_be_left_out(cluster: Cluster, tmp_path: Path) -> None:
    saved = cluster.run(save_without_frozen, 2, str(tmp_path))[0]
    assert not [key for key in zckpt.open(tmp_path) if key.startswith("param/")]
    errors, before, after = cluster.run(load_without_frozen, 2, str(tmp_path))[0]
    assert all("missing: param/frozen.weight" in error for error in errors)
    assert all("  load_module_strict=False leaves out what does not fit" in error for error in errors)
    for name, tensor in after.items():
        source = before if name.startswith(("frozen.", "unused.")) else saved
        assert torch.equal(tensor, source[name]), name


def warm_start(path: str, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    engine = make_engine(model="gpt2", seed=1, stage=options.pop("stage", 3))
    zckpt.restore(engine, path, **options)
    after, computed = logical(engine, ()), weights(engine)
    for key, master in after.items():
        weight = computed[key.removeprefix("master/")]
        assert torch.equal(weight, master.to(weight.dtype)), key
    return after, engine.global_steps


def write_weights(path: str) -> dict[str, torch.Tensor]:
    engine = make_engine(model="gpt2")
    train(engine, 2)
    zckpt.write(engine, path)
    return logical(engine, ())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_warm_start_takes_the_weights_alone(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    saved = cluster.run(write_weights, 2, str(tmp_path / "c"))[0]
    for after, steps in cluster.run(warm_start, 3, str(tmp_path / "c"), parts="master", stage=stage):
        assert_same(after, saved)
        assert steps == 0


def test_a_part_that_the_checkpoint_lacks_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_weights, 2, str(tmp_path / "c"))
    for outcome in cluster.outcomes(warm_start, 2, str(tmp_path / "c"), parts=["mastre"]):
        assert "the checkpoint has no part mastre; it has master, exp_avg" in str(outcome.error)
