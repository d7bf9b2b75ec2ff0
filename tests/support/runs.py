"""Functions that the tests of real engines share: runs that write or restore, and the state of an engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import zckpt
from tests.support.fragments import data_of
from tests.support.models import make_engine, train
from tests.support.slow_writes import held, slow
from zckpt.checkpoint.listing.find import find_and_open
from zckpt.engines import adapt

if TYPE_CHECKING:
    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.storage.contract import Store

BEFORE, AFTER = 3, 3
ADAM = ("exp_avg", "exp_avg_sq")
"""The names of the state tensors of AdamW."""
SNAPSHOTS: dict[str, dict[str, Any]] = {
    "copy": {},
    "little-memory": {"snapshot_bytes": 0},
    "lazy": {"snapshot": "lazy"},
}
"""Options of writes in the background."""


def tensors_of(engine: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    """Returns copies of all tensors of this rank's engine, with the 16-bit weights, as the adapter sees them.

    They are by key and by the first element and the end of the fragment.
    """
    adapter = adapt(engine)
    everything = [*adapter.inventory(None).fragments, *adapter.inventory(["param"]).fragments]
    return {(f.key, *f.span[1:]): data_of(f).reshape(-1).clone() for f in everything}


def inner(engine: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that DeepSpeed has wrapped."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def raw(engine: Any) -> dict[Any, torch.Tensor]:
    """Returns copies of the same tensors as they are in the engine, with replicas, gathered weights and padding."""
    tensors: dict[Any, torch.Tensor] = {("param", name): p for name, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 3:  # the padding is never initialised there
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
    scale = vars(scaler) if engine.fp16_enabled() else {}  # in bf16 the scaler only counts steps
    scale = {name: value for name, value in scale.items() if isinstance(value, (int, float))}
    return {"groups": groups, "scheduler": scheduler, "lr": engine.get_lr(), "scale": scale, **counters}


def logical(engine: Any, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Returns the whole masters and states by key, without zckpt.

    They come from DeepSpeed's public functions, and at stage 0 from the optimizer itself. ``keys`` are the names of the
    optimizer's state tensors. ``weights`` returns the tensors that have no master.
    """
    tensors: dict[str, torch.Tensor] = {}
    if engine.zero_optimization_stage() == 0:
        optimizer = engine.optimizer
        groups = getattr(optimizer, "fp16_groups", [group["params"] for group in inner(engine).param_groups])
        for parameters, group in zip(groups, inner(engine).param_groups, strict=True):
            for part in ("master", *keys):
                states = [m if part == "master" else inner(engine).state.get(m, {}).get(part) for m in group["params"]]
                flat = torch.cat([state.detach().reshape(-1) for state in states if state is not None])
                trained = [p for p in parameters if p.requires_grad and p.numel()]
                for p, value in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
                    tensors[f"{part}/{engine.param_names[p]}"] = value.reshape(p.shape).clone()
        return tensors
    for name, p in engine.module.named_parameters():
        if p.requires_grad and getattr(p, "ds_numel", p.numel()):
            tensors[f"master/{name}"] = safe_get_full_fp32_param(p).clone()
            for key in keys:
                tensors[f"{key}/{name}"] = safe_get_full_optimizer_state(p, key).clone()
    return tensors


def fingerprint(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(raw).hexdigest()}"


def fingerprints_of(engine: Any) -> dict[str, str]:
    """Returns the fingerprint of every whole tensor by key at stage 3, from DeepSpeed's public functions. Every rank
    calls it.
    """
    zero, moments = engine.optimizer, {}
    for parameters, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        state = zero.optimizer.state.get(flat, {})
        keys = [key for key, value in state.items() if is_moment(key, value, parameters)]
        moments.update({parameter.ds_id: keys for parameter in parameters})
    fingerprints: dict[str, str] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter.ds_numel:
            fingerprints[f"master/{name}"] = fingerprint(safe_get_full_fp32_param(parameter))
            for key in moments[parameter.ds_id]:
                fingerprints[f"{key}/{name}"] = fingerprint(safe_get_full_optimizer_state(parameter, key))
        with deepspeed.zero.GatheredParameters([parameter]):
            fingerprints[f"param/{name}"] = fingerprint(parameter)
    for name, buffer in engine.module.named_buffers():
        fingerprints[f"buffer/{name}"] = fingerprint(buffer)
    return fingerprints


def is_moment(key: str, value: Any, parameters: list[Any]) -> bool:
    """Returns whether the state ``key`` of a flat buffer at stage 3 is a moment.

    A moment that is in a swap file has no elements. ``offload_states`` leaves buffers behind, which are no moments.
    """
    numel = sum(parameter.partition_numel() for parameter in parameters)
    is_flat = isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() in (0, numel)
    return is_flat and not key.endswith("_offload_buffer")


def everything(engine: Any) -> dict[str, Any]:
    """Returns all initialised state of an engine of any stage, in a form that can be compared. Every rank calls it."""
    zero, state = engine.optimizer, {"settings": settings(engine)}
    if engine.zero_optimization_stage() < 3:
        buffers = {("buffer", name): buffer for name, buffer in engine.module.named_buffers()}
        tensors = {**raw(engine), **buffers}
        for key in [key for key in tensors if key[0] == "master"]:
            tensors[key] = tensors[key][: filled(engine, key[1])]
        return {**state, **{key: plain(value) for key, value in tensors.items()}}
    for n, (parameters, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        for key, value in zero.optimizer.state.get(flat, {}).items():
            if not is_moment(key, value, parameters):
                state[f"{key} of {n}"] = plain(value)
    return {**state, **fingerprints_of(engine)}


def filled(engine: Any, group: int) -> int | None:
    """Returns the number of elements before the padding of this rank's flat buffer at stages 1 and 2.

    Lion changes the padding, but no code reads it.
    """
    groups = getattr(engine.optimizer, "bit16_groups", None) or getattr(engine.optimizer, "bf16_groups", None)
    if groups is None:
        return None
    flat = inner(engine).param_groups[group]["params"][0].numel()
    return max(sum(parameter.numel() for parameter in groups[group]) - engine.global_rank * flat, 0)


def plain(value: Any) -> Any:
    """Returns the value with fingerprints in the place of tensors and text in the place of other objects."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return fingerprint(value) if isinstance(value, torch.Tensor) else repr(value)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Returns the whole parameters and persistent buffers in the dtype that the model computes with, on this rank."""
    tensors = {name: b.clone() for name, b in engine.module.named_buffers() if name in engine.module.state_dict()}
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_id"):
            with deepspeed.zero.GatheredParameters([p]):
                tensors[name] = p.detach().clone()
        else:
            tensors[name] = p.detach().clone()
    return tensors


def write_and_go_on(path: str, setup: dict[str, Any], **options: Any) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    before = tensors_of(engine), raw(engine), settings(engine)
    client_state = {"note": "made by a test", "where": torch.arange(3)}
    written = zckpt.write(engine, path, client_state=client_state, **options)
    assert all(torch.equal(value, before[0][key]) for key, value in tensors_of(engine).items())
    losses = train(engine, AFTER, BEFORE)
    after = tensors_of(engine), raw(engine), settings(engine)
    return {"path": written, "before": before, "losses": losses, "after": after}


def write_in_background_and_go_on(path: str, setup: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    before = tensors_of(engine), raw(engine), settings(engine)
    where = torch.arange(3)
    with slow(0.2), held() as go_on:
        pending = zckpt.write(
            engine, path, client_state={"note": "made by a test", "where": where}, background=True, **options
        )
        where.zero_()
        losses = train(engine, AFTER, BEFORE)
        after = tensors_of(engine), raw(engine), settings(engine)
        assert not Path(path, "manifest.msgpack").exists()
        go_on()
        assert pending.wait() == pending.path == path
    assert pending.done
    assert pending.error is None
    return {"path": path, "before": before, "losses": losses, "after": after}


def restore_and_go_on(path: Any, setup: dict[str, Any], trained: int) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    if trained:
        train(engine, trained, 100)
    client_state = zckpt.restore(engine, path, rng=True)
    before = tensors_of(engine), raw(engine), settings(engine)
    losses = train(engine, AFTER, BEFORE)
    after = tensors_of(engine), raw(engine), settings(engine)
    return {"client": client_state, "before": before, "losses": losses, "after": after}


def assert_same(first: dict[Any, torch.Tensor], second: dict[Any, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    differ = [
        key for key in first if not (first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]))
    ]
    assert not differ


def assert_goes_on_alike(through: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Checks that the results of an uninterrupted run and of a restored one are equal, bit for bit, on every rank."""
    for expected, result in zip(through, resumed, strict=True):
        for when in ("before", "after"):
            assert_same(expected[when][0], result[when][0])
            assert_same(expected[when][1], result[when][1])
            assert expected[when][2] == result[when][2]
        assert expected["losses"] == result["losses"]
        assert result["client"]["note"] == "made by a test"
        assert torch.equal(result["client"]["where"], torch.arange(3))


def assert_at_rest(engine: Any) -> None:
    """Checks that no swap buffer is in use."""
    swapper = engine.optimizer.optimizer_swapper
    if swapper is not None:
        assert len(swapper.swap_buffer_manager.free_buffer_index) == swapper.swap_buffer_manager.count
        assert not any(getattr(swapper, "swap_ops", {}).values())
    for parameter in engine.module.parameters():
        if getattr(parameter, "nvme_swapper", None) is not None:
            assert parameter.nvme_swapper.pending_writes == parameter.nvme_swapper.pending_reads == 0


def write_whole(path: str, setup: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """Trains, writes a checkpoint, and returns the whole state of the engine, as ``whole`` does."""
    engine = make_engine(**setup)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    if engine.zero_optimization_stage() in (1, 2):
        link_all(engine)
    return whole(engine, parts)


def link_all(engine: Any) -> None:
    """Lets DeepSpeed find the optimizer's state of all param groups. After its first step it finds only the first."""
    engine.optimizer._link_all_hp_params()
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()


def restore_whole(path: str, setup: dict[str, Any], parts: tuple[str, ...], trained: int = 0) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    train(engine, trained, 100)
    opened = []

    def open_and_record(path: str) -> tuple[Store, Contents]:
        store, contents = find_and_open(path)
        opened.append(contents)
        return store, contents

    with mock.patch("zckpt.checkpoint.restoring.machines.find_and_open", open_and_record):
        # Not verified, because a digest covers a whole block, so that most of each of these small files would be read.
        zckpt.restore(engine, path, verify=False)
    restored = whole(engine, parts)
    (loss,) = train(engine, 1, BEFORE)
    return {
        **restored,
        "read": opened[0].reader.count.data_bytes,
        "stored": sum(info.nbytes for info in opened[0].values()),
        "loss": loss,
    }


def whole(engine: Any, parts: tuple[str, ...]) -> dict[str, Any]:
    """Returns whole tensors, the settings of each parameter, other settings, and the step. Every rank calls it."""
    parameters = {
        engine.param_names[p]: {key: value for key, value in group.items() if key not in ("params", "step", "amsgrad")}
        for group, group_parameters in zip(inner(engine).param_groups, grouped(engine), strict=True)
        for p in group_parameters
    }
    # FusedAdam at stage 0 has a step of 0 in all states except for one.
    steps = {int(state["step"]) for state in inner(engine).state.values() if "step" in state}
    other_settings = {name: value for name, value in settings(engine).items() if name not in ("groups", "scale")}
    return {
        "logical": logical(engine, parts), "weights": weights(engine), "parameters": parameters,
        "about": other_settings, "step": max(steps, default=None),
    }  # fmt: skip


def grouped(engine: Any) -> list[list[Any]]:
    """Returns the trained parameters of each param group."""
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
