"""Runs that save in DeepSpeed's own format and with zckpt at the same step, and the state of their engines then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import AFTER, BEFORE, fingerprints_of, raw, settings, tensors_of

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
