"""Cases in which DeepSpeed's own checkpoints lose state, are refused or lead to a crash.

Here the state is restored bit for bit, or every rank raises an error. bench/coverage.py runs the same cases with
DeepSpeed's own checkpoints. These tests have the cases:

    change of topology or configuration
        another world size, another stage                test_stages: test_other_stages_and_world_sizes_...
        weights alone, at another world size             test_weights_alone
        sub-groups, param groups, round robin            test_another_layout
        several param groups become one                  test_settings_that_cannot_both_be_kept
        a layer frozen or thawed                         test_frozen_layers
        what round robin reorders, read by name          test_stages: test_reordered_parameters_...
        offload: none, CPU, NVMe into each other         test_offload: test_any_mode_restores_into_any_other_...
    what a conversion would drop
        frozen weights, buffers, tied weights, settings  test_what_a_conversion_would_drop
        another compute dtype                            test_dtype_conversions
    NVMe offload
        resume; small param groups; pipelined; trained   test_offload: test_a_restored_run_goes_on_bit_for_bit
        everything smaller than what is swapped          test_a_model_too_small_for_nvme
        the same tag twice; weights for export           test_the_same_tag_twice_on_nvme
    exact resumption
        the next steps, C++ Adam and all                 test_zero3, test_stages, test_offload: ..._goes_on_bit_for_bit
        after offload_states()                           test_stages, test_offload: test_states_that_were_moved_away_...
    damage and malice
        a flipped bit, a file cut off, gone or swapped   test_damage_is_an_error_on_every_rank
        a pickle                                         test_nothing_is_executed
        a swap file that is gone                         test_offload: test_a_swap_file_that_is_gone_...
        a rank killed while it writes                    test_a_killed_write_harms_no_older_checkpoint
        every system call failing                        test_write_failures
    memory                                               test_memory, test_offload: test_a_swapped_state_...
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.memory import peak_growth
from tests.support.models import Deep, make_engine, train
from tests.support.offload import NVME, PARAM_DISK
from tests.support.runs import (
    ADAM,
    BEFORE,
    assert_same,
    fingerprint,
    fingerprints_of,
    inner,
    logical,
    restore_whole,
    settings,
    tensors_of,
    weights,
    write_whole,
)
from tests.support.states import same_all

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

matrix = pytest.mark.matrix


# Changes of topology and configuration


def write_all(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = zckpt.attach(make_engine(**setup))
    train(engine, BEFORE)
    engine.save_checkpoint(path)
    return {"weights": weights(engine), "next": train(engine, 1, BEFORE)}


def load_weights(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = zckpt.attach(make_engine(**setup, seed=1))
    engine.load_checkpoint(path, load_module_only=True)
    assert engine.global_steps == 0
    assert not inner(engine).state
    return {"weights": weights(engine), "next": train(engine, 1, BEFORE)}


@pytest.mark.parametrize(("stage", "ranks"), [(3, 2), (3, 1), pytest.param(2, 1, marks=matrix)])
def test_weights_alone(cluster: Cluster, tmp_path: Path, stage: int, ranks: int) -> None:
    setup = {"stage": stage, "model": "gpt2"}
    saved = cluster.run(write_all, 2, str(tmp_path), setup)
    for written, restored in zip(saved, cluster.run(load_weights, ranks, str(tmp_path), setup), strict=False):
        assert_same(written["weights"], restored["weights"])
        assert written["next"] == restored["next"]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sub-groups": ({"stage": 3}, {"stage": 3, "sub_group_size": 3000}),
    "param-groups-3": ({"stage": 3, "groups": False}, {"stage": 3, "groups": True}),
    "param-groups-2": ({"stage": 2, "groups": False}, {"stage": 2, "groups": True}),
    "round-robin": ({"stage": 2}, {"stage": 2, "round_robin_gradients": True}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_another_layout(cluster: Cluster, tmp_path: Path, case: str) -> None:
    """Compares the parameters, masters, moments, step and settings, as whole tensors and by name."""
    there, here = LAYOUTS[case]
    shape = {"model": "gpt2", "groups": True, "scheduler": True}
    path = str(tmp_path / "global_step3")
    saved = cluster.run(write_whole, 2, path, {**shape, **there}, ADAM)
    restore = restore_and_load if here.get("round_robin_gradients") else restore_whole
    for written, restored in zip(saved, cluster.run(restore, 2, path, {**shape, **here}, ADAM), strict=True):
        for kind in ("logical", "weights"):
            assert_same(written[kind], restored[kind])
        if restore is restore_whole:
            assert written["parameters"] == restored["parameters"]
            assert written["step"] == restored["step"]
            assert written["about"] == {
                **restored["about"],
                "lr": restored["about"]["lr"][: len(written["about"]["lr"])],
            }


def restore_and_load(path: str, setup: dict[str, Any], moments: tuple[str, ...]) -> dict[str, Any]:
    """Restores, writes the engine again, and loads its state from that checkpoint. DeepSpeed's functions cannot return
    it, because they read the wrong elements of a reordered group."""
    engine = make_engine(**setup, seed=1)
    zckpt.restore(engine, path)
    restored = weights(engine)
    zckpt.write(engine, f"{path}-again")
    loaded = zckpt.open(f"{path}-again").load([f"{part}/*" for part in ("master", *moments)])
    train(engine, 1, BEFORE)
    # If a parameter had the master of another one, the first step would change its weight by much more.
    moved = {name: (weight.float() - restored[name].float()).abs().max() for name, weight in weights(engine).items()}
    assert max(moved.values()) < 0.05
    return {"logical": loaded, "weights": restored}


def one_group_of_two(path: str) -> None:
    engine, other = make_engine(groups=True), make_engine(seed=1)
    train(engine, 1)
    zckpt.write(engine, path)
    before = tensors_of(other)
    with pytest.raises(zckpt.MismatchError, match=r"one param group .*lr, weight_decay"):
        zckpt.restore(other, path)
    assert_same(before, tensors_of(other))
    zckpt.restore(other, path, parts=["master"])
    assert_same(weights(engine), weights(other))


def test_settings_that_cannot_both_be_kept(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(one_group_of_two, 2, str(tmp_path / "c"))


# What a conversion would drop


def write_odd(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    return look(engine)


def restore_odd(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    zckpt.restore(engine, path)
    return look(engine)


def look(engine: Any) -> dict[str, Any]:
    groups = settings(engine)["groups"]
    return {"weights": weights(engine), "masters": logical(engine, ()), "groups": groups}


@pytest.mark.parametrize(
    ("there", "here", "ranks"),
    [(3, 3, 3), (2, 2, 1), pytest.param(2, 3, 1, marks=matrix), pytest.param(3, 2, 3, marks=matrix)],
)
def test_what_a_conversion_would_drop(cluster: Cluster, tmp_path: Path, there: int, here: int, ranks: int) -> None:
    path, shape = str(tmp_path / "c"), {"model": "odd", "groups": True}
    saved = cluster.run(write_odd, 2, path, {**shape, "stage": there})[0]
    for restored in cluster.run(restore_odd, ranks, path, {**shape, "stage": here}):
        assert_same(saved["weights"], restored["weights"])
        assert_same(saved["masters"], restored["masters"])
        assert saved["weights"]["batches"] == BEFORE
        assert [group["weight_decay"] for group in restored["groups"]] == [0.1, 0.0]
        assert restored["groups"] == saved["groups"]


# NVMe offload


def write_small(path: str, setup: dict[str, Any], swap: str) -> dict[str, Any]:
    engine = make_engine(**setup, swap=swap)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    return {"held": fingerprints_of(engine), "lr": engine.get_lr(), "next": train(engine, 2, BEFORE)}


def restore_small(path: str, setup: dict[str, Any], swap: str) -> dict[str, Any]:
    engine = make_engine(**setup, swap=swap, seed=1)
    zckpt.restore(engine, path)
    return {"held": fingerprints_of(engine), "lr": engine.get_lr(), "next": train(engine, 2, BEFORE)}


@pytest.mark.nvme
def test_a_model_too_small_for_nvme(cluster: Cluster, tmp_path: Path) -> None:
    path, setup = str(tmp_path / "c"), {"offload_optimizer": NVME, "scheduler": True, "groups": True}
    saved = cluster.run(write_small, 2, path, setup, str(tmp_path / "swap"))
    assert cluster.run(restore_small, 2, path, setup, str(tmp_path / "other")) == saved


WIDE: dict[str, Any] = {
    "model": "wide", "groups": True, "sub_group_size": 500000, "offload_optimizer": NVME, "offload_param": PARAM_DISK,
}  # fmt: skip


def save_twice(directory: str, swap: str) -> dict[str, Any]:
    engine = zckpt.attach(make_engine(**WIDE, swap=swap))
    for steps in (1, 1):
        train(engine, steps)
        engine.save_checkpoint(directory, tag="best")
    return fingerprints_of(engine)


@pytest.mark.nvme
def test_the_same_tag_twice_on_nvme(cluster: Cluster, tmp_path: Path) -> None:
    saved = cluster.run(save_twice, 2, str(tmp_path), str(tmp_path / "swap"))[0]
    checkpoint = zckpt.open(tmp_path)
    assert checkpoint.path.endswith("best")
    assert checkpoint.step == 2
    assert len(list((tmp_path / "best").glob("data-*"))) == 1

    exported = checkpoint.state_dict(dtype=torch.bfloat16)
    assert {f"param/{name}": fingerprint(tensor) for name, tensor in exported.items()} == {
        key: value for key, value in saved.items() if key.startswith("param/")
    }


# Damage and malice


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) * 2 // 3] ^= 4
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def swap_ranks(path: Path) -> None:
    other = Path(str(path).replace("rank-00001", "rank-00000"))
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


DAMAGES: dict[str, tuple[Any, str]] = {
    "flip": (flip, "rank-00001/host.master.safetensors"),
    "flip-swapped": (flip, "rank-00001/swap.exp_avg_sq.safetensors"),
    "flip-swapped-param": (flip, "rank-00000/swap.param.safetensors"),
    "flip-buffer": (flip, "rank-00000/buffer.safetensors"),
    "flip-state": (flip, "rank-00000/host.state.safetensors"),
    "flip-digests": (flip, "rank-00001/digests.bin"),
    "flip-index": (flip, "index.bin"),
    "flip-manifest": (flip, "../manifest.msgpack"),
    "cut": (cut, "rank-00001/swap.exp_avg.safetensors"),
    "cut-digests": (cut, "rank-00000/digests.bin"),
    "cut-index": (cut, "index.bin"),
    "gone": (Path.unlink, "rank-00001/host.exp_avg.safetensors"),
    "gone-rank": (shutil.rmtree, "rank-00001"),
    "swapped-file": (swap_ranks, "rank-00001/swap.master.safetensors"),
    "swapped-ranks": (swap_ranks, "rank-00001"),
}


def write_wide(path: str, swap: str) -> None:
    engine = make_engine(**WIDE, swap=swap)
    engine.module.register_buffer("mean", torch.randn(1025))
    train(engine, 2)
    zckpt.write(engine, path, client_state={"array": torch.arange(1000.0)})


def restore_each(paths: list[str], whole: str, swap: str) -> dict[str, Any]:
    """Restores each of ``paths`` into one engine, and at last the undamaged checkpoint ``whole``. Returns the type and
    the text of each error, and whether it left the engine unchanged."""
    engine = make_engine(**WIDE, swap=swap, seed=1)
    engine.module.register_buffer("mean", torch.randn(1025))
    train(engine, 1, 100)
    outcomes: dict[str, Any] = {}
    before = fingerprints_of(engine)
    for path in paths:
        try:
            zckpt.restore(engine, path, rng=True)
            outcomes[path] = ("", "", True)
        except zckpt.ZckptError as error:
            after = fingerprints_of(engine)
            outcomes[path] = (type(error).__name__, str(error), after == before)
            before = after
    zckpt.restore(engine, whole, rng=True)
    train(engine, 1, 2)
    return outcomes


@pytest.mark.nvme
def test_damage_is_an_error_on_every_rank(cluster: Cluster, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    cluster.run(write_wide, 2, str(whole), str(tmp_path / "swap"))
    for name, (damage, file) in DAMAGES.items():
        shutil.copytree(whole, tmp_path / name)
        (data,) = (tmp_path / name).glob("data-*")
        damage(data / file)
    paths = [str(tmp_path / name) for name in DAMAGES]
    ranks = cluster.run(restore_each, 2, paths, str(whole), str(tmp_path / "other"))
    for name, path in zip(DAMAGES, paths, strict=True):
        outcomes = [rank[path] for rank in ranks]
        assert all(error for error, _, _ in outcomes), name
        assert any(error not in ("", "RankError") for error, _, _ in outcomes), name
        for _, message, untouched in outcomes:
            # Only damage that is found while tensors are read may leave an engine restored in part. Then the message of
            # a rank says so.
            assert untouched or "restored in part" in outcomes[0][1] + outcomes[1][1], (name, message)
        if not name.startswith("flip"):
            assert all(untouched for _, _, untouched in outcomes) or name.startswith("swapped"), name


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def restore_bombs(paths: list[str]) -> list[str]:
    engine = make_engine(seed=1)
    errors = []
    for path in paths:
        with pytest.raises(zckpt.ZckptError) as caught:
            zckpt.restore(engine, path, rng=True)
        errors.append(type(caught.value).__name__)
    return errors


def test_nothing_is_executed(cluster: Cluster, tmp_path: Path) -> None:
    """Each file of a checkpoint in turn is replaced by a pickle. No restore unpickles it."""
    whole, marker = tmp_path / "whole", tmp_path / "executed"
    cluster.run(write_odd, 2, str(whole), {})
    files = [file.relative_to(whole) for file in whole.rglob("*") if file.is_file()]
    assert len(files) == 12
    bomb = pickle.dumps(Bomb(str(marker)))
    paths = []
    for number, file in enumerate(files):
        paths.append(str(tmp_path / str(number)))
        shutil.copytree(whole, paths[-1])
        size = (whole / file).stat().st_size
        (tmp_path / str(number) / file).write_bytes(bomb.ljust(size, b"\0")[:size])
    for errors in cluster.run(restore_bombs, 2, paths):
        assert len(errors) == len(files)
    assert not marker.exists()
    marker.mkdir()
    with pytest.raises(FileExistsError):  # unpickling it would have had an effect
        pickle.loads(bomb)


def write_and_die(directory: str, tag: str, victim: int, call: str, number: int) -> None:
    """Writes while the rank ``victim`` kills itself in call ``number`` of ``os.<call>``, counted from 0. If this call
    is a ``pwritev``, half of its first buffer is written before."""
    engine = make_engine()
    train(engine, 4)
    original, calls = getattr(os, call), iter(range(100))

    def die(*arguments: Any, **options: Any) -> Any:
        if next(calls) < number:
            return original(*arguments, **options)
        if call == "pwritev":
            fd, views, offset = arguments
            original(fd, [views[0][: len(views[0]) // 2]], offset)
        return os.kill(os.getpid(), signal.SIGKILL)

    if engine.global_rank == victim:
        mock.patch(f"os.{call}", die).start()
    zckpt.write(engine, f"{directory}/{tag}", overwrite=True)


DEATHS = {
    "rank 0, data": (0, "pwritev", 1),
    "rank 1, data": (1, "pwritev", 1),
    "rank 1, files to disk": (1, "fsync", 2),
    "rank 0, manifest": (0, "replace", 0),
}


@pytest.fixture(scope="module")
def old_run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("old")
    cluster.run(write_odd, 2, str(directory / "old"), {})
    return directory


@pytest.mark.parametrize(
    ("death", "tag"),
    [
        ("rank 1, data", "new"),
        ("rank 0, data", "old"),
        pytest.param("rank 0, data", "new", marks=matrix),
        pytest.param("rank 1, data", "old", marks=matrix),
        pytest.param("rank 1, files to disk", "old", marks=matrix),
        pytest.param("rank 0, manifest", "new", marks=matrix),
        ("rank 0, manifest", "old"),
    ],
)
def test_a_killed_write_harms_no_older_checkpoint(
    cluster: Cluster, tmp_path: Path, old_run: Path, death: str, tag: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(old_run, run)
    before = zckpt.open(run).load()
    outcomes = cluster.outcomes(write_and_die, 2, str(run), tag, *DEATHS[death], grace=1)
    assert outcomes[DEATHS[death][0]].signal == signal.SIGKILL
    assert all(outcome.failed for outcome in outcomes)
    assert (run / "latest").read_text() == "old\n"
    assert zckpt.validate(run).ok
    assert zckpt.open(run).step == BEFORE
    assert same_all(zckpt.open(run).load(), before)
    if tag == "new":
        # A rank 0 that has survived has removed the directory. Otherwise the write is unfinished.
        with pytest.raises(zckpt.CheckpointNotFoundError):
            zckpt.open(run / "new")
    cluster.run(restore_and_write_on, 2, str(run), tag)
    assert zckpt.open(run).step == BEFORE + 1
    assert zckpt.validate(run).ok


def restore_and_write_on(directory: str, tag: str) -> None:
    """Restores, and writes to the path of the killed write. Its remains must not prevent this."""
    engine = make_engine(seed=1)
    zckpt.restore(engine, directory)
    train(engine, 1, BEFORE)
    zckpt.write(engine, f"{directory}/{tag}", overwrite=True)


# Memory


def measure(path: str, stage: int) -> tuple[int, int, int]:
    from tests.support import models

    models.Wide = Deep  # type: ignore[misc,assignment]
    engine = make_engine(stage=stage, model="wide")
    train(engine, 1)
    written = peak_growth(lambda: zckpt.write(engine, path))
    restored = peak_growth(lambda: zckpt.restore(engine, path))
    return written, restored, 12 * 32 * 1024 * 1024


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=matrix), pytest.param(0, marks=matrix)])
def test_memory(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    """Neither a write nor a restore holds the state of a rank a second time."""
    for written, restored, total in cluster.run(measure, 2, str(tmp_path / "c"), stage):
        assert total == 384 * 2**20
        assert written < 64 * 2**20
        assert restored < 96 * 2**20
