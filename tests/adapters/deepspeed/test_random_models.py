"""Random models, param groups and topologies, compared with a simple model of a checkpoint.

The simple model consists of whole tensors and settings by parameter name, as DeepSpeed's public functions return them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import zckpt
from tests.support.models import OPTIMIZERS
from tests.support.runs import assert_same, link_all, tensors_of, whole
from tests.support.runs import settings as engine_settings

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

BEFORE = 2
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
CPU = {"offload_optimizer": {"device": "cpu"}}
PARTS = {"adamw": ("exp_avg", "exp_avg_sq"), "torch_adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
GROUP_SETTINGS = (
    {"lr": 1e-2, "weight_decay": 0.0},
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-2, "weight_decay": 0.1},
)


@dataclass(frozen=True)
class Model:
    """The properties in which a checkpoint and the engine that restores it must agree."""

    shapes: tuple[tuple[int, ...], ...]
    frozen: tuple[bool, ...]
    dtype: str
    optimizer: str


@dataclass(frozen=True)
class Run:
    """How an engine distributes a model over its ranks and param groups. A checkpoint may be restored by a different
    Run."""

    world_size: int
    groups: tuple[tuple[int, ...], ...]
    """The trained parameters of each param group, as indices into ``Model.shapes``."""
    group_settings: tuple[int, ...]
    zero: dict[str, Any]
    config: dict[str, Any]

    def settings_of(self, parameter: int) -> int:
        return next(s for group, s in zip(self.groups, self.group_settings, strict=True) if parameter in group)


class Squares(torch.nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for index, (shape, frozen) in enumerate(zip(model.shapes, model.frozen, strict=True)):
            # ZeRO-3 cannot fetch parameters without elements for a forward pass.
            place = self.unused if 0 in shape or frozen else self.used
            place[f"{index}"] = torch.nn.Parameter(torch.randn(shape), requires_grad=not frozen)

    def forward(self) -> torch.Tensor:
        # The loss is the same on every rank, so that no sum depends on the order of the ranks.
        return torch.stack([parameter.float().square().mean() for parameter in self.used.values()]).sum()


def make(model: Model, run: Run, seed: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    module = Squares(model)
    groups = [
        {"params": [{**module.used, **module.unused}[f"{index}"] for index in group], **GROUP_SETTINGS[choice]}
        for group, choice in zip(run.groups, run.group_settings, strict=True)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": model.dtype == "bf16"},
        "optimizer": OPTIMIZERS[model.optimizer],
        "zero_optimization": run.zero,
        "zero_allow_untested_optimizer": True,
        **run.config,
    }
    return deepspeed.initialize(model=module, model_parameters=groups, config=config)[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine())
        with torch.no_grad():
            engine.step()


def look(engine: deepspeed.DeepSpeedEngine, model: Model) -> dict[str, Any]:
    if engine.zero_optimization_stage() in (1, 2):
        link_all(engine)
    values = whole(engine, PARTS[model.optimizer])
    return {key: values[key] for key in ("logical", "weights", "parameters", "step")}


def write(path: str, model: Model, run: Run) -> dict[str, Any]:
    engine = make(model, run, 0)
    train(engine, BEFORE)
    zckpt.write(engine, path)
    if run.zero.get("round_robin_gradients"):  # DeepSpeed's functions return wrong values of such a run.
        engine = make(model, Run(**{**vars(run), "zero": {**run.zero, "round_robin_gradients": False}}), 0)
        train(engine, BEFORE)
    truth = look(engine, model)
    train(engine, 1)
    return {**truth, "next": look(engine, model)["weights"]}


def restore(path: str, model: Model, run: Run, trained: int) -> dict[str, Any] | str:
    """Returns what the engine holds after the restore, or the text of the error if the restore was refused."""
    engine = make(model, run, 1)
    train(engine, trained)
    before = tensors_of(engine), engine_settings(engine)
    try:
        zckpt.restore(engine, path)
    except zckpt.MismatchError as error:
        assert_same(before[0], tensors_of(engine))
        assert before[1] == engine_settings(engine)
        return str(error)
    values = look(engine, model)
    train(engine, 1)
    return {**values, "next": look(engine, model)["weights"]}


@st.composite
def examples(draw: st.DrawFn) -> tuple[Model, Run, Run, int]:
    sizes = st.integers(0, 9) | st.sampled_from([1, 1, 31, 64])
    shapes = draw(st.lists(st.lists(sizes, min_size=1, max_size=3).map(tuple), min_size=1, max_size=8))
    shapes = [*shapes, draw(st.sampled_from([(1,), (5,), (7, 3)]))]  # the last parameter is trained
    frozen = [*draw(st.lists(st.booleans(), min_size=len(shapes) - 1, max_size=len(shapes) - 1)), False]
    optimizer = draw(st.sampled_from(["adamw", "adamw", "torch_adamw", "sgd"]))
    model = Model(tuple(shapes), tuple(frozen), draw(st.sampled_from(["bf16", "fp32"])), optimizer)
    written = draw(runs(model, 3))
    restored = draw(runs(model, 4, round_robin=False))
    if draw(st.booleans()):
        restored = Run(**{**vars(restored), "groups": written.groups, "group_settings": written.group_settings})
    return model, written, restored, draw(st.sampled_from([0, 1]))


@st.composite
def runs(draw: st.DrawFn, model: Model, most_ranks: int, round_robin: bool = True) -> Run:
    zero: dict[str, Any] = {"stage": draw(st.sampled_from([0, 1, 2, 3, 3]))}
    config: dict[str, Any] = {}
    if zero["stage"] == 3:
        zero["sub_group_size"] = draw(st.sampled_from([1, 20, 100, 10**9]))
        zero["stage3_param_persistence_threshold"] = draw(st.sampled_from([0, 10, 10**5]))
    if zero["stage"] and model.optimizer == "adamw" and draw(st.booleans()):
        zero |= CPU
    elif zero["stage"] == 1 and model.dtype == "bf16" and draw(st.booleans()):
        config = FP32_GRADIENTS
    if zero["stage"] in (1, 2) and round_robin and not config:
        zero["round_robin_gradients"] = draw(st.booleans())
    trained = [index for index, frozen in enumerate(model.frozen) if not frozen]
    trained = draw(st.permutations(trained))
    full = [index for index in trained if 0 not in model.shapes[index]]
    # Each group gets one parameter that has elements. The other parameters are distributed at random.
    count = draw(st.integers(1, min(3, len(full))))
    groups = [[index] for index in full[:count]]
    for index in trained:
        if index not in full[:count]:
            groups[draw(st.integers(0, count - 1))].append(index)
    choices = draw(st.lists(st.integers(0, len(GROUP_SETTINGS) - 1), min_size=count, max_size=count))
    ranks = draw(st.integers(1, most_ranks))
    return Run(ranks, tuple(map(tuple, groups)), tuple(choices), zero, config)


def assert_close(actual: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert actual.keys() == other.keys()
    for key, tensor in actual.items():
        precision = 2**-7 if tensor.dtype == torch.bfloat16 else 1e-5
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        torch.testing.assert_close(tensor, other[key], rtol=precision, atol=atol + 1e-6 * largest)


def check(cluster: Cluster, model: Model, written: Run, restored: Run, trained: int) -> None:
    # With round robin, another engine gives the expected values. The last bit of a C++ Adam depends on the position of
    # an element in its flat buffer.
    same = assert_close if written.zero.get("round_robin_gradients") else assert_same
    # ZeRO leaves parameters without elements out of its groups, and other wrappers do not. So the two wrappers decide
    # whether the settings of these parameters matter.
    full = [[index for index in group if 0 not in model.shapes[index]] for group in restored.groups]
    fits, fits_with_empty = (
        all(len({written.settings_of(index) for index in group}) <= 1 for group in groups)
        for groups in (full, restored.groups)
    )
    with tempfile.TemporaryDirectory(prefix="zckpt-random-") as path:
        truth = cluster.run(write, written.world_size, f"{path}/c", model, written)[0]
        ranks = cluster.run(restore, restored.world_size, f"{path}/c", model, restored, trained)
        checkpoint = zckpt.open(f"{path}/c")
        masterless = {
            f"param/{name}": weight
            for name, weight in truth["weights"].items()
            if f"master/{name}" not in truth["logical"]
        }
        same(checkpoint.load(), {**truth["logical"], **masterless})
    for rank in ranks:
        if not fits or (not fits_with_empty and isinstance(rank, str)):
            assert "one param group here, several with other" in rank
            continue
        assert not isinstance(rank, str), rank
        same(truth["logical"], rank["logical"])
        same(truth["weights"], rank["weights"])
        assert truth["parameters"] == rank["parameters"]
        assert truth["step"] == rank["step"]
        # The last bit of a 16-bit gradient depends on how the ranks add it up. Where a gradient is almost 0, Adam makes
        # some hundredths of a step of this bit. A lost moment or a lost step count would make a whole step.
        rounding = 2e-4 if model.dtype == "bf16" and model.optimizer != "sgd" else 0.0
        assert_close(truth["next"], rank["next"], rounding)


# There is no phase that shrinks a failing example, because it would take minutes and these models are small.
OPTIONS: dict[str, Any] = {"phases": [Phase.explicit, Phase.generate], "suppress_health_check": list(HealthCheck)}
FEW = settings(max_examples=8, derandomize=True, **OPTIONS)
MANY = settings(max_examples=100, **OPTIONS)


@FEW
@given(example=examples())
def test_any_model_is_restored_into_any_topology(cluster: Cluster, example: tuple[Model, Run, Run, int]) -> None:
    check(cluster, *example)


@pytest.mark.matrix
@MANY
@given(example=examples())
def test_many_models_are_restored_into_any_topology(cluster: Cluster, example: tuple[Model, Run, Run, int]) -> None:
    check(cluster, *example)
