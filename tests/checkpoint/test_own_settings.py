"""A restore may keep the settings of the engine, and restores what fits into an engine with more or fewer layers. What
the hint of an error says works."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from torch import nn

import zckpt
from tests.support.models import make_engine, make_model, train
from tests.support.runs import AFTER, BEFORE, assert_same, everything, inner, logical, settings, tensors_of, weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

MOMENTS = ("exp_avg", "exp_avg_sq")


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def sequential(optimizer: Any) -> Any:
    lr = torch.optim.lr_scheduler
    return lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.5)], [2])


SETUPS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1, "scheduler": sequential},
    "2-fp16": {"stage": 2, "dtype": "fp16", "scheduler": True},
    "2-cpu": {"stage": 2, "scheduler": cosine, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3, "scheduler": halving},
}
EVERY_COMMIT = ("2-fp16", "2-cpu", "3")
OF_SETUPS = [pytest.param(name, marks=() if name in EVERY_COMMIT else pytest.mark.matrix) for name in SETUPS]


def restore_with_same_settings(directory: str, setup: dict[str, Any]) -> None:
    engine = make_engine(**setup, groups=True)
    train(engine, BEFORE)
    zckpt.write(engine, f"{directory}/c", client_state={"epoch": 1})
    plain, own = (make_engine(**setup, groups=True, seed=seed) for seed in (1, 2))
    zckpt.restore(plain, directory)
    assert zckpt.restore(own, directory, settings="engine") == {"epoch": 1}
    assert everything(own) == everything(plain) == everything(engine)
    losses = [train(one, AFTER, BEFORE) for one in (engine, plain, own)]
    assert losses[0] == losses[1] == losses[2]
    assert everything(own) == everything(plain)


@pytest.mark.parametrize("setup", OF_SETUPS)
def test_with_the_same_settings_a_restore_is_the_same(cluster: Cluster, tmp_path: Path, setup: str) -> None:
    cluster.run(restore_with_same_settings, 2, str(tmp_path), SETUPS[setup])


def write_and_go_on(directory: str, setup: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the state of a run, and the settings that it would have after as many steps with other settings."""
    engine, other = make_engine(**setup), make_engine(**setup, optimizer="slow_adamw")
    train(engine, BEFORE)
    train(other, BEFORE)
    zckpt.attach(engine).save_checkpoint(directory, "c")
    return logical(engine, MOMENTS), settings(engine), settings(other)


def go_on_with_others(directory: str, setup: dict[str, Any], stage: int) -> tuple[Any, Any, list[dict[str, Any]]]:
    engines = [make_engine(**{**setup, "stage": stage}, optimizer="slow_adamw", seed=1) for _ in range(3)]
    zckpt.restore(engines[0], directory, settings="engine")
    zckpt.attach(engines[1], settings="engine").load_checkpoint(directory)
    assert everything(engines[0]) == everything(engines[1])
    zckpt.attach(engines[2], settings="engine").load_checkpoint(directory, load_lr_scheduler_states=False)
    with pytest.raises((ValueError, zckpt.RankError), match=r"settings must.*'mine'"):
        zckpt.restore(engines[0], directory, settings="mine")  # type: ignore[call-overload]
    steps = {float(state["step"]) for state in inner(engines[0]).state.values()}
    return logical(engines[0], MOMENTS), steps, [settings(engine) for engine in engines]


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (3, 2), pytest.param(1, 0, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("scheduler", [True, pytest.param(cosine, marks=pytest.mark.matrix), False])
def test_the_engine_keeps_other_settings_and_gets_the_rest(
    cluster: Cluster, tmp_path: Path, scheduler: Any, ranks: int, stage: int
) -> None:
    state, before, expected = cluster.run(write_and_go_on, 2, str(tmp_path), {"stage": 2, "scheduler": scheduler})[0]
    for found, steps, (own, attached, without) in cluster.run(
        go_on_with_others, ranks, str(tmp_path), {"stage": 2, "scheduler": scheduler}, stage
    ):
        assert_same(state, found)
        assert steps == {BEFORE}
        assert own == attached == expected, "as after so many steps with these settings"
        assert own["groups"] != before["groups"]
        assert own["groups"][0]["betas"] == [0.8, 0.9]
        counters = {name: own[name] for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps")}
        assert counters.items() <= before.items()
        if scheduler:
            assert own["scheduler"] != without["scheduler"], "it stays at its first step"
            assert without["groups"][0]["lr"] != own["groups"][0]["lr"]


class Counting(torch.optim.Optimizer):
    """An optimizer that counts in its param groups, as Prodigy and those of pytorch_optimizer do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"], group["k"], group["d"] = group.get("step", 0) + 1, group["k"] + 1, group["d"] * 2
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("momentum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["momentum"], alpha=group["lr"])


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, :8]).float().square().mean()


def by_layer(optimizer: Callable[[Any], Any], module: Layers) -> Any:
    """Returns an optimizer with a param group for each layer. The last layer has the largest learning rate."""
    count = len(module.layers)
    return optimizer(
        [{"params": [*layer.parameters()], "lr": 1e-2 * 0.5 ** (count - n)} for n, layer in enumerate(module.layers)]
    )


def layers_engine(
    stage: int,
    layers: int,
    scheduler: Callable[[Any], Any] | None,
    optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    grouped: Callable[[Callable[[Any], Any], Layers], Any] = by_layer,
    seed: int = 0,
) -> Any:
    torch.manual_seed(seed)
    module = Layers(layers)
    live = grouped(optimizer, module)
    config = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    schedule = None if scheduler is None else scheduler(live)
    engine, *_ = deepspeed.initialize(model=module, optimizer=live, lr_scheduler=schedule, config=config)
    return engine


def counting_engine(lr: float) -> Any:
    return layers_engine(2, 2, None, partial(Counting, lr=lr), one_group)


def restore_counted(directory: str) -> None:
    engine, other = counting_engine(1e-2), counting_engine(1e-3)
    train(engine, BEFORE)
    zckpt.write(engine, f"{directory}/c")
    zckpt.restore(other, directory, settings="engine")
    (group,) = inner(other).param_groups
    assert {name: group[name] for name in ("lr", "d", "k", "step")} == {"lr": 1e-3, "d": 8.0, "k": 3, "step": 3}


def one_group(optimizer: Callable[[Any], Any], module: nn.Module) -> Any:
    return optimizer(module.parameters())


def test_what_an_optimizer_counts_in_its_param_groups_is_no_setting(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(restore_counted, 1, str(tmp_path))


def restored_by_hint(engine: Any, path: str, **options: Any) -> list[str]:
    """Restores strictly, which fails, and then as the hint says. Returns the words of the hint that were followed."""
    with pytest.raises((zckpt.MismatchError, zckpt.RankError)) as caught:
        zckpt.restore(engine, path, **options)
    hint = str(caught.value).splitlines()[-1]
    first = hint.partition("; parts=")[0]
    named = dict(re.findall(r'(strict|settings|state)=(False|"\w+"|\[[^]]*\])', first))
    followed = {name: json.loads(text.replace("False", "false")) for name, text in named.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one warning says that a part of the checkpoint fits
        zckpt.restore(engine, path, **options, **followed)
    return sorted(named)


def restore_other_layers(directory: str, stage: int) -> None:
    for number, schedule in enumerate((None, halving, cosine, sequential)):
        engine, path = layers_engine(stage, 2, schedule), f"{directory}/{number}"
        train(engine, BEFORE)
        zckpt.write(engine, path)
        state, lrs = tensors_of(engine), [group["lr"] for group in inner(engine).param_groups]
        for layers in (1, 3):
            other, natural = layers_engine(stage, layers, schedule, seed=1), layers_engine(stage, layers, schedule)
            own = tensors_of(other)
            assert restored_by_hint(other, path) == ["strict"]
            train(natural, BEFORE)
            expected = own | {key: value for key, value in state.items() if layers == 3 or "layers.1" not in key[0]}
            assert_same(tensors_of(other), expected)
            more = {"master/layers.2.weight", "exp_avg/layers.1.weight"}
            assert {key for key, *_ in expected if key in more} == (more if layers == 3 else set())
            found = [group["lr"] for group in inner(other).param_groups]
            assert found[:2] == lrs[:layers]
            assert found[2:] == [group["lr"] for group in inner(natural).param_groups][2:]
            assert other.global_steps == BEFORE
            if schedule:
                assert other.lr_scheduler.last_epoch == BEFORE
                assert other.lr_scheduler.get_last_lr() == found
            train(other, 2)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.matrix), 2, 3])
def test_a_model_with_other_layers_gets_what_fits(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    cluster.run(restore_other_layers, 2, str(tmp_path), stage)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def with_counts_of_its_own(optimizer: Any) -> Any:
    scheduler = halving(optimizer)
    scheduler.step = lambda value: None
    return scheduler


def with_a_step_that_passes_on(optimizer: Any) -> Any:
    scheduler = halving(optimizer)
    step = scheduler.step

    def step_with_any_arguments(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)

    scheduler.step = step_with_any_arguments
    return scheduler


def follow_hints(directory: str) -> None:
    engine = layers_engine(2, 2, halving)
    train(engine, BEFORE)
    zckpt.write(engine, f"{directory}/c")
    unscheduled = layers_engine(2, 2, None)
    train(unscheduled, 1)
    zckpt.write(unscheduled, f"{directory}-unscheduled/c")
    regrouped = layers_engine(2, 2, halving, grouped=one_group, seed=1)
    assert restored_by_hint(regrouped, directory) == ["settings"]
    assert restored_by_hint(layers_engine(2, 2, cosine, seed=1), directory) == ["settings"]
    assert restored_by_hint(layers_engine(2, 3, cosine, seed=1), directory) == ["settings", "strict"]
    assert restored_by_hint(layers_engine(2, 2, plateau, seed=1), directory) == ["state"]
    assert restored_by_hint(layers_engine(2, 3, plateau, seed=1), directory) == ["state", "strict"]
    assert restored_by_hint(layers_engine(2, 2, halving, seed=1), f"{directory}-unscheduled") == ["state"]
    ahead = layers_engine(2, 2, halving, seed=1)
    train(ahead, BEFORE + 1)
    assert restored_by_hint(ahead, directory, settings="engine") == ["state"]
    passing_on = layers_engine(2, 2, with_a_step_that_passes_on, seed=1)
    zckpt.restore(passing_on, directory, settings="engine")
    assert passing_on.lr_scheduler.last_epoch == BEFORE
    odd = layers_engine(2, 2, with_counts_of_its_own, seed=1)
    assert restored_by_hint(odd, directory, settings="engine") == ["state"]
    for layers in (2, 3):  # the last resort
        other = layers_engine(2, layers, None, lambda groups: torch.optim.SGD(groups, momentum=0.9), seed=1)
        with pytest.raises(zckpt.MismatchError, match=r"AdamW.*SGD") as caught:
            zckpt.restore(other, directory)
        (parts,) = re.findall(r"parts=(\[.*?\]) restores the weights alone", str(caught.value))
        assert ("those that fit with strict=False" in str(caught.value)) == (layers == 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zckpt.restore(other, directory, parts=json.loads(parts), strict=layers == 2)
        assert weights(other)["layers.1.bias"].equal(weights(engine)["layers.1.bias"])


def test_what_a_hint_says_works(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(follow_hints, 1, str(tmp_path))


def follow_hints_in_an_attached_engine(directory: str) -> None:
    engine = zckpt.attach(layers_engine(2, 2, halving))
    train(engine, BEFORE)
    engine.save_checkpoint(directory)
    for schedule, layers, options, settings_of in (
        (halving, 3, {"load_module_strict": False}, "checkpoint"),
        (cosine, 2, {}, "engine"),
        (cosine, 3, {"load_module_strict": False}, "engine"),
        (plateau, 3, {"load_module_strict": False, "load_lr_scheduler_states": False}, "checkpoint"),
    ):
        other = zckpt.attach(layers_engine(2, layers, schedule, seed=1))
        with pytest.raises(zckpt.MismatchError) as caught:
            other.load_checkpoint(directory)
        first = str(caught.value).splitlines()[-1].partition("; load_module_only=")[0]
        assert [f"{name}=False" in first for name in options] == [True] * len(options)
        assert (f'zckpt.attach(zckpt.detach(engine), settings="{settings_of}")' in first) == (settings_of == "engine")
        zckpt.attach(zckpt.detach(other), settings=settings_of)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.load_checkpoint(directory, **options)
        assert other.global_steps == BEFORE


def test_what_a_hint_says_works_in_an_attached_engine(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(follow_hints_in_an_attached_engine, 1, str(tmp_path))


ZERO = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def run_trainer(directory: str, learning_rate: float, resume: bool) -> list[float]:
    """Returns the learning rates of all steps."""
    from transformers import Trainer, TrainingArguments

    zckpt.attach_all(settings="engine")
    arguments = TrainingArguments(
        directory, learning_rate=learning_rate, warmup_steps=2, max_steps=6, save_steps=3, logging_steps=1,
        per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, deepspeed=ZERO,
    )  # fmt: skip
    samples = [{"input_ids": t, "labels": t} for t in torch.randint(64, (64, 16))]
    trainer = Trainer(make_model("gpt2"), arguments, train_dataset=samples)
    trainer.train(resume_from_checkpoint=f"{directory}/checkpoint-3" if resume else None)
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def test_a_trainer_keeps_its_own_schedule(cluster: Cluster, tmp_path: Path) -> None:
    first, other = (
        cluster.run(run_trainer, 2, str(tmp_path / f"{lr}"), lr, False, init=False)[0] for lr in (1e-2, 1e-3)
    )
    resumed = cluster.run(run_trainer, 2, str(tmp_path / "0.01"), 1e-3, True, init=False)[0]
    assert first != other
    assert resumed == [*first[:3], *other[3:]]


def run_accelerate(directory: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    zckpt.attach_all(settings="engine")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO))

    def prepared(lr: float) -> Any:
        accelerator._models, accelerator._optimizers, accelerator._schedulers = [], [], []
        module = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        return accelerator.prepare(module, optimizer, halving(optimizer))

    def trained(prepared: Any) -> float:
        model, optimizer, scheduler = prepared
        for _ in range(BEFORE):
            accelerator.backward(model(torch.randn(4, 64)).square().mean())
            optimizer.step()
            scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    first = prepared(1e-2)
    assert trained(first) == 1e-2 * 0.5**BEFORE
    accelerator.save_state(directory)
    model, optimizer, scheduler = prepared(1e-3)
    accelerator.load_state(directory)
    assert model.global_steps == BEFORE
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [1e-3 * 0.5**BEFORE]


def test_accelerate_keeps_its_own_schedule(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(run_accelerate, 2, str(tmp_path / "state"), init=False)
