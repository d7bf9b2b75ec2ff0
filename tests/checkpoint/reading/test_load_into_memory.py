"""Loads into memory of the caller, and into dtypes that the caller names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.coded import Coded
from tests.support.states import same, same_all, write_state
from zckpt.checkpoint.reading import loader as reading

if TYPE_CHECKING:
    from pathlib import Path


def test_into_memory_of_the_callers(tmp_path: Path) -> None:
    state = write_state(tmp_path / "c", 2, {"a": (300, 1024), "b": (5,)}, parts=("master",))
    checkpoint = zckpt.open(tmp_path / "c")
    out = {"master/a": torch.empty(300, 1024)}
    loaded = checkpoint.load(["master/*"], out=out)
    assert loaded.keys() == {"master/a", "master/b"}
    assert loaded["master/a"] is out["master/a"]
    assert same_all(loaded, state.full)
    half = torch.empty(300, 1024, dtype=torch.bfloat16)
    checkpoint.load("master/a", out={"master/a": half})
    assert torch.equal(half, state.full["master/a"].bfloat16())


def test_out_says_what_is_loaded(tmp_path: Path) -> None:
    state = write_state(tmp_path / "c", 1, {"a": (30,), "b": (5,)}, parts=("master",), aliases={"tied": "a"})
    checkpoint = zckpt.open(tmp_path / "c")
    out = {"master/tied": torch.zeros(30)}
    before = checkpoint.io.data_bytes
    assert checkpoint.load(out=out)["master/tied"] is out["master/tied"]
    assert torch.equal(out["master/tied"], state.full["master/a"])
    assert checkpoint.io.data_bytes - before < 4096, "nothing else was read"
    assert checkpoint.load(out={}) == {}
    unasked = {"master/b": torch.full((5,), 7.0)}
    for keys in (None, "master/a", ["master/a", "master/b"], lambda key: True):
        with pytest.raises((zckpt.KeyNotFoundError, zckpt.MismatchError), match="master/c"):
            checkpoint.load(keys, out={**unasked, "master/c": torch.zeros(5)})
    with pytest.raises(zckpt.MismatchError, match="out has master/b"):
        checkpoint.load("master/a", out=unasked)
    assert torch.equal(unasked["master/b"], torch.full((5,), 7.0))
    with pytest.raises(TypeError, match="out must be a dict"):
        checkpoint.load(out=[torch.zeros(5)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"out\['master/b'\] must .*numpy.ndarray.*torch.from_numpy"):
        checkpoint.load(out={"master/b": np.zeros(5)})  # type: ignore[dict-item]


def test_a_load_in_inference_mode_is_converted_too(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, {"a": torch.arange(6.0)})
    checkpoint = zckpt.open(tmp_path / "c")
    with torch.inference_mode():
        assert torch.equal(checkpoint.state_dict(dtype="bfloat16")["a"], torch.arange(6.0, dtype=torch.bfloat16))
    trained = torch.nn.Parameter(torch.zeros(6, dtype=torch.float16))
    checkpoint.load(out={"master/a": trained})
    assert torch.equal(trained, torch.arange(6.0, dtype=torch.float16))


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_of_which_only_the_first_are_planned_before_the_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inference: bool
) -> None:
    monkeypatch.setattr(reading, "FIRST_TENSORS", 1)
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    state = {f"w{number}": torch.arange(number + 1).to(dtypes[number % 3]) for number in range(9)}
    written = write_state(tmp_path / "c", 2, state, parts=("master",), aliases={"tied": "w7"})
    checkpoint = zckpt.open(tmp_path / "c")
    out = {f"master/w{number}": torch.zeros_like(state[f"w{number}"]) for number in (0, 4, 8)}
    out["master/w5"] = torch.empty_like(state["w5"], device="meta")
    with torch.inference_mode(inference):
        loaded = checkpoint.load(["master/*", "master/tied"], out=out)
    assert list(loaded) == [*checkpoint, "master/tied"]
    for key, tensor in loaded.items():
        value = written.full["master/w7" if key == "master/tied" else key]
        assert tensor is out[key] if key in out else tensor.is_inference() == inference
        assert tensor.is_meta if key == "master/w5" else same(tensor.clone(), value)
    file = tmp_path / "c" / checkpoint["master/w0"].files[0]
    file.write_bytes(file.read_bytes()[:-1])
    untouched = {key: torch.full_like(value, 7) for key, value in written.full.items()}
    with pytest.raises(zckpt.FormatError, match="F003"):
        zckpt.open(tmp_path / "c").load(out=untouched)
    assert all((value == 7).all() for value in untouched.values())


def test_a_dtype_by_its_name(tmp_path: Path) -> None:
    state = write_state(tmp_path / "c", 1, {"a": (30,)}, parts=("master",))
    checkpoint, value = zckpt.open(tmp_path / "c"), state.full["master/a"]
    wrong: tuple[Any, ...] = ("half", "float", "complex128", torch.complex128, np.dtype("float32"), 16)
    for load in (
        lambda dtype: checkpoint.load(dtype=dtype)["master/a"],
        lambda dtype: dict(checkpoint.iter(dtype=dtype))["master/a"],
        lambda dtype: checkpoint.load_slice("master/a", slice(None), dtype=dtype),
        lambda dtype: checkpoint.state_dict(dtype=dtype)["a"],
    ):
        for name in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16):
            assert same(load(name), value.bfloat16())
        for name in wrong:
            with pytest.raises(ValueError, match=r"dtype must be one of .*bfloat16"):
                load(name)


def freed() -> torch.Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (torch.empty(5, 1), zckpt.MismatchError),
        (torch.empty(10)[::2], zckpt.MismatchError),
        (freed(), zckpt.MismatchError),
        (Coded(torch.zeros(5, dtype=torch.int8), torch.ones(1)), zckpt.MismatchError),
        (torch._neg_view(torch.empty(5)), zckpt.MismatchError),
        (torch.empty(5, dtype=torch.int32), zckpt.CastError),
    ],
)
def test_memory_that_does_not_fit_is_refused(tmp_path: Path, given: torch.Tensor, error: type[Exception]) -> None:
    write_state(tmp_path / "c", 1, {"a": (5,), "b": (5,)}, parts=("master",))
    first = torch.full((5,), 7.0)
    with pytest.raises(error, match="master/b"):
        zckpt.open(tmp_path / "c").load(out={"master/a": first, "master/b": given})
    assert torch.equal(first, torch.full((5,), 7.0))
