"""zckpt.convert makes Universal Checkpoints, from which stock ``engine.load_checkpoint`` resumes with another division
of the model, another ZeRO stage and another number of ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.cluster import ClusterError
from tests.support.converting import plain
from tests.support.deepspeed_folders import refused
from tests.support.divided import Setup, write_trained
from tests.support.memory import peak_growth
from tests.support.models import make_engine, train
from tests.support.states import engine_state, write_state
from zckpt.errors import CheckpointExistsError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

TP, EP, PP = "tensor_parallel", "expert_parallel", "pipelines"
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
Runs = list[tuple[Setup, int]]
CASES: dict[str, tuple[str, Runs]] = {
    "tp2-1": (TP, [({"tp": 2, "stage": 1}, 4), ({"tp": 3, "stage": 3}, 3)]),
    "tp2-0": (TP, [({"tp": 2, "stage": 0}, 2), ({"tp": 2, "stage": 2}, 4), ({"tp": 1, "stage": 1}, 1)]),
    "tp2-3": (
        TP, [({"tp": 2, "stage": 3, "dtype": "bf16"}, 4), ({"tp": 3, "stage": 1, "dtype": "bf16", **FP32_SUMS}, 3)]
    ),
    "mpu-1": (
        TP, [({"way": "mpu", "tp": 2, "stage": 1}, 4), ({"way": "strided", "tp": 2, "stage": 2}, 4),
             ({"way": "mpu", "tp": 1, "stage": 3}, 2)]
    ),
    "mpu-patterns": (TP, [({"way": "patterns", "tp": 2, "stage": 1}, 2), ({"way": "mpu", "tp": 1, "stage": 2}, 2)]),
    "moe-1": (EP, [({"ep": 2, "stage": 1}, 4)]),
    "moe-2": (
        EP, [({"ep": 2, "stage": 2}, 2), ({"ep": 2, "stage": 1, "use_data_before_expert_parallelism": True}, 4)]
    ),
    "moe4-1": (EP, [({"ep": 4, "stage": 1}, 4)]),
    "auto-1": (EP, [({"ep": 2, "stage": 1, "auto": True}, 4), ({"ep": 4, "stage": 3, "auto": True}, 4)]),
    "auto-3": (EP, [({"ep": 4, "stage": 3, "auto": True}, 4), ({"ep": 2, "stage": 2, "auto": True}, 2)]),
    "auto-tp": (EP, [({"ep": 2, "stage": 2, "auto": True, "tp": 2}, 4), ({"ep": 4, "stage": 1, "auto": True}, 4)]),
    "pipe-1": (
        PP, [({"stages": 2, "zero": 1}, 4), ({"stages": 1, "zero": 1}, 2), ({"stages": 4, "zero": 1}, 4)]
    ),
    "pipe-0-bf16": (
        PP, [({"stages": 2, "zero": 0, "dtype": "bf16"}, 4), ({"stages": 1, "zero": 1, "dtype": "bf16"}, 2)]
    ),
    "pipe-moe": (PP, [({"stages": 2, "zero": 1, "ep": 2}, 4), ({"stages": 1, "zero": 1, "ep": 2}, 2)]),
    "pipe-3d": (
        PP, [({"stages": 2, "zero": 1, "tp": 2}, 8), ({"stages": 1, "zero": 1, "tp": 2}, 4),
             ({"stages": 1, "zero": 1, "tp": -1}, 2)]
    ),
}  # fmt: skip
"""For each case, the way of dividing, and the engines with their numbers of ranks. The first one writes the checkpoint.
DeepSpeed loads it into all of them that are of stages 1 to 3."""
EVERY_COMMIT = {"tp2-1", "moe-1"}
OTHER_STATE = {"tp2-0", "tp2-3", "auto-3", "auto-tp", "pipe-0-bf16"}
"""The cases in which DeepSpeed does not load the engine that writes, or in which it counts the steps of torch's Adam
several times: at stage 3, it gives all sub-groups the same tensor."""


def write(path: str, module: str, setup: Setup) -> list[float]:
    way: Any = import_module(f"tests.support.{module}")
    engine = way.make(**setup)
    way.train(engine, 3)
    zckpt.write(engine, path)
    losses: list[float] = way.train(engine, 2)
    return losses


def load(folder: str, there: str, module: str, setup: Setup) -> list[float]:
    """Lets DeepSpeed load the folder, writes what the engine has then, and returns the losses of two steps. The engine
    begins with the seed of the run, because DeepSpeed does not load frozen weights."""
    way: Any = import_module(f"tests.support.{module}")
    engine = way.make(**setup, checkpoint={"load_universal": True})
    assert engine.load_checkpoint(folder)[0] is not None
    zckpt.write(engine, there, latest=False)
    losses: list[float] = way.train(engine, 2)
    return losses


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in EVERY_COMMIT else pytest.mark.matrix) for case in CASES]
)
def test_stock_deepspeed_loads_it_into_every_division(cluster: Cluster, tmp_path: Path, case: str) -> None:
    module, setups = CASES[case]
    path, folder = str(tmp_path / "run" / "written"), str(tmp_path / "universal")
    losses = cluster.run(write, setups[0][1], path, module, setups[0][0])
    converted = zckpt.convert(path, folder, to="universal")
    assert (tmp_path / "universal" / "latest_universal").read_text() == "global_step3"
    written = zckpt.open(path)
    tensors = written.load()
    lost = any(key.startswith(("param/", "buffer/")) for key in tensors)
    assert any("neither frozen weights nor buffers" in line for line in converted.missing) == lost
    for number, (setup, ranks) in enumerate(setups):
        if case in OTHER_STATE and number == 0:
            continue
        there = str(tmp_path / str(number))
        resumed = cluster.run(load, ranks, folder, there, module, setup)
        loaded = zckpt.open(there)
        again = loaded.load()
        assert again.keys() == tensors.keys()
        assert [key for key in tensors if not torch.equal(again[key], tensors[key])] == [], setup
        if number == 0:
            assert resumed == losses
            states = [plain(ck.state)["engine"] for ck in (written, loaded)]
            for state in states:
                del state["counters"]["micro_steps"]  # DeepSpeed does not restore it
            assert states[0] == states[1]


@pytest.mark.matrix
def test_deepspeed_refuses_experts_of_another_number_of_ranks(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_trained, 2, EP, str(tmp_path / "written"), {"ep": 2, "stage": 1})
    zckpt.convert(tmp_path / "written", tmp_path / "universal", to="universal")
    for ep in (1, 4):
        with pytest.raises(ClusterError, match="AssertionError"):
            cluster.run(load, 4, str(tmp_path / "universal"), str(tmp_path / "none"), EP, {"ep": ep, "stage": 1})


ODD: Setup = {"model": "odd", "optimizer": "torch_adamw", "groups": True}
PLAIN: dict[str, tuple[Setup, Setup]] = {
    "1-to-3": ({**ODD, "stage": 1, "scheduler": True}, {"stage": 3}),
    "3-to-3": ({**ODD, "stage": 3}, {}),
    "3-to-bf16-optimizer": ({**ODD, "stage": 3}, {"stage": 1, "config": FP32_SUMS}),
    "0-fp32-to-2": ({**ODD, "stage": 0, "dtype": "fp32"}, {"stage": 2}),
    "2-fp16-to-1": ({**ODD, "stage": 2, "dtype": "fp16", "scheduler": True}, {"stage": 1}),
    "adam-2-to-3": ({"model": "odd", "stage": 2, "optimizer": "adamw"}, {"stage": 3}),
    "round-robin-to-2": ({**ODD, "stage": 2, "round_robin_gradients": True}, {"round_robin_gradients": False}),
    "lion": ({"model": "odd", "stage": 2, "optimizer": "lion", "offload_optimizer": {"device": "cpu"}}, {"stage": 1}),
    "adagrad": ({"model": "odd", "stage": 2, "optimizer": "adagrad", "offload_optimizer": {"device": "cpu"}}, {}),
    "sgd": ({"model": "odd", "stage": 1, "optimizer": "sgd"}, {"stage": 2}),
}  # fmt: skip
"""The engine that writes, and what is different in the one into which DeepSpeed loads."""


def write_plain(path: str, setup: Setup) -> None:
    engine = make_engine(**setup)
    train(engine, 3)
    zckpt.write(engine, path)


def load_plain(folder: str, there: str, setup: Setup) -> None:
    config = {**setup.get("config", {}), "checkpoint": {"load_universal": True}}
    engine = make_engine(**{**setup, "config": config}, seed=1)
    assert engine.load_checkpoint(folder)[0] is not None
    zckpt.write(engine, there, latest=False)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "1-to-3" else pytest.mark.matrix) for case in PLAIN]
)
def test_another_stage_loads_it_with_all_settings(cluster: Cluster, tmp_path: Path, case: str) -> None:
    setup, other = PLAIN[case]
    path, folder, there = (str(tmp_path / name) for name in ("run/written", "universal", "loaded"))
    cluster.run(write_plain, 2, path, setup)
    zckpt.convert(path, folder, to="universal")
    cluster.run(load_plain, 3, folder, there, {**setup, **other})
    written, loaded = zckpt.open(path), zckpt.open(there)
    of_optimizer = [f"{part}/*" for part in written.parts if part not in ("param", "buffer")]
    tensors, again = (ck.load(of_optimizer) for ck in (written, loaded))
    assert tensors.keys() == again.keys()
    assert [key for key in tensors if not torch.equal(tensors[key], again[key])] == []
    trees = [plain(ck.state)["engine"] for ck in (written, loaded)]
    for name in ("scheduler", "scaler") if setup.get("dtype") == "fp16" else ("scheduler",):
        assert trees[0][name] == trees[1][name]
    for tree in trees:
        del tree["counters"]["micro_steps"]
        states = [(state["moments"], state["values"]) for state in tree["optimizer"]["states"]]
        tree["values"] = [values for number, values in enumerate(states) if values not in states[:number]]
        for group in tree["optimizer"]["param_groups"]:
            group["params"].sort()  # at stage 2, they may be in another order
    assert trees[0]["counters"] == trees[1]["counters"]
    assert trees[0]["values"] == trees[1]["values"]
    assert trees[0]["optimizer"]["param_groups"] == trees[1]["optimizer"]["param_groups"]


def write_run(path: Path, shapes: dict[str, tuple[int, ...]], **changes: Any) -> dict[str, torch.Tensor]:
    """Writes a checkpoint like that of a run with ZeRO-3 in bf16, without an engine. ``changes``: other entries of the
    first param group. Returns the tensors by key."""
    state = engine_state([*shapes])
    state["optimizer"]["param_groups"][0] |= changes
    return write_state(path, 2, shapes, engine_state=state, client_state={"epoch": 2}).full


def test_the_files(tmp_path: Path) -> None:
    full = write_run(tmp_path / "run" / "global_step5", {"a": (3, 5), "b.weight": (7,)})
    out = tmp_path / "out" / "here"
    assert zckpt.convert(tmp_path / "run", tmp_path / "out", to="universal", tag="here").path == str(out)
    models = [
        torch.load(out / f"{prefix}mp_rank_00_model_states.pt", weights_only=False)
        for prefix in ("", "zero_pp_rank_0_")
    ]
    assert [(model["epoch"], model["global_steps"], model["module"]) for model in models] == [(2, 5, {})] * 2
    for name in ("a", "b.weight"):
        for key, part in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            saved = torch.load(out / "zero" / name / f"{key}.pt")
            assert saved.keys() == {"param"}
            assert torch.equal(saved["param"], full[f"{part}/{name}"])
    with pytest.raises(CheckpointExistsError):
        zckpt.convert(tmp_path / "run", tmp_path / "out", to="universal", tag="here")
    before = sorted(tmp_path.rglob("*"))
    zckpt.convert(tmp_path / "run", tmp_path / "out", to="universal", tag="here", overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    for source in (out, out.parent):
        refused(source, UnsupportedError, "(?s)was made by zckpt.*give the checkpoint .*; or load it into an engine")
    with pytest.raises(ValueError, match=r"stage .*to='universal'"):
        zckpt.convert(tmp_path / "run", tmp_path / "other", to="universal", stage=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("..", {}, "a parameter of the name"),
        ("a/b", {}, "a parameter of the name"),
        ("a", {"use_muon": True}, "does not load the momentum of Muon"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    write_run(tmp_path / "run" / "global_step5", {name: (3,)}, **changes)
    with pytest.raises(UnsupportedError, match=message):
        zckpt.convert(tmp_path / "run", tmp_path / "out", to="universal")
    assert not (tmp_path / "out").exists()


def test_memory_is_bounded_by_the_budget(tmp_path: Path) -> None:
    budget = zckpt.Budget(nbytes=16 << 20)
    for name, numel in (("small", 1000), ("large", 24 << 20)):  # 96 MiB in each of three parts
        write_run(tmp_path / name / "global_step5", {"a": (numel,)})
    zckpt.convert(tmp_path / "small", tmp_path / "warm", to="universal", budget=budget)
    grown = peak_growth(lambda: zckpt.convert(tmp_path / "large", tmp_path / "out", to="universal", budget=budget))
    assert grown < budget.nbytes + (8 << 20)
