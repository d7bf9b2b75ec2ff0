"""For every optimizer that DeepSpeed runs on the CPU, a restored run goes on as if it had never stopped.

test_stages.py and test_offload.py have DeepSpeed's and torch's AdamW, and SGD without offload.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import AFTER, assert_at_rest, assert_same, everything, inner, plain
from zckpt.adapters.deepspeed import cpu_adam
from zckpt.adapters.flats import FlatBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.support.cluster import Cluster

CPU, NVME = {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": {"device": "nvme"}}
WIDE: dict[str, Any] = {"model": "wide", "sub_group_size": 500000}
MODES: dict[str, dict[str, Any]] = {
    "0": {"model": "mlp", "stage": 0},
    "1": {"model": "odd", "stage": 1},
    "1-cpu": {"model": "odd", "stage": 1, **CPU},
    "2": {"model": "odd", "stage": 2},
    "2-cpu": {"model": "odd", "stage": 2, **CPU},
    "3": {"model": "odd", "stage": 3, "sub_group_size": 1000},
    "3-cpu": {"model": "odd", "stage": 3, "sub_group_size": 1000, **CPU},
    "3-nvme": {**WIDE, "stage": 3, **NVME},
}
MUON: dict[str, Any] = {"optimizer": "muon", "reduce_scatter": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in ("lion", "adagrad", "sgd", "factored")},
    # The flat buffers of "mlp" have no padding. Adafactor takes the norm of a whole flat buffer, and DeepSpeed never
    # initializes the padding at stage 3.
    "adafactor": {"optimizer": "adafactor", "model": "mlp"},
    "muon": MUON,
}
FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
IN_MEMORY = {"save_muon_momentum_buffer_in_memory": True}


def runs_in_deepspeed(optimizer: str, mode: str, groups: bool) -> bool:
    offloaded = "offload_optimizer" in MODES[mode]
    if optimizer == "lion" and not offloaded:  # without offload, DeepSpeed has Lion only for CUDA
        return False
    if mode == "3-nvme" and not groups:  # DeepSpeed itself is wrong; see tests/support/offload.py
        return False
    if mode == "3-nvme" and optimizer == "adafactor":  # without padding, no tensor is large enough for NVMe
        return False
    # From stage 1 on, DeepSpeed replaces torch's Adagrad by a new one with one param group. It fails if there were two.
    return not (optimizer == "adagrad" and groups and mode in ("1", "2", "3"))


def combinations() -> dict[str, dict[str, Any]]:
    setups = {}
    for optimizer, mode, dtype in itertools.product(OPTIMIZERS, MODES, ("bf16", "fp32", "fp16")):
        for groups in (False, True):
            if runs_in_deepspeed(optimizer, mode, groups):
                name = "-".join((optimizer, mode, dtype)) + ("-groups" if groups else "")
                setups[name] = {**MODES[mode], **OPTIMIZERS[optimizer], "dtype": dtype, "groups": groups}
    return setups


CASES: dict[str, dict[str, Any]] = {
    **combinations(),
    # At the step after step 13, the running products in Muon's Adam differ from the powers in the last bit.
    "muon-0-13": {**MODES["0"], **MUON, "steps": 13},
    "muon-1-13": {**MODES["1"], **MUON, "steps": 13},
    "muon-3-cpu-13": {**MODES["3-cpu"], **MUON, "steps": 13},
    "muon-1-bf16-optimizer": {**MODES["1"], **MUON, **FP32_GRADIENTS},
    "muon-1-one-behind": {**MODES["1"], **MUON, "model": "uneven"},
    "muon-2-round-robin": {**MODES["2"], **MUON, "model": "gpt2", "round_robin_gradients": True, "groups": True},
    "muon-3-nvme-in-memory": {**MODES["3-nvme"], **MUON, **IN_MEMORY},
}
EVERY_COMMIT = {
    "lion-3-nvme-bf16-groups",
    "adagrad-2-cpu-fp32-groups",
    "muon-1-one-behind",
    "factored-0-fp32",
    "factored-2-bf16-groups",
    "adafactor-0-bf16",
}


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(c, marks=[] if c in EVERY_COMMIT else [pytest.mark.matrix]) for c in cases]


def go(path: str, setup: dict[str, Any], swap: str, trained: int | None = None, steps: int = 3) -> dict[str, Any]:
    """Trains and writes or, with ``trained``, restores into an engine that has trained so many steps. Then trains
    on."""
    engine = make_engine(**setup, swap=swap, seed=int(trained is not None))
    if trained is None:
        train(engine, steps)
        before = everything(engine)
        zckpt.write(engine, path)
        assert everything(engine) == before
    else:
        train(engine, trained, 100)
        zckpt.restore(engine, path, rng=True)
        before = everything(engine)
    if setup["stage"] == 3:
        assert_at_rest(engine)
    return {"before": before, "losses": train(engine, AFTER, steps), "after": everything(engine)}


@pytest.mark.parametrize("case", marked(CASES))
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, case: str) -> None:
    setup, path = dict(CASES[case]), str(tmp_path / "checkpoint")
    steps = setup.pop("steps", 3)
    through = cluster.run(go, 2, path, setup, str(tmp_path / "swap"), steps=steps)
    for trained in (0, 2):
        resumed = cluster.run(go, 2, path, setup, str(tmp_path / f"swap{trained}"), trained, steps)
        assert resumed == through
    report = zckpt.validate(path)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "case",
    marked(
        ["adafactor-0-fp32", "sgd-1-fp16", "muon-1-one-behind", "factored-2-bf16-groups", "lion-3-nvme-bf16-groups"]
    ),
)
def test_a_run_is_restored_to_before_its_first_step(cluster: Cluster, tmp_path: Path, case: str) -> None:
    """The optimizer has no state then, but it has one in the engine that gets the checkpoint."""
    path = str(tmp_path / "checkpoint")
    through = cluster.run(go, 2, path, CASES[case], str(tmp_path / "swap"), steps=0)
    resumed = cluster.run(go, 2, path, CASES[case], str(tmp_path / "other"), 2, 0)
    for expected, result in zip(through, resumed, strict=True):
        assert (result["losses"], result["after"]) == (expected["losses"], expected["after"])


def write_trained(path: str, setup: dict[str, Any], steps: int = 3) -> None:
    engine = make_engine(**setup)
    train(engine, steps)
    zckpt.write(engine, path)


def restore_and_write(path: str, again: str, setup: dict[str, Any], trained: int) -> None:
    engine = make_engine(**setup, seed=1)
    train(engine, trained, 100)
    zckpt.restore(engine, path)
    zckpt.write(engine, again)
    assert all(math.isfinite(loss) for loss in train(engine, 2))


def optimizer_states(checkpoint: zckpt.Checkpoint) -> dict[str, Any]:
    """Returns the values that the tree of the optimizer has for each parameter, by name. FusedAdam keeps the step count
    of a param group in one state only, if it can."""
    tree = checkpoint.state["engine"]["optimizer"]
    return {name: entry["values"] for entry in tree["states"] for name in entry["params"]}


CROSS = {
    "lion": ("lion", "bf16", "1-cpu", 2, "3-cpu", 3),
    "lion-back": ("lion", "fp16", "3-cpu", 2, "2-cpu", 1),
    "adagrad": ("adagrad", "bf16", "2-cpu", 2, "3-cpu", 3),
    "adagrad-torch": ("adagrad", "fp32", "0", 2, "1", 3),
    "adagrad-torch-back": ("adagrad", "fp32", "3", 3, "0", 2),
    "sgd": ("sgd", "bf16", "3-cpu", 2, "1", 3),
    "sgd-back": ("sgd", "fp32", "2-cpu", 3, "0", 2),
    "muon": ("muon", "bf16", "1", 2, "3", 3),
    "muon-back": ("muon", "bf16", "3", 3, "2", 2),
    "muon-from-0": ("muon", "fp32", "0", 2, "2", 3),
    "muon-to-0": ("muon", "fp32", "2", 3, "0", 2),
    "muon-to-cpu": ("muon", "fp32", "1", 3, "1-cpu", 2),
    "muon-other-size": ("muon", "fp16", "2", 3, "2", 2),
}
EVERY_COMMIT |= {"lion", "muon", "muon-from-0"}


@pytest.mark.parametrize("case", marked(CROSS))
def test_other_stages_and_world_sizes_restore_the_same_state(cluster: Cluster, tmp_path: Path, case: str) -> None:
    optimizer, dtype, there, written, here, restored = CROSS[case]
    shape = {"model": "mlp", "dtype": dtype, "groups": not case.startswith("adagrad-torch"), **OPTIMIZERS[optimizer]}
    path, again = str(tmp_path / "checkpoint"), str(tmp_path / "again")
    cluster.run(write_trained, written, path, {**MODES[there], **shape})
    for trained in (0, 2):
        cluster.run(restore_and_write, restored, path, f"{again}{trained}", {**MODES[here], **shape}, trained)
        before, after = zckpt.open(path), zckpt.open(f"{again}{trained}")
        assert_same(before.load(), after.load())
        for name, values in optimizer_states(before).items():
            if here != "0" and there != "0":
                assert plain(list(values.items())) == plain(list(optimizer_states(after)[name].items()))


@pytest.mark.parametrize("mode", ["1", "2", "1-cpu"])
def test_muon_s_momentum_is_written_under_its_own_name(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """The momentum is the same as at stage 3 after the same training. DeepSpeed's own functions return it at stage
    3."""
    shape = {**MUON, "dtype": "fp32", "model": "gpt2"}
    cluster.run(write_trained, 2, str(tmp_path / "3"), {**MODES["3"], **shape}, 1)
    cluster.run(write_trained, 2, str(tmp_path / "other"), {**MODES[mode], **shape}, 1)
    stage_3, other_stage = (zckpt.open(tmp_path / name).load("momentum_buffer/*") for name in ("3", "other"))
    assert stage_3.keys() == other_stage.keys() != set()
    for key, tensor in stage_3.items():
        torch.testing.assert_close(other_stage[key], tensor, rtol=1e-3, atol=1e-7)


def refuse_another_partitioning(path: str, setup: dict[str, Any], trained: int) -> list[str]:
    engine = make_engine(**setup, seed=1)
    train(engine, trained, 100)
    before = everything(engine)
    with pytest.raises(zckpt.MismatchError) as refused:
        zckpt.restore(engine, path)
    assert everything(engine) == before
    zckpt.restore(engine, path, parts=["master"])
    after = everything(engine)
    assert {key for key in before if "master" in key and before[key] != after[key]}
    return str(refused.value).splitlines()


BOUND_ELSEWHERE = {
    "2-to-3": ("2", 2, "3", 2, {}),
    "0-to-1": ("0", 2, "1", 2, {}),
    "1-to-0": ("1", 2, "0", 2, {}),
    "2-to-three-ranks": ("2", 2, "2", 3, {}),
    "3-to-other-sub-groups": ("3", 2, "3", 2, {"sub_group_size": 10**9}),
}
EVERY_COMMIT |= {"2-to-3", "0-to-1"}


@pytest.mark.parametrize("case", marked(BOUND_ELSEWHERE))
def test_state_that_fits_only_one_partitioning_is_refused_in_another(
    cluster: Cluster, tmp_path: Path, case: str
) -> None:
    there, written, here, restored, changed = BOUND_ELSEWHERE[case]
    shape = {"model": "mlp", "dtype": "fp32", "optimizer": "factored"}
    cluster.run(write_trained, written, str(tmp_path), {**MODES[there], **shape})
    setup = {**MODES[here], **shape, **changed}
    first, *others = cluster.run(refuse_another_partitioning, restored, str(tmp_path), setup, len(case) % 2)
    assert "columns, rows, sizes of Factored cannot be cut anew" in first[1]
    assert 'parts=["master"] restores the weights alone' in first[-1]
    assert all("rank 0 lists all that differs" in message[0] for message in others)


def restore_elsewhere_and_go_on(path: str, setup: dict[str, Any], seed: int) -> Any:
    engine = make_engine(**setup, seed=seed)
    zckpt.restore(engine, path)
    return [plain(list(state.items())) for state in inner(engine).state.values()], train(engine, 2)


@pytest.mark.parametrize(("there", "here", "ranks"), [("0", "0", 3), ("1", "2", 2)])
def test_state_is_restored_where_the_partitioning_is_the_same(
    cluster: Cluster, tmp_path: Path, there: str, here: str, ranks: int
) -> None:
    shape = {"model": "mlp", "dtype": "fp32", "optimizer": "factored", "groups": True}
    cluster.run(write_trained, 2, str(tmp_path), {**MODES[there], **shape})
    outcomes = [
        cluster.run(restore_elsewhere_and_go_on, ranks, str(tmp_path), {**MODES[mode], **shape}, seed)
        for seed, mode in enumerate((there, here))
    ]
    assert outcomes[0] == outcomes[1]
    assert "sizes" in str(outcomes[0][0][0])


def keep_odd_things(path: str) -> None:
    for stage, where in ((0, r"engine\.optimizer\.states\[0\]"), (2, r"rank_state\[0\]\.optimizer\[0\]")):
        engine = make_engine(stage=stage, dtype="fp32", optimizer="factored")
        train(engine, 2)
        zckpt.write(engine, f"{path}/{stage}-trained")
        state = next(iter(inner(engine).state.values()))
        state["more"] = [1, 2]
        with pytest.raises(zckpt.MismatchError, match=r"missing: optimizer state more of layers"):
            zckpt.restore(engine, f"{path}/{stage}-trained")
        del state["more"]
        state["seen"] = {1, 2}
        with pytest.raises(zckpt.StateError, match=rf"^{where}\.values\.seen: set"):
            zckpt.write(engine, f"{path}/{stage}-set")
    checkpoint = zckpt.open(f"{path}/2-trained")
    (lazy,), (eager,) = (checkpoint.rank_state(0, lazy=lazy)["optimizer"] for lazy in (True, False))
    assert plain(lazy["values"]["rows"]()) == plain(eager["values"]["rows"]) == plain(state["rows"])


def test_what_an_optimizer_keeps_is_named_where_it_cannot_be_kept(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(keep_odd_things, 1, str(tmp_path))


def refuse_to_keep_one_of_two(path: str) -> None:
    engine = make_engine(stage=2)
    train(engine, 1)
    inner(engine).param_groups[0]["d"] = 0.5 + torch.distributed.get_rank()
    with pytest.raises(zckpt.StateError, match=r"param_groups\[0\]\.d .*0\.5 on rank 0.*1\.5 on rank 1"):
        zckpt.write(engine, path)


def test_scalars_that_differ_from_rank_to_rank_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refuse_to_keep_one_of_two, 2, str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.sim
@pytest.mark.parametrize(("device", "called"), [("cpu", True), ("sim", False)])
def test_only_flats_in_host_memory_have_hidden_state(device: str, called: bool) -> None:
    """On a device, FusedAdam is another kernel, which fails if it is given tensors in host memory."""
    calls = []
    fused: Any = type("FusedAdam", (), {"__module__": "deepspeed.ops.adam.fused_adam", "adam_w_mode": 1, "state": {}})()
    fused.multi_tensor_adam = lambda *arguments: calls.append(arguments)
    cpu_adam.replay(fused, [FlatBuffer(0, (), torch.zeros(3, device=device))], betas_vary=True)
    assert bool(calls) == called
