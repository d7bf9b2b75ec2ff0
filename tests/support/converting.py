"""Runs that save in DeepSpeed's own format and with zckpt at the same step, and the state of their engines then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import AFTER, BEFORE, fingerprints_of, raw, settings, tensors_of
from zckpt.checkpoint.reading.checkpoint import loader_of

CLIENT_STATE = {"note": "made by a test", "where": torch.arange(3), "at": (1, 2.5)}
TAG = "saved"


def now(engine: Any) -> tuple[Any, ...]:
    """Returns all state of an engine that can be compared."""
    comparable = settings(engine)
    del comparable["micro_steps"]  # DeepSpeed does not save it
    in_files = getattr(engine.optimizer, "optimizer_swapper", None) is not None
    return (fingerprints_of(engine), {}, comparable) if in_files else (tensors_of(engine), raw(engine), comparable)


def go_on(engine: Any, steps: int) -> dict[str, Any]:
    before = now(engine)
    torch.manual_seed(engine.global_rank)  # because DeepSpeed does not save the random state
    return {"before": before, "losses": train(engine, AFTER, steps), "after": now(engine)}


def save_both(folder: str, setup: dict[str, Any], swap: str = "", steps: int = BEFORE) -> dict[str, Any]:
    """Trains, saves ``folder/stock`` with DeepSpeed and ``folder/own`` with zckpt, and goes on training."""
    engine = make_engine(**setup, swap=swap)
    train(engine, steps)
    engine.save_checkpoint(f"{folder}/stock", tag=TAG, client_state=CLIENT_STATE)
    zckpt.write(engine, f"{folder}/own", client_state=CLIENT_STATE, latest=False)
    return go_on(engine, steps)


def restore(path: str, setup: dict[str, Any], swap: str = "", steps: int = BEFORE) -> dict[str, Any]:
    engine = make_engine(**setup, swap=swap, seed=1)
    client_state = zckpt.restore(engine, path)
    return {"client": dict(client_state), **go_on(engine, steps)}


def load_stock(path: str, setup: dict[str, Any], steps: int = BEFORE) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    engine.load_checkpoint(path)
    return go_on(engine, steps)


def make_universal(source: str, destination: str) -> None:
    """Makes a universal checkpoint with DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        SimpleNamespace(
            input_folder=source, output_folder=destination, num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def assert_same_checkpoints(written: zckpt.Checkpoint, converted: zckpt.Checkpoint, *, same_files: bool = True) -> None:
    """Checks that the checkpoints are equal, except for what DeepSpeed's folder lacks: random states, and a few
    settings. ``same_files``: whether each rank has files of the same parts, as it has unless ranks share replicas."""
    facts = [{key: (info.shape, info.dtype, info.part) for key, info in ck.items()} for ck in (written, converted)]
    assert facts[0] == facts[1]
    assert (written.step, written.world_size, written.parts) == (converted.step, converted.world_size, converted.parts)
    assert written.aliases == converted.aliases
    own_tensors, converted_tensors = written.load(), converted.load()
    for key in own_tensors:
        if key.startswith("buffer/") or own_tensors[key].numel():
            assert own_tensors[key].dtype == converted_tensors[key].dtype, key
            assert torch.equal(bits(own_tensors[key]), bits(converted_tensors[key])), key
    states = [plain(ck.state) for ck in (written, converted)]
    scalers = []
    for state in states:
        del state["engine"]["counters"]["micro_steps"]
        scalers.append(state["engine"].pop("scaler"))
        assert state.pop("lineage")["use"] == "resume"
    # DeepSpeed's files do not tell how its own optimizers treat the weight decay.
    if "decoupled_weight_decay" not in states[1]["engine"]["optimizer"]:
        states[0]["engine"]["optimizer"].pop("decoupled_weight_decay", None)
    scales = [None if scaler is None else scaler["values"]["cur_scale"] for scaler in scalers]
    assert scales[0] == scales[1]
    if states[1]["engine"]["optimizer"]["class"] is None:  # the caller made the optimizer
        assert states[0]["engine"]["optimizer"].pop("class") == "Factored"
        del states[1]["engine"]["optimizer"]["class"]
    assert states[0] == states[1]
    assert files(written) == files(converted) or not same_files


def files(checkpoint: zckpt.Checkpoint) -> set[tuple[str, int, int]]:
    """Returns part, tier and rank of each data file, except for those of trees and buffers."""
    parts = [part.name for part in loader_of(checkpoint).manifest.parts]
    places = {(parts[file.part_id], file.tier, file.rank) for file in loader_of(checkpoint).manifest.files}
    return {file for file in places if file[0] not in ("state", "buffer")}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def plain(value: Any) -> Any:
    """Returns the tree in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value
