"""What a TrainState counts, refuses and keeps, in one process."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

import zckpt
from tests.support.torch_models import OPTIMIZERS, Net, backward, held, make_state, train
from zckpt.checkpoint.reading.loader import Loader
from zckpt.engines import adapt
from zckpt.plan.inventory import Fragment
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path


def test_the_steps_of_the_optimizer_are_counted_unless_the_user_counts(tmp_path: Path) -> None:
    state = make_state("alone")
    train(state, 3)
    assert state.step == 3
    assert zckpt.open(zckpt.write(state, tmp_path / "a")).step == 3
    state.step = 10
    train(state, 2)
    assert state.step == 10
    resumed = make_state("alone", seed=1)
    zckpt.restore(resumed, tmp_path / "a")
    train(resumed, 1)
    assert resumed.step == 4


def test_a_tuple_is_kept_as_one_state(tmp_path: Path) -> None:
    made = make_state("alone", scheduler=True)
    model = Net()
    model.load_state_dict(made.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    zckpt.write((model, optimizer), tmp_path / "a", step=7)
    assert zckpt.open(tmp_path / "a").step == 7
    other = Net()
    resumed = torch.optim.AdamW(other.parameters())
    zckpt.restore((other, resumed), tmp_path / "a")
    assert frozen(other.state_dict()) == frozen(model.state_dict())
    for group in resumed.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    resumed.step()
    zckpt.write((other, resumed), tmp_path / "b", pending_gradients="drop")
    assert zckpt.open(tmp_path / "b").step == 8
    with pytest.raises(TypeError, match=r"not a torch.nn.Module"):
        zckpt.write((optimizer, model), tmp_path / "c")


def test_a_state_ends_with_its_model() -> None:
    state = make_state("alone")
    reference = weakref.ref(state.model)
    train(state, 1)
    del state
    gc.collect()
    assert reference() is None


def test_gradients_are_seen_that_come_after_the_first_write_of_a_tuple(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.zeros(1, 1, dtype=torch.int64)).sum()
    loss.backward()
    zckpt.write((model, optimizer), tmp_path / "a")  # Nobody knows yet whether a step has used them.
    optimizer.zero_grad()
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    with pytest.raises(zckpt.UnsupportedError, match="no step has used"):
        zckpt.write((model, optimizer), tmp_path / "b")


def test_a_copy_of_the_model_has_no_copy_of_the_optimizer(tmp_path: Path) -> None:
    state = make_state("alone")
    train(state, 1)
    averaged = copy.deepcopy(state.model)
    assert not [held for held in gc.get_referrers(averaged) if isinstance(held, zckpt.TrainState)]
    assert len(pickle.dumps(averaged)) < 2 * len(pickle.dumps(averaged.state_dict()))
    zckpt.write((averaged, torch.optim.SGD(averaged.parameters())), tmp_path / "c")
    assert "exp_avg" not in zckpt.open(tmp_path / "c").parts


@pytest.mark.parametrize("clearing", ["before", "after", "to zero"])
def test_gradients_count_as_pending_only_until_a_step_has_used_them(tmp_path: Path, clearing: str) -> None:
    state = make_state("alone")
    (optimizer,) = state.optimizers
    backward(state, 0)
    with pytest.raises(zckpt.UnsupportedError, match="no step has used"):
        zckpt.write(state, tmp_path / "a")
    optimizer.step()
    if clearing != "before":
        optimizer.zero_grad(set_to_none=clearing == "after")
    zckpt.write(state, tmp_path / "b")
    if clearing == "before":
        optimizer.zero_grad()
    backward(state, 1)
    with pytest.raises(zckpt.UnsupportedError, match="no step has used"):
        zckpt.write(state, tmp_path / "c")
    zckpt.write(state, tmp_path / "c", pending_gradients="drop")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_goes_on_bit_for_bit_with_any_optimizer(tmp_path: Path, optimizer: str) -> None:
    through = make_state("alone", optimizer=optimizer, scheduler=True)
    train(through, 3)
    zckpt.write(through, tmp_path / "a")
    losses = train(through, 3)
    resumed = make_state("alone", optimizer=optimizer, scheduler=True, seed=1)
    zckpt.restore(resumed, tmp_path / "a")
    assert train(resumed, 3) == losses
    assert frozen(held(resumed)) == frozen(held(through))


@pytest.mark.parametrize("setting", ["lr", "betas"])
def test_settings_that_are_tensors_are_restored_into_an_optimizer_that_takes_only_numbers(
    tmp_path: Path, setting: str
) -> None:
    def make(seed: int, **settings: Any) -> zckpt.TrainState:
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        return zckpt.TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))

    tensors: dict[str, Any] = {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.8), torch.tensor(0.9))}
    through = make(0, foreach=False, **{setting: tensors[setting]})
    train(through, 3)
    zckpt.write(through, tmp_path / "a")
    losses = train(through, 3)
    resumed = make(1, foreach=True)
    train(resumed, 1)
    zckpt.restore(resumed, tmp_path / "a")
    assert train(resumed, 3) == losses
    assert frozen(held(resumed)) == frozen(held(through))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "Rprop", "NAdam", "Adafactor"])
def test_a_run_is_restored_to_before_its_first_step(tmp_path: Path, name: str) -> None:
    """Most optimizers have no state then, and what they begin with is not always zero."""

    def make(seed: int) -> zckpt.TrainState:
        torch.manual_seed(seed)
        model = Net()
        options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
        return zckpt.TrainState(model, getattr(torch.optim, name)(model.parameters(), **options))

    through, resumed = make(0), make(1)
    zckpt.write(through, tmp_path / "a")
    losses = train(through, 3)
    train(resumed, 2)
    zckpt.restore(resumed, tmp_path / "a")
    assert train(resumed, 3) == losses
    assert frozen(held(resumed)) == frozen(held(through))


def test_a_run_goes_on_after_a_restore_in_inference_mode(tmp_path: Path) -> None:
    """If the moments that a restore makes were inference tensors, the next step would refuse them."""
    through, resumed = make_state("alone"), make_state("alone", seed=1)
    train(through, 3)
    zckpt.write(through, tmp_path / "a")
    losses = train(through, 3)
    with torch.inference_mode():
        zckpt.restore(resumed, tmp_path / "a")
    assert train(resumed, 3) == losses
    assert frozen(held(resumed)) == frozen(held(through))


def test_several_optimizers(tmp_path: Path) -> None:
    def make(seed: int) -> zckpt.TrainState:
        torch.manual_seed(seed)
        model = Net()
        matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight.requires_grad]
        others = [weight for weight in model.parameters() if weight.ndim != 2]
        optimizers = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)
        return zckpt.TrainState(model, optimizers)

    through = make(0)
    train(through, 3)
    zckpt.write(through, tmp_path / "a")
    moments = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert set(zckpt.open(tmp_path / "a").parts) == {"master", "param", "buffer", *moments}
    losses = train(through, 2)
    resumed = make(1)
    zckpt.restore(resumed, tmp_path / "a")
    assert train(resumed, 2) == losses
    assert frozen(held(resumed)) == frozen(held(through))


def test_a_loss_scale_is_saved_if_it_is_registered(tmp_path: Path) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 8.0)]
    for seed, scaler in enumerate(scalers):
        state = make_state("alone", seed=seed)
        zckpt.register(state, "scaler", scaler)
        if seed == 0:
            scaler.scale(torch.ones(()))
            scaler.update(16.0)
            zckpt.write(state, tmp_path / "a")
        else:
            zckpt.restore(state, tmp_path / "a")
    assert scalers[1].state_dict() == scalers[0].state_dict()
    assert scalers[1].get_scale() == 16.0


def test_weights_that_were_frozen_after_some_steps_are_restored_before_they_are_frozen(tmp_path: Path) -> None:
    state = make_state("alone")
    train(state, 2)
    first = next(iter(state.model.parameters())).requires_grad_(False)
    zckpt.write(state, tmp_path / "a")
    frozen_first, other = make_state("alone", seed=1), make_state("alone", seed=1)
    next(iter(frozen_first.model.parameters())).requires_grad_(False)
    with pytest.raises(zckpt.MismatchError, match="is frozen in the engine") as caught:
        zckpt.restore(frozen_first, tmp_path / "a")
    assert "to freeze weights after the restore keeps their moments" in (caught.value.hint or "")
    zckpt.restore(other, tmp_path / "a")
    restored = next(iter(other.model.parameters())).requires_grad_(False)
    assert torch.equal(restored, first)
    assert frozen([held(other), train(other, 2)]) == frozen([held(state), train(state, 2)])


def test_a_model_without_an_optimizer_gets_the_weights(tmp_path: Path) -> None:
    trained = make_state("alone")
    train(trained, 2)
    zckpt.write(trained, tmp_path / "a")
    torch.manual_seed(1)
    evaluated = zckpt.TrainState(Net(), None)
    zckpt.restore(evaluated, tmp_path / "a")
    assert frozen(evaluated.model.state_dict()) == frozen(trained.model.state_dict())
    zckpt.write(evaluated, tmp_path / "weights" / "b")
    assert set(zckpt.open(tmp_path / "weights" / "b").parts) == {"param", "buffer"}


def test_a_model_may_name_one_of_its_modules_as_torch_compile_names_the_model_in_its_wrapper(tmp_path: Path) -> None:
    def make(seed: int) -> zckpt.TrainState:
        torch.manual_seed(seed)
        model = nn.Sequential(OrderedDict(_orig_mod=nn.Linear(2, 3), head=nn.Linear(3, 2)))
        return zckpt.TrainState(model, torch.optim.AdamW(model.parameters()))

    saved, other = make(0), make(1)
    zckpt.write(saved, tmp_path / "a")
    zckpt.restore(other, tmp_path / "a")
    assert frozen(other.model.state_dict()) == frozen(saved.model.state_dict())


def test_adam_and_adamw_are_told_apart_by_what_they_do(tmp_path: Path) -> None:
    state = make_state("alone", optimizer="adamw")
    train(state, 1)
    zckpt.write(state, tmp_path / "a")
    with pytest.raises(zckpt.MismatchError, match=r"subtracts it"):
        zckpt.restore(make_state("alone", optimizer="adam"), tmp_path / "a")
    alike = make_state("alone", optimizer="adam")
    alike.optimizers[0].param_groups[0]["decoupled_weight_decay"] = True
    zckpt.restore(alike, tmp_path / "a")


def test_what_a_write_reads_stays_if_the_engine_gives_a_tensor_other_memory() -> None:
    """A write in the background reads weights and moments by their addresses while the training goes on."""
    state = make_state("alone")
    train(state, 1)
    fragments = [f.data for f in adapt(state).inventory(None).fragments if isinstance(f.data, torch.Tensor)]
    before = [data.clone() for data in fragments]
    moments = [value for of_weight in state.optimizers[0].state.values() for value in of_weight.values()]
    for tensor in (*state.model.parameters(), *filter(torch.is_tensor, moments)):
        tensor.data = torch.full_like(tensor, -7)
    assert len(fragments) > len(moments) / 2
    assert all(torch.equal(data, values) for data, values in zip(fragments, before, strict=True))


def test_a_buffer_that_is_not_dense_is_refused_by_name(tmp_path: Path) -> None:
    state = make_state("alone")
    state.model.register_buffer("sparse", torch.zeros(2, 2).to_sparse())
    with pytest.raises(zckpt.UnsupportedError, match=r"sparse, which is a tensor of layout torch\.sparse_coo"):
        zckpt.write(state, tmp_path / "a")


@pytest.mark.parametrize("wrong", [("model", nn.Linear), ("optimizer", "AdamW")])
def test_other_objects_are_refused(wrong: tuple[str, Any]) -> None:
    arguments = {"model": nn.Linear(1, 1), "optimizer": None, wrong[0]: wrong[1]}
    with pytest.raises(TypeError, match=wrong[0]):
        zckpt.TrainState(**arguments)
    with pytest.raises(TypeError, match="not one of 1"):
        zckpt.write((nn.Linear(1, 1),))


@pytest.mark.parametrize(("there", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_weights_that_are_updated_in_16_bits_are_converted_and_the_result_says_so(
    tmp_path: Path, there: torch.dtype, here: torch.dtype
) -> None:
    def make(dtype: torch.dtype) -> zckpt.TrainState:
        model = nn.Linear(8, 8).to(dtype)
        return zckpt.TrainState(model, torch.optim.AdamW(model.parameters()))

    def step(state: zckpt.TrainState) -> None:
        weight = next(state.model.parameters())
        state.model(torch.ones(1, 8, dtype=weight.dtype)).sum().backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()

    written = make(there)
    step(written)
    zckpt.write(written, tmp_path / "c")
    for trained in (False, True):
        state = make(here)
        if trained:
            step(state)
        converted = zckpt.restore(state, tmp_path / "c").converted
        assert converted == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), ("weight", "bias"))
        for ours, theirs in zip(state.model.parameters(), written.model.parameters(), strict=True):
            assert ours.dtype == here
            assert torch.equal(ours, theirs.to(here))
            (moments, stored) = (s.optimizers[0].state[w] for s, w in ((state, ours), (written, theirs)))
            assert torch.equal(moments["exp_avg"], stored["exp_avg"].to(here))
        step(state)
    same = make(there)
    assert zckpt.restore(same, tmp_path / "c").converted == {}


def test_a_restore_keeps_no_fragment_while_it_reads(tmp_path: Path) -> None:
    """Its plans have this memory then, because there may be a hundred thousand fragments."""
    state = make_state("alone")
    train(state, 1)
    zckpt.write(state, tmp_path / "c", pending_gradients="drop")
    kept: list[str] = []
    read = Loader._read

    def look(*arguments: Any) -> None:
        gc.collect()
        fragments = (each for each in gc.get_objects() if type(each) is Fragment)
        kept.extend(each.key for each in fragments if each.part == "exp_avg" and each.data is not None)
        read(*arguments)

    with mock.patch.object(Loader, "_read", look):
        zckpt.restore(state, tmp_path / "c")
    assert kept == []
