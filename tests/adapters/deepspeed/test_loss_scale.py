"""The loss scale of fp16, restored by another of DeepSpeed's optimizer wrappers than the one that saved it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.models import make_engine, train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

DYNAMIC: dict[str, Any] = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 4, "hysteresis": 2}
STATIC: dict[str, Any] = {"enabled": True, "loss_scale": 128}
NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
OPTIMIZERS = {0: "adamw", "0 by parameter": "torch_adamw", 2: "adamw", 3: "adamw"}


def make(stage: Any, fp16: dict[str, Any], seed: int = 0) -> Any:
    zero_stage = 0 if stage == "0 by parameter" else stage
    return make_engine(zero_stage, "fp16", optimizer=OPTIMIZERS[stage], config={"fp16": fp16}, seed=seed)


def scale(engine: Any) -> dict[str, Any]:
    config = getattr(engine.optimizer, "loss_scale_config", None)
    fields = vars(config or engine.optimizer.loss_scaler)
    common = {name: fields.get(name) for name in NAMES}
    return {**common, "least": fields.get("min_loss_scale", fields.get("min_scale"))}


def scales(engine: Any) -> list[dict[str, Any]]:
    """Returns the state of the loss scale now, and after each of three further steps."""
    states = [scale(engine)]
    for step in range(3):
        train(engine, 1, 3 + step)
        states.append(scale(engine))
    return states


def write(path: str, stage: Any) -> list[dict[str, Any]]:
    """Writes a checkpoint two steps before the loss scale is next increased. Returns what ``scales`` returns."""
    engine = make(stage, {**DYNAMIC, "min_loss_scale": 4})
    train(engine, 3)
    assert not engine.skipped_steps
    zckpt.write(engine, path)
    return scales(engine)


def restore(path: str, stage: Any, fp16: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    engine = make(stage, fp16, seed=1)
    train(engine, 1)
    if stage in (2, 3):
        engine.optimizer.loss_scaler.cur_hysteresis = 1  # an overflow leaves this value
    zckpt.restore(engine, path, state=["counters", "scaler"], parts=["master"])
    hysteresis = getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_hysteresis", None)
    return scales(engine), hysteresis


@pytest.mark.parametrize(
    ("stage", "other"),
    [
        (0, 2),
        (3, 0),
        *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in [(0, 3), (2, 0), (2, 3), (0, "0 by parameter")]),
        *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in [(2, "0 by parameter"), ("0 by parameter", 3)]),
    ],
)
def test_a_dynamic_scale_goes_on_elsewhere(cluster: Cluster, tmp_path: Path, stage: Any, other: Any) -> None:
    path = str(tmp_path / "ckpt")
    (through,) = cluster.run(write, 1, path, stage)
    assert through[0]["cur_scale"] < through[-1]["cur_scale"]
    ((restored, hysteresis),) = cluster.run(restore, 1, path, other, DYNAMIC)
    assert restored == through
    assert hysteresis == (2 if other in (2, 3) else None)


def test_a_static_scale_stays(cluster: Cluster, tmp_path: Path) -> None:
    """A static scale of the configuration is kept, although the checkpoint has a dynamic one."""
    path = str(tmp_path / "ckpt")
    cluster.run(write, 1, path, 0)
    ((restored, _),) = cluster.run(restore, 1, path, 2, STATIC)
    assert {state["cur_scale"] for state in restored} == {128}
