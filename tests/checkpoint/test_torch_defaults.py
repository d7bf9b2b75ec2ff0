"""The defaults of torch for new tensors, their device and dtype, do not matter to zckpt: its own tensors name both."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.names_in_code import Code
from tests.support.runs import AFTER, BEFORE, assert_same, tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster

PACKAGE = Path(zckpt.__file__).parent
MAKERS = {
    f"torch.{name}"
    for name in ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
}
"""The functions of torch that zckpt might call and that take the default device."""


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def use_all_calls(directory: str, setup: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    engine = make_engine(**setup, model="gpt2", scheduler=True)
    other = make_engine(**setup, model="gpt2", scheduler=True, seed=1)
    train(engine, BEFORE)
    rank = torch.distributed.get_rank()
    run, path = f"{directory}/run", f"{directory}/run/c"
    mine = {"order": torch.arange(4)}
    with defaults(device, dtype):
        zckpt.write(engine, path, client_state=mine, rank_state={"rank": rank})
        state, states = zckpt.restore(other, run, rng=True, with_rank_state=True)
        assert list(states) == [{"rank": 0}, {"rank": 1}]
        assert state["order"].tolist() == [0, 1, 2, 3]
        zckpt.write(engine, f"{run}/later", background=True)
        zckpt.wait()
        zckpt.attach(engine).save_checkpoint(f"{directory}/attached", "a", mine)
        assert engine.load_checkpoint(f"{directory}/attached")[1]["order"].tolist() == [0, 1, 2, 3]
        zckpt.export(engine, f"{directory}/live", format="pt")
    assert_same(tensors_of(other), tensors_of(engine))
    with defaults(device, dtype), zckpt.offloaded(other, f"{directory}/scratch-{rank}"):
        zckpt.write(other, f"{run}/offloaded")
    assert train(engine, AFTER, BEFORE) == train(other, AFTER, BEFORE)


def use_all_calls_of_one_process(directory: str, device: str, dtype: torch.dtype) -> None:
    path = f"{directory}/run/c"
    with defaults(device, dtype):
        loaded = zckpt.open(path).load()
        assert zckpt.validate(path, level="deep").ok
        assert zckpt.diff(path, f"{directory}/run/offloaded").tensors == ()
        zckpt.cp(path, f"{directory}/copy")
        zckpt.export(path, f"{directory}/exported", format="pt")
        weights = zckpt.get_fp32_state_dict_from_zero_checkpoint(f"{directory}/run")
        zckpt.report(path, f"{directory}/report.html")
        zckpt.convert(path, f"{directory}/deepspeed/a", to="deepspeed")
        zckpt.convert(f"{directory}/deepspeed/a", f"{directory}/converted")
    assert torch.equal(weights["transformer.wte.weight"], loaded["master/transformer.wte.weight"])
    for name in ("run/c", "copy", "converted"):
        assert_same(zckpt.open(f"{directory}/{name}").load(), loaded)


SETUPS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "dtype": "fp32"},
    "1-bf16": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "2-cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3},
}
EVERY_COMMIT = ("3",)


@pytest.mark.parametrize(
    "setup", [pytest.param(name, marks=() if name in EVERY_COMMIT else pytest.mark.matrix) for name in SETUPS]
)
@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float64), ("cpu", torch.bfloat16)])
@pytest.mark.offload
def test_no_call_depends_on_the_defaults(
    cluster: Cluster, tmp_path: Path, setup: str, device: str, dtype: torch.dtype
) -> None:
    cluster.run(use_all_calls, 2, str(tmp_path), SETUPS[setup], device, dtype)
    use_all_calls_of_one_process(str(tmp_path), device, dtype)


def without_device(source: str) -> list[int]:
    """Returns the lines that call one of ``MAKERS`` without ``device``."""
    tree = ast.parse(source)
    code = Code(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and code.meanings(node.func) & MAKERS]
    return [call.lineno for call in calls if "device" not in {keyword.arg for keyword in call.keywords}]


def test_every_new_tensor_names_its_device() -> None:
    unnamed = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in PACKAGE.rglob("*.py")
        if file.parent.name != "testing"  # The reference engine takes the defaults, as engines of frameworks do.
        for line in without_device(file.read_text())
    ]
    assert unnamed == []
    named = "import torch as t; from torch import zeros as z; empty = t.empty\n"
    assert without_device(named + "t.ones(1)\nz(1)\nempty(1)\nt.ones(1, device=d)\nx.ones(1)") == [2, 3, 4]
