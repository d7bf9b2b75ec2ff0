"""What the tests of real engines have in common: runs that write or restore, and what an engine then holds."""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import zckpt
from tests.support.models import make_engine, train
from zckpt.api import restore as pipeline
from zckpt.engines import adapt

BEFORE, AFTER = 3, 3
ADAM = ("exp_avg", "exp_avg_sq")
"""The states of AdamW."""


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


def fingerprint(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(raw).hexdigest()}"


def told(engine: Any) -> dict[str, str]:
    """Every whole tensor by key at stage 3, as DeepSpeed's public functions tell. Collective."""
    zero, moments = engine.optimizer, {}
    for parameters, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        state = zero.optimizer.state.get(flat, {})
        found = [key for key, value in state.items() if is_moment(key, value, parameters)]
        moments.update({parameter.ds_id: found for parameter in parameters})
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter.ds_numel:
            found[f"master/{name}"] = fingerprint(safe_get_full_fp32_param(parameter))
            for key in moments[parameter.ds_id]:
                found[f"{key}/{name}"] = fingerprint(safe_get_full_optimizer_state(parameter, key))
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"param/{name}"] = fingerprint(parameter)
    for name, buffer in engine.module.named_buffers():
        found[f"buffer/{name}"] = fingerprint(buffer)
    return found


def is_moment(key: str, value: Any, parameters: list[Any]) -> bool:
    """Of a flat at stage 3; what lies in a file has no elements. offload_states() leaves its buffers behind."""
    numel = sum(parameter.partition_numel() for parameter in parameters)
    alike = isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() in (0, numel)
    return alike and not key.endswith("_offload_buffer")


def everything(engine: Any) -> dict[str, Any]:
    """All that an engine of any stage holds, as far as it is initialised, to be compared. Collective."""
    zero, found = engine.optimizer, {"settings": settings(engine)}
    if engine.zero_optimization_stage() < 3:
        buffers = {("buffer", name): buffer for name, buffer in engine.module.named_buffers()}
        tensors = {**raw(engine), **buffers}
        for key in [key for key in tensors if key[0] == "master"]:
            tensors[key] = tensors[key][: filled(engine, key[1])]
        return {**found, **{key: plain(value) for key, value in tensors.items()}}
    for n, (parameters, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        for key, value in zero.optimizer.state.get(flat, {}).items():
            if not is_moment(key, value, parameters):
                found[f"{key} of {n}"] = plain(value)
    return {**found, **told(engine)}


def filled(engine: Any, group: int) -> int | None:
    """Where padding begins in this rank's flat at stages 1 and 2. Lion moves it along, but nobody reads it."""
    groups = getattr(engine.optimizer, "bit16_groups", None) or getattr(engine.optimizer, "bf16_groups", None)
    if groups is None:
        return None
    flat = inner(engine).param_groups[group]["params"][0].numel()
    return max(sum(parameter.numel() for parameter in groups[group]) - engine.global_rank * flat, 0)


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return fingerprint(value) if isinstance(value, torch.Tensor) else repr(value)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The whole parameters and persistent buffers in the dtype that the model computes with, on this rank."""
    found = {name: b.clone() for name, b in engine.module.named_buffers() if name in engine.module.state_dict()}
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_id"):
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


def assert_at_rest(engine: Any) -> None:
    """No swap buffer is in use."""
    swapper = engine.optimizer.optimizer_swapper
    if swapper is not None:
        assert len(swapper.swap_buffer_manager.free_buffer_index) == swapper.swap_buffer_manager.count
        assert not any(getattr(swapper, "swap_ops", {}).values())
    for parameter in engine.module.parameters():
        if getattr(parameter, "nvme_swapper", None) is not None:
            assert parameter.nvme_swapper.pending_writes == parameter.nvme_swapper.pending_reads == 0


def write_whole(path: str, setup: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """Trains, writes, and returns what the engine held, whole, and what its parameters were set to, by name."""
    engine = make_engine(**setup)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    if engine.zero_optimization_stage() in (1, 2):
        link_all(engine)
    return whole(engine, parts)


def link_all(engine: Any) -> None:
    """After its first step, DeepSpeed finds the optimizer's state of the first param group alone."""
    engine.optimizer._link_all_hp_params()
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()


def restore_whole(path: str, setup: dict[str, Any], parts: tuple[str, ...], trained: int = 0) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    train(engine, trained, 100)
    opened = []
    original = pipeline.open_checkpoint
    pipeline.open_checkpoint = lambda *args: opened.append(original(*args)) or opened[0]  # type: ignore[func-returns-value]
    zckpt.restore(engine, path, verify=False)  # a digest covers a whole block, which here is most of a file
    restored = whole(engine, parts)
    (loss,) = train(engine, 1, BEFORE)
    return {
        **restored,
        "read": opened[0].io.data_bytes,
        "stored": sum(info.nbytes for info in opened[0].values()),
        "loss": loss,
    }


def whole(engine: Any, parts: tuple[str, ...]) -> dict[str, Any]:
    parameters = {
        engine.param_names[p]: {key: value for key, value in group.items() if key not in ("params", "step", "amsgrad")}
        for group, group_parameters in zip(inner(engine).param_groups, grouped(engine), strict=True)
        for p in group_parameters
    }
    # FusedAdam at stage 0 has 0 in all states but one.
    steps = {int(state["step"]) for state in inner(engine).state.values() if "step" in state}
    about = {name: value for name, value in settings(engine).items() if name not in ("groups", "scale")}
    return {
        "logical": logical(engine, parts), "weights": weights(engine), "parameters": parameters, "about": about,
        "step": max(steps, default=None),
    }  # fmt: skip


def grouped(engine: Any) -> list[list[Any]]:
    """The trained parameters of each param group."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        groups: list[list[Any]] = [[] for _ in inner(engine).param_groups]
        for sub_group, parameters in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[sub_group]] += parameters
        return groups
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [[p for p in group["params"] if p.numel()] for group in optimizer.param_groups]
