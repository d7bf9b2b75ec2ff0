"""Parameters that were trained at the save and are frozen at the restore, or the reverse, as in fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import zckpt
from tests.support.models import make_engine, train
from tests.support.offload import PARAM_DISK
from tests.support.runs import ADAM, BEFORE, assert_same, inner, link_all, settings, weights

if TYPE_CHECKING:
    from pathlib import Path

    import deepspeed

    from tests.support.cluster import Cluster

GPT2: dict[str, Any] = {"model": "gpt2", "groups": True, "scheduler": True}
WIDE: dict[str, Any] = {"groups": True, "scheduler": True, "sub_group_size": 10**9}
NVME: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}, "offload_param": PARAM_DISK}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "0-fp32-torch": {"stage": 0, "dtype": "fp32", "optimizer": "torch_adamw"},
    "1-bf16-optimizer": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "2": {"stage": 2},
    "2-cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3},
    "3-sub-groups": {"stage": 3, "sub_group_size": 1000},
    "3-cpu": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
EVERY_COMMIT = {("0-fp32", 2, 0), ("2", 3, 0), ("3", 3, 2), ("3-sub-groups", 2, 2)}
CASES = [
    pytest.param(mode, ranks, trained, marks=() if (mode, ranks, trained) in EVERY_COMMIT else pytest.mark.matrix)
    for mode in MODES
    for ranks in (2, 3)
    for trained in (0, 2)
]


def make(setup: dict[str, Any], swap: str, frozen: bool, seed: int = 0) -> deepspeed.DeepSpeedEngine:
    """Makes an engine. If ``frozen`` is set, the first parameters of gpt2 or the last layer of Wide are frozen."""
    if setup["model"] == "gpt2":
        return make_engine(**{**setup, "frozen": frozen}, swap=swap, seed=seed)
    return make_engine(**{**setup, "model": "wide" if frozen else "thawed"}, swap=swap, seed=seed)


def look(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    """Returns the whole states, the weights and the settings of the engine, without zckpt. Moments that DeepSpeed has
    not made yet are absent."""
    states: dict[str, torch.Tensor] = {}
    optimizer = inner(engine)
    if engine.zero_optimization_stage() == 0:
        groups = getattr(engine.optimizer, "fp16_groups", [group["params"] for group in optimizer.param_groups])
        for parameters, group in zip(groups, optimizer.param_groups, strict=True):
            whole = (len(group["params"]) == 1 and parameters) or None
            for index, master in enumerate(group["params"]):
                for part in ("master", *ADAM):
                    tensor = master if part == "master" else optimizer.state.get(master, {}).get(part)
                    owners = whole or [parameters[index]]
                    if tensor is not None:
                        pieces = tensor.detach().reshape(-1).split([p.numel() for p in owners])
                        states |= {
                            f"{part}/{engine.param_names[p]}": piece.reshape(p.shape).clone()
                            for p, piece in zip(owners, pieces, strict=True)
                        }
    else:
        if engine.zero_optimization_stage() < 3:
            link_all(engine)
        for name, p in engine.module.named_parameters():
            if p.requires_grad:
                states[f"master/{name}"] = safe_get_full_fp32_param(p).clone()
                for part in ADAM:
                    if has_state(engine, p):
                        states[f"{part}/{name}"] = safe_get_full_optimizer_state(p, part).clone()
    steps = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    return {"states": states, "weights": weights(engine), "settings": settings(engine), "steps": steps}


def has_state(engine: deepspeed.DeepSpeedEngine, parameter: torch.Tensor) -> bool:
    zero = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        return True
    (index,) = (i for i, group in enumerate(zero.fp16_groups) if any(p is parameter for p in group))
    return bool(zero.optimizer.state.get(zero.fp32_partitioned_groups_flat[index]))


def write(path: str, setup: dict[str, Any], swap: str, frozen: bool) -> dict[str, Any]:
    engine = make(setup, swap, frozen)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    values = look(engine)
    assert zckpt.validate(path).ok
    return {**values, "loss": train(engine, 1, BEFORE)}


def restore(path: str, setup: dict[str, Any], swap: str, frozen: bool, trained: int) -> dict[str, Any]:
    engine = make(setup, swap, frozen, seed=1)
    train(engine, trained, 100)
    before = look(engine) if trained else {}
    try:
        zckpt.restore(engine, path)
        refused = ""
    except (zckpt.MismatchError, zckpt.RankError) as error:
        refused = str(error)
    if trained:
        after = look(engine)
        assert_same(before["states"], after["states"])
        assert_same(before["weights"], after["weights"])
    zckpt.restore(engine, path, strict=False)
    restored = look(engine)
    zckpt.write(engine, f"{path}-again")
    return {**restored, "refused": refused, "loss": train(engine, 2, BEFORE)}


def assert_converted(
    there: list[dict[str, Any]], here: list[dict[str, Any]], thawed: bool, trained: int, alone: bool = False
) -> None:
    """Compares the saved engines with the restored ones. ``alone`` says that some of the thawed parameters share their
    step count with no other parameter."""
    for saved, restored in zip(there, here, strict=False):
        assert_same(saved["weights"], restored["weights"])
        states = restored["states"]
        assert {key for key in states if key.startswith("master/")} != {
            key for key in saved["states"] if key.startswith("master/")
        }
        for key, tensor in states.items():
            name = key.partition("/")[2]
            if key in saved["states"]:
                assert torch.equal(tensor, saved["states"][key]), key
            elif key.startswith("master/"):
                assert torch.equal(tensor, saved["weights"][name].float()), key
            else:
                assert not tensor.any(), key
        new = [key for key in states if key not in saved["states"]]
        gone = [key for key in saved["states"] if key not in states]
        assert bool(new) == thawed
        assert bool(gone) != thawed
        if not alone:
            assert len(states) == 3 * sum(key.startswith("master/") for key in states)
        assert restored["settings"]["groups"] == saved["settings"]["groups"]
        for name in ("global_steps", "skipped_steps", "scheduler", "lr"):
            assert restored["settings"][name] == saved["settings"][name]
        assert restored["steps"] == {max(saved["steps"])} | ({0} if alone and trained and thawed else set())
        assert restored["loss"][0] == pytest.approx(saved["loss"][0], abs=0)
        assert all(map(torch.isfinite, torch.tensor(restored["loss"])))


@pytest.mark.parametrize("thawed", [False, True], ids=["frozen", "thawed"])
@pytest.mark.parametrize(("mode", "ranks", "trained"), CASES)
def test_a_changed_role_is_refused_or_converted(
    cluster: Cluster, tmp_path: Path, mode: str, ranks: int, trained: int, thawed: bool
) -> None:
    path, setup = str(tmp_path / "checkpoint"), {**GPT2, **MODES[mode]}
    there = cluster.run(write, 2, path, setup, "", thawed)
    here = cluster.run(restore, ranks, path, setup, "", not thawed, trained)
    assert_converted(there, here, thawed, trained, mode in ("0-fp32-torch", "3-sub-groups"))
    name = "transformer.wte.weight"
    line = f"{name} is {'trained' if thawed else 'frozen'} in the engine"
    for rank in here:
        assert line in rank["refused"] or "rank" in rank["refused"]
    refused = "\n".join(rank["refused"] for rank in here)
    for expected in (line, "strict=False", *([] if thawed else [f"unexpected: exp_avg/{name}"])):
        assert expected in refused
    assert f"unexpected: master/{name}" not in refused


@pytest.mark.nvme
@pytest.mark.parametrize("thawed", [False, True], ids=["frozen", "thawed"])
@pytest.mark.parametrize("trained", [0, pytest.param(1, marks=pytest.mark.matrix)], ids=["fresh", "trained"])
def test_a_changed_role_on_nvme(cluster: Cluster, tmp_path: Path, trained: int, thawed: bool) -> None:
    path, setup = str(tmp_path / "checkpoint"), {"model": "wide", **WIDE, **NVME}
    there = cluster.run(write, 2, path, setup, str(tmp_path / "swap"), thawed)
    here = cluster.run(restore, 2, path, setup, str(tmp_path / "other"), not thawed, trained)
    assert_converted(there, here, thawed, trained)
