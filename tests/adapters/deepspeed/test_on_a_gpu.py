"""An engine on a real GPU, with one rank: a restored run goes on as if it had never stopped.

These tests have the marker ``gpu``. They run in this process, because a process that has used a GPU cannot be forked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.one_rank import one_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = {"device": "cpu"}
FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "model": "odd"},
    "0-fp16": {"stage": 0, "dtype": "fp16", "model": "odd"},
    "0-fp32": {"stage": 0, "dtype": "fp32", "optimizer": "sgd"},
    "1": {"stage": 1, "model": "odd", "groups": True},
    "1-bf16-optimizer": {"stage": 1, "model": "odd", **FP32_GRADIENTS},
    "2": {"stage": 2, "model": "gpt2", "frozen": True, "groups": True, "scheduler": True},
    "2-fp16": {"stage": 2, "dtype": "fp16", "model": "odd"},
    "2-cpu": {"stage": 2, "model": "odd", "offload_optimizer": {**CPU, "pin_memory": True}},
    "3": {"stage": 3, "model": "odd", "groups": True, "scheduler": True},
    "3-fp32-sub-groups": {"stage": 3, "dtype": "fp32", "model": "odd", "sub_group_size": 1000},
    "3-cpu": {"stage": 3, "model": "odd", "offload_optimizer": CPU},
    "3-cpu-parameters": {"stage": 3, "model": "gpt2", "offload_optimizer": CPU, "offload_param": CPU},
}
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # DeepSpeed and others warn in this process


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    import deepspeed

    with one_rank(29512, lambda: deepspeed.init_distributed("nccl")):
        yield


def setup_of(mode: str) -> dict[str, Any]:
    return {"optimizer": "torch_adamw", **MODES[mode]}


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("mode", MODES)
def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path, mode: str, trained: int) -> None:
    from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on

    path = str(tmp_path / "run" / "global_step3")
    through = write_and_go_on(path, setup_of(mode))
    assert_goes_on_alike([through], [restore_and_go_on(path, setup_of(mode), trained)])
    assert zckpt.validate(path).ok


@pytest.mark.parametrize("mode", ["0", "1", "2-cpu", "3", "3-cpu"])
def test_a_run_with_the_optimizers_of_deepspeed_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    """The first engine compiles the optimizer, which takes a minute."""
    from tests.support.runs import assert_goes_on_alike, restore_and_go_on, write_and_go_on

    path, setup = str(tmp_path / "run" / "global_step3"), {**MODES[mode], "optimizer": "adamw"}
    assert_goes_on_alike([write_and_go_on(path, setup)], [restore_and_go_on(path, setup, 0)])


@pytest.mark.parametrize("snapshot", ["copy", "little-memory", "lazy"])
@pytest.mark.parametrize("mode", ["0", "1", "2-fp16", "2-cpu", "3", "3-cpu"])
def test_a_write_in_the_background_is_of_the_state_at_the_call(tmp_path: Path, mode: str, snapshot: str) -> None:
    from tests.support.runs import (
        SNAPSHOTS,
        assert_goes_on_alike,
        restore_and_go_on,
        write_in_background_and_go_on,
    )

    path = str(tmp_path / "run" / "global_step3")
    through = write_in_background_and_go_on(path, setup_of(mode), SNAPSHOTS[snapshot])
    assert_goes_on_alike([through], [restore_and_go_on(path, setup_of(mode), 0)])


@pytest.mark.parametrize(("there", "here"), [("0", "3"), ("3", "1"), ("3-cpu", "2"), ("2", "3-cpu"), ("1", "0")])
def test_other_stages_restore_the_same_state(tmp_path: Path, there: str, here: str) -> None:
    from tests.support.runs import ADAM, assert_same, restore_whole, write_whole

    shape = {"model": "gpt2", "groups": True, "frozen": True, "scheduler": True}
    before = write_whole(str(tmp_path / "global_step3"), {**setup_of(there), **shape}, ADAM)
    after = restore_whole(str(tmp_path / "global_step3"), {**setup_of(here), **shape}, ADAM)
    assert_same(moved(before["logical"]), moved(after["logical"]))
    assert_same(moved(before["weights"]), moved(after["weights"]))
    assert (before["parameters"], before["step"], before["about"]) == (
        after["parameters"], after["step"], after["about"],
    )  # fmt: skip


def moved(tensors: dict[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Returns the tensors in memory of the CPU, because an engine may keep its optimizer there."""
    return {key: tensor.cpu() for key, tensor in tensors.items()}


def test_loaded_and_exported_tensors_are_what_the_engine_held(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.support.models import make_engine, train
    from tests.support.runs import ADAM, assert_same, logical, weights

    engine = make_engine(model="gpt2", optimizer="torch_adamw")
    train(engine, 2)
    zckpt.write(engine, tmp_path / "c")
    expected = logical(engine, ADAM)
    loaded = zckpt.open(tmp_path / "c").load(list(expected), device="cuda")
    assert {tensor.device.type for tensor in loaded.values()} == {"cuda"}
    assert_same(expected, loaded)
    zckpt.export(engine, tmp_path / "live")
    exported = load_file(tmp_path / "live" / "model.safetensors")
    held = moved(weights(engine))
    assert exported
    assert all(torch.equal(tensor, held[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_attached_engine_saves_and_loads(tmp_path: Path, stage: int) -> None:
    from tests.support.models import make_engine, train
    from tests.support.runs import everything

    setup: dict[str, Any] = {"stage": stage, "model": "gpt2", "optimizer": "torch_adamw", "scheduler": True}
    engine = zckpt.attach(make_engine(**setup))
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "run", client_state={"epoch": 3})
    held = everything(engine)
    other = zckpt.attach(make_engine(**setup, seed=1))
    _, client_state = other.load_checkpoint(tmp_path / "run")
    assert client_state["epoch"] == 3
    assert everything(other) == held
    assert train(other, 2, 2) == train(engine, 2, 2)


@pytest.mark.parametrize("kind", ["8bit", "4bit", "Fp8"])
def test_a_run_with_torchao_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchao")
    from tests.support.composed import SETUPS, resume

    resume(str(tmp_path), SETUPS, f"torchao {kind}")


@pytest.mark.parametrize(("kind", "stage"), [("nf4", 0), ("nf4", 2), ("nf4-bf16", 3), ("int8", 2), ("fp4-once", 1)])
def test_a_fresh_engine_gets_the_quantized_base(tmp_path: Path, kind: str, stage: int) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.support.qlora_runs import write_and_restore

    write_and_restore(tmp_path, kind, stage)


@pytest.mark.offload
@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_offloaded_states_come_back_and_their_memory_is_free_meanwhile(
    tmp_path: Path, stage: int, background: bool
) -> None:
    from tests.support.models import make_engine, train
    from tests.support.runs import everything

    setup: dict[str, Any] = {"stage": stage, "model": "wide", "optimizer": "torch_adamw"}
    engine, other = make_engine(**setup), make_engine(**setup)
    assert train(engine, 2) == train(other, 2)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    moved = zckpt.offload(engine, tmp_path / "scratch", background=background)
    moved.wait()
    assert torch.cuda.memory_allocated() < before_bytes
    zckpt.reload(engine)
    assert everything(engine) == everything(other)
    assert train(engine, 2, 2) == train(other, 2, 2)
