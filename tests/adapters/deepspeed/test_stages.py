"""At ZeRO stages 0, 1 and 2, a restored run goes on as if it had never stopped. Each stage restores the checkpoints of
all other stages."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import batch, make_engine, train
from tests.support.runs import (
    ADAM,
    AFTER,
    BEFORE,
    assert_goes_on_alike,
    assert_same,
    link_all,
    logical,
    raw,
    restore_and_go_on,
    restore_whole,
    tensors_of,
    write_and_go_on,
    write_whole,
)
from zckpt.adapters import replicas
from zckpt.engines.group import rank_group_of
from zckpt.geometry import all_of
from zckpt.plan.replicas import Share

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tests.support.cluster import Cluster

FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
CPU = {"offload_optimizer": {"device": "cpu"}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "0-fp16": {"stage": 0, "dtype": "fp16"},
    "1": {"stage": 1},
    "1-fp32": {"stage": 1, "dtype": "fp32"},
    "1-fp16": {"stage": 1, "dtype": "fp16"},
    "1-bf16-optimizer": {"stage": 1, **FP32_GRADIENTS},
    "1-cpu": {"stage": 1, **CPU},
    "2": {"stage": 2},
    "2-fp32": {"stage": 2, "dtype": "fp32"},
    "2-fp16-cpu": {"stage": 2, "dtype": "fp16", **CPU},
    "2-cpu": {"stage": 2, **CPU},
    "2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "2-cpu-round-robin": {"stage": 2, "round_robin_gradients": True, **CPU},
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": True, "scheduler": True},
    "odd": {"model": "odd", "groups": True},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True},
}
OPTIMIZERS = ("adamw", "torch_adamw", "sgd")
EVERY_COMMIT = {
    ("0", "odd", "adamw"),
    ("0-fp32", "odd", "adamw"),
    ("0-fp16", "odd", "torch_adamw"),
    ("1-fp16", "groups", "adamw"),
    ("1", "odd", "adamw"),
    ("1-bf16-optimizer", "odd", "adamw"),
    ("1-bf16-optimizer", "frozen-gpt2", "sgd"),
    ("1-cpu", "frozen-gpt2", "adamw"),
    ("2", "frozen-gpt2", "adamw"),
    ("2-fp32", "odd", "torch_adamw"),
    ("2-cpu", "odd", "torch_adamw"),
    ("2-cpu-round-robin", "frozen-gpt2", "adamw"),
}


def cases(every: list[tuple[Any, ...]], on_every_commit: Collection[tuple[Any, ...]]) -> list[Any]:
    """Returns each case twice: with a fresh engine, and with one that has trained. Of a case in ``on_every_commit``,
    one of the two runs on every commit, in turns."""
    turns = itertools.cycle((0, 2))
    params = []
    for case in every:
        chosen = next(turns) if case in on_every_commit else None
        for trained in (0, 2):
            marks = () if trained == chosen else pytest.mark.matrix
            name = "-".join(map(str, case)) + ("-trained" if trained else "-fresh")
            params.append(pytest.param(*case, trained, id=name, marks=marks))
    return params


@pytest.mark.parametrize(
    ("mode", "shape", "optimizer", "trained"), cases(list(itertools.product(MODES, SHAPES, OPTIMIZERS)), EVERY_COMMIT)
)
def test_a_restored_run_goes_on_bit_for_bit(
    cluster: Cluster, tmp_path: Path, mode: str, shape: str, optimizer: str, trained: int
) -> None:
    setup = {**MODES[mode], **SHAPES[shape], "optimizer": optimizer}
    path = str(tmp_path / "run" / "global_step3")
    through = cluster.run(write_and_go_on, 2, path, setup)
    resumed = cluster.run(restore_and_go_on, 2, path, setup, trained)
    assert_goes_on_alike(through, resumed)
    report = zckpt.validate(path)
    assert report.ok, str(report)


MODES["3"] = {"stage": 3}
MODES["3-fp32"] = {"stage": 3, "dtype": "fp32", "sub_group_size": 1000}
MOMENTUM = ("momentum_buffer",)
CROSS = [
    ("1", "2", 2, 2, "adamw"),
    ("2", "1-bf16-optimizer", 2, 1, "adamw"),
    ("2", "3", 2, 3, "adamw"),
    ("3", "2-cpu", 2, 3, "adamw"),
    ("0", "3", 2, 1, "adamw"),
    ("3-fp32", "0-fp32", 2, 3, "adamw"),
    ("0-fp32", "1-fp32", 3, 2, "sgd"),
    ("2-fp32", "0-fp32", 2, 1, "torch_adamw"),
]
MORE = [
    ("2-cpu", "0", 2, 2, "adamw"),
    ("0-fp32", "3-fp32", 2, 3, "adamw"),
    ("1-bf16-optimizer", "2-cpu", 2, 3, "adamw"),
    ("3", "0", 2, 3, "adamw"),
    ("3", "1", 3, 2, "torch_adamw"),
    ("0", "1", 3, 2, "torch_adamw"),
    ("0-fp32", "2-fp32", 2, 2, "adamw"),
    ("0-fp32", "0-fp32", 2, 3, "adamw"),
]
FOUR_RANKS = [
    ("3", "3", 2, 4, "adamw"),
    ("2", "2", 2, 4, "adamw"),
    ("3", "2", 4, 2, "adamw"),
    ("1-bf16-optimizer", "3", 2, 4, "torch_adamw"),
    ("0", "2-cpu", 2, 4, "adamw"),
]


@pytest.mark.parametrize(
    ("there", "here", "written", "restored", "optimizer", "trained"), cases([*CROSS, *MORE, *FOUR_RANKS], CROSS)
)
def test_other_stages_and_world_sizes_restore_the_same_state(
    cluster: Cluster, tmp_path: Path, there: str, here: str, written: int, restored: int, optimizer: str, trained: int
) -> None:
    shape = {"model": "gpt2", "groups": True, "frozen": True, "scheduler": True, "optimizer": optimizer}
    parts = MOMENTUM if optimizer == "sgd" else ADAM
    path = str(tmp_path / "global_step3")
    before = cluster.run(write_whole, written, path, {**MODES[there], **shape}, parts)
    after = cluster.run(restore_whole, restored, path, {**MODES[here], **shape}, parts, trained)
    for rank in after:
        assert_same(before[0]["logical"], rank["logical"])
        assert_same(before[0]["weights"], rank["weights"])
        assert before[0]["parameters"] == rank["parameters"]
        assert before[0]["step"] == rank["step"]
        expected = before[0]["about"]
        if written != restored:  # With another world size, a step has another number of samples.
            expected = {**expected, "global_samples": rank["about"]["global_samples"]}
        assert expected == rank["about"]
        assert torch.isfinite(torch.tensor(rank["loss"]))
    stored = after[0]["stored"]
    assert stored <= sum(rank["read"] for rank in after) <= 1.2 * stored


def reordered_and_not(path: str) -> None:
    """Compares a run with round_robin_gradients with the same run without it. No other source can be trusted, because
    DeepSpeed's own functions read the wrong elements of such a run."""
    shape: dict[str, Any] = {"stage": 2, "model": "gpt2", "groups": True}
    reordered, plain = make_engine(**shape, round_robin_gradients=True), make_engine(**shape)
    train(reordered, BEFORE)
    zckpt.write(reordered, path)
    train(plain, BEFORE)
    checkpoint = zckpt.open(path)
    zckpt.restore(plain, path)
    after_restore = logical(plain, ADAM)
    other = make_engine(**shape)
    train(other, BEFORE)
    link_all(other)
    truth = logical(other, ADAM)
    assert_same(truth, after_restore)
    assert_same(truth, checkpoint.load(list(truth)))


def test_reordered_parameters_are_written_under_their_own_names(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(reordered_and_not, 2, str(tmp_path / "global_step3"))


def write_half_accumulated(path: str, setup: dict[str, Any]) -> str:
    engine = make_engine(**setup)
    train(engine, 1)
    loss = engine(**batch(engine, 1))
    engine.backward(getattr(loss, "loss", loss))
    with pytest.raises(zckpt.UnsupportedError) as refused:
        zckpt.write(engine, path)
    engine.step()
    zckpt.write(engine, path)
    return str(refused.value)


@pytest.mark.parametrize("mode", ["0", "0-fp32", "1", "1-bf16-optimizer", "2-cpu"])
def test_gradients_that_no_step_has_used_are_refused(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    for message in cluster.run(write_half_accumulated, 2, str(tmp_path / "global_step2"), MODES[mode]):
        assert "the engine holds gradients that no optimizer step has used yet" in message
        assert "at a gradient accumulation boundary, right after the engine.step() that ends it, or pass" in message
        assert "supported: ZeRO stages" not in message


def drop_gradients(directory: str, setups: list[dict[str, Any]]) -> None:
    for n, setup in enumerate(setups):
        config = {**setup.get("config", {}), "gradient_accumulation_steps": 2}
        drop_gradients_of(make_engine(**{**setup, "config": config}), f"{directory}/{n}")
    drop_the_gradient_of_an_idle_layer(f"{directory}/idle")


def drop_the_gradient_of_an_idle_layer(path: str) -> None:
    """Checks that a restore drops the last gradient of a layer that is no longer used. ZeRO-3 would go on to use it."""
    engine = make_engine(stage=3)
    train(engine, 1)
    zckpt.write(engine, path)
    before = tensors_of(engine)
    train(engine, 1)
    zckpt.restore(engine, path)
    engine.module.layers[2].forward = lambda x: x
    train(engine, 1)
    for place, now in tensors_of(engine).items():
        if place[0] == "exp_avg/layers.2.weight":
            torch.testing.assert_close(now, 0.9 * before[place])


def drop_gradients_of(engine: Any, path: str) -> None:
    train(engine, 2)
    zckpt.write(engine, path)
    before, losses, one_step = tensors_of(engine), train(engine, 2, 2), tensors_of(engine)
    losses, two_steps = losses + train(engine, 2, 4), tensors_of(engine)
    for pending in ("inside a step", "before a step"):
        zckpt.restore(engine, path)
        train(engine, 1, 2)
        if pending == "before a step":
            engine.backward(engine(**batch(engine, 3)))
        with pytest.raises(zckpt.UnsupportedError, match="gradients that no optimizer step"):
            zckpt.write(engine, f"{path} {pending}")
        zckpt.write(engine, f"{path} {pending}", pending_gradients="drop")
        assert_same(tensors_of(engine), before)
        if pending == "before a step":
            engine.step()
        else:
            train(engine, 1, 3)
        assert_same(tensors_of(engine), one_step)
        train(engine, 1, 100)
        zckpt.restore(engine, f"{path} {pending}")
        assert engine.micro_steps == 2
        assert_same(tensors_of(engine), before)
        assert train(engine, 4, 2) == losses
        assert_same(tensors_of(engine), two_steps)
        train(engine, 1, 100)


def test_gradients_that_no_step_has_used_are_dropped_if_told_so(cluster: Cluster, tmp_path: Path) -> None:
    """A write leaves the gradients in the engine. A restore drops all that the engine has accumulated."""
    modes = [MODES[mode] for mode in ("0", "0-fp32", "1", "1-bf16-optimizer", "1-cpu", "2", "2-cpu")]
    cluster.run(drop_gradients, 2, str(tmp_path), [*modes, {"stage": 3}, {"stage": 3, **CPU}])


def gather_shares(room: int) -> None:
    """Gathers shares in a buffer of ``room`` bytes: too few for an element, too few for a tensor, or enough for all."""
    replicas.GATHER_BYTES = room
    group = rank_group_of(None)
    sizes = [(), (1,), (5, 7), (2,), (0, 3), (64,), (3, 3)]
    dtypes = [torch.bfloat16, torch.float32, torch.int64]
    whole = [torch.arange(n, n + torch.Size(size).numel()).reshape(size) for n, size in enumerate(sizes)]
    whole = [tensor.to(dtypes[n % 3]) for n, tensor in enumerate(whole)]
    mine = [torch.full_like(tensor, -1) for tensor in whole]
    for tensor, value in zip(mine, whole, strict=True):
        _, start, stop = Share(group.rank, group.size).of(all_of(tensor.shape))
        tensor.view(-1)[start:stop] = value.view(-1)[start:stop]
    replicas.gathering(mine, group)()
    assert all(map(torch.equal, mine, whole))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("room", [3, 50, 1 << 20])
def test_shares_make_every_replica_whole(cluster: Cluster, ranks: int, room: int) -> None:
    cluster.run(gather_shares, ranks, room)


def move_and_go_on(path: str, setup: dict[str, Any], trained: int | None) -> dict[str, Any]:
    """Does what write_and_go_on does or, with ``trained``, restore_and_go_on, while the states are moved away."""
    engine = make_engine(**setup, seed=int(trained is not None))
    train(engine, BEFORE if trained is None else trained, 0 if trained is None else 100)
    engine.offload_states(pin_memory=False)
    moved = set(engine.optimizer.offloaded_states)
    if trained is None:
        zckpt.write(engine, path)
    else:
        zckpt.restore(engine, path)
    assert moved == set(engine.optimizer.offloaded_states)
    engine.reload_states()
    return {"before": raw(engine), "losses": train(engine, AFTER, BEFORE), "after": raw(engine)}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_states_that_were_moved_away_stay_there(cluster: Cluster, tmp_path: Path, stage: int, trained: int) -> None:
    setup = {"stage": stage, **SHAPES["frozen-gpt2"]}
    path = str(tmp_path / "global_step3")
    through = cluster.run(move_and_go_on, 2, path, setup, None)
    resumed = cluster.run(move_and_go_on, 2, path, setup, trained)
    for written, restored in zip(through, resumed, strict=True):
        for when in ("before", "after"):
            leftover = [key for key in (*written[when], *restored[when]) if str(key[0]).endswith("_offload_buffer")]
            assert_same(*({k: v for k, v in run[when].items() if k not in leftover} for run in (written, restored)))
        assert written["losses"] == restored["losses"]
