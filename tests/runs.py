"""What the tests of real engines have in common: runs that write or restore, and what an engine then holds."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import zckpt
from models import make_engine, train
from zckpt.engines import adapt

BEFORE, AFTER = 3, 3


def held(engine: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    """Everything that this rank's engine holds, 16-bit weights and all, by key and span, as the adapter sees it."""
    adapter = adapt(engine)
    everything = [*adapter.inventory(None).fragments, *adapter.inventory(["param"]).fragments]
    return {(f.key, f.start, f.stop): f.data.clone() for f in everything}


def inner(engine: Any) -> torch.optim.Optimizer:
    """The optimizer inside whatever DeepSpeed has wrapped around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def raw(engine: Any) -> dict[Any, torch.Tensor]:
    """The same as it lies in the engine, replicas, gathered weights and padding and all."""
    tensors: dict[Any, torch.Tensor] = {("param", name): p for name, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 3:  # whose padding is never initialised
        return {key: tensor.detach().clone() for key, tensor in tensors.items()}
    for g, group in enumerate(inner(engine).param_groups):
        for i, master in enumerate(group["params"]):
            tensors["master", g, i] = master
            for key, value in inner(engine).state.get(master, {}).items():
                tensors[key, g, i] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def settings(engine: Any) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner(engine).param_groups]
    scheduler = engine.lr_scheduler and engine.lr_scheduler.state_dict()
    counters = {
        name: getattr(engine, name) for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    }
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    scale = vars(scaler) if engine.fp16_enabled() else {}  # in bf16 it only counts
    scale = {name: value for name, value in scale.items() if isinstance(value, (int, float))}
    return {"groups": groups, "scheduler": scheduler, "lr": engine.get_lr(), "scale": scale, **counters}


def logical(engine: Any, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The whole tensors by key, without zckpt: by DeepSpeed's public functions, at stage 0 from the optimizer itself.

    ``keys``: the optimizer's state tensors. What has no master is left to ``weights``.
    """
    found: dict[str, torch.Tensor] = {}
    if engine.zero_optimization_stage() == 0:
        optimizer = engine.optimizer
        groups = getattr(optimizer, "fp16_groups", [group["params"] for group in inner(engine).param_groups])
        for parameters, group in zip(groups, inner(engine).param_groups, strict=True):
            for part in ("master", *keys):
                states = [m if part == "master" else inner(engine).state.get(m, {}).get(part) for m in group["params"]]
                flat = torch.cat([state.detach().reshape(-1) for state in states if state is not None])
                trained = [p for p in parameters if p.requires_grad and p.numel()]
                for p, value in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
                    found[f"{part}/{engine.param_names[p]}"] = value.reshape(p.shape).clone()
        return found
    for name, p in engine.module.named_parameters():
        if p.requires_grad and getattr(p, "ds_numel", p.numel()):
            found[f"master/{name}"] = safe_get_full_fp32_param(p).clone()
            for key in keys:
                found[f"{key}/{name}"] = safe_get_full_optimizer_state(p, key).clone()
    return found


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The whole parameters and persistent buffers in the dtype that the model computes with, on this rank."""
    found = {name: b.clone() for name, b in engine.module.named_buffers() if name in engine.module.state_dict()}
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        else:
            found[name] = p.detach().clone()
    return found


def write_and_go_on(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    before = held(engine), raw(engine), settings(engine)
    written = zckpt.write(engine, path, client_state={"note": "made by a test", "where": torch.arange(3)})
    assert all(torch.equal(value, before[0][key]) for key, value in held(engine).items())
    losses = train(engine, AFTER, BEFORE)
    after = held(engine), raw(engine), settings(engine)
    return {"path": written, "before": before, "losses": losses, "after": after}


def restore_and_go_on(path: str, setup: dict[str, Any], trained: int) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    if trained:
        train(engine, trained, 100)
    client_state = zckpt.restore(engine, path, rng=True)
    before = held(engine), raw(engine), settings(engine)
    losses = train(engine, AFTER, BEFORE)
    after = held(engine), raw(engine), settings(engine)
    return {"client": client_state, "before": before, "losses": losses, "after": after}


def assert_same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [key for key in one if not (one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]))]
    assert not differ


def assert_goes_on_alike(through: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """What every rank returned of an uninterrupted run and of a restored one is equal bit for bit."""
    for one, other in zip(through, resumed, strict=True):
        for when in ("before", "after"):
            assert_same(one[when][0], other[when][0])
            assert_same(one[when][1], other[when][1])
            assert one[when][2] == other[when][2]
        assert one["losses"] == other["losses"]
        assert other["client"]["note"] == "made by a test"
        assert torch.equal(other["client"]["where"], torch.arange(3))
