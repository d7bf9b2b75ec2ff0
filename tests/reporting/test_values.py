"""What is found of the values of several checkpoints is what torch says of the tensors, and little is read for it."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.states import Written, write_state
from zckpt.reporting import values as module
from zckpt.reporting.values import EXPONENT_BIAS, Values, joined, look

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.reading.statistics import Statistics

NAN, INF = math.nan, math.inf


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "large": torch.randn(70, 601),
        "half": torch.randn(3001).bfloat16(),
        "double": torch.randn(50, dtype=torch.float64) * 1e-300,
        "whole": torch.randint(-1000, 1000, (4001,)),
        "complex": torch.randn(31, dtype=torch.complex64),
        "flags": torch.arange(20) % (seed + 2) == 0,
        "odd": torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -2.0 - seed, 1e-45]),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(1.5 + seed),
        "frozen": torch.linspace(-1, 1, 5000),
    }


def plain(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).double()


def expected_histogram(tensor: torch.Tensor) -> dict[int, int]:
    """By way of Python's own floats."""
    found: Counter[int] = Counter()
    for value in plain(tensor).tolist():
        if value and math.isfinite(value):
            exponent = math.frexp(value)[1] - 1
            found[int(math.copysign(exponent + EXPONENT_BIAS, value))] += 1
    return dict(found)


def assert_is(found: Values | None, tensor: torch.Tensor, before: torch.Tensor | None) -> None:
    assert found is not None
    assert_are(found.statistics, plain(tensor))
    assert dict(found.histogram) == expected_histogram(tensor)
    if before is None:
        assert found.update is None
    else:
        assert found.update is not None
        assert_are(found.update, plain(tensor) - plain(before))


def assert_are(found: Statistics, values: torch.Tensor) -> None:
    finite = values[values.isfinite()]
    assert (found.numel, found.nan, found.inf) == (len(values), int(values.isnan().sum()), int(values.isinf().sum()))
    assert found.zeros == int((finite == 0).sum())
    if len(finite):
        assert (found.min, found.max) == (float(finite.min()), float(finite.max()))
    assert found.norm == pytest.approx(float(finite.norm()), rel=1e-12)
    assert found.sum == pytest.approx(float(finite.sum()), rel=1e-9, abs=1e-9)


def written(directory: Path, layouts: list[tuple[str, int]]) -> list[dict[str, torch.Tensor]]:
    """A checkpoint for each layout, in ``directory``/<number>; what each has in it."""
    found = []
    for number, (layout, world_size) in enumerate(layouts):
        found.append(tensors(number))
        place = directory / str(number)
        write_state(place, world_size, found[-1], layout=layout, parts=("master",), seed=number, step=number)
    return found


def opened(directory: Path, count: int) -> list[zckpt.Checkpoint]:
    return [zckpt.open(directory / str(number)) for number in range(count)]


@pytest.mark.parametrize("size", [1, 3])
def test_of_each_tensor_and_of_its_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However each checkpoint is cut, and by whichever number of processes it is looked at."""
    monkeypatch.setattr(module, "STRETCH_BYTES", 1 << 14)
    monkeypatch.setattr("zckpt.reading.statistics.STRETCH_BYTES", 1 << 14)
    monkeypatch.setattr(module, "AT_ONCE", 1000)
    full = written(tmp_path, [("zero3", 3), ("random", 2), ("random", 3)])
    shares = [look(opened(tmp_path, 3), number, size) for number in range(size)]
    assert all(errors == [[], [], []] for _, errors in shares)
    for n, one in enumerate(full):
        rows = [{key: value and value.row for key, value in found[n].items()} for found, _ in shares]
        found = joined([{key: row and Values.of_row(row) for key, row in share.items()} for share in rows])
        assert found.keys() == {f"master/{name}" for name in one}
        for name, tensor in one.items():
            assert_is(found[f"master/{name}"], tensor, full[n - 1][name] if n else None)


def test_no_byte_is_read_twice_and_none_of_what_is_equal(tmp_path: Path) -> None:
    full = written(tmp_path, [("zero3", 2)] * 3)
    checkpoints = opened(tmp_path, 3)
    look(checkpoints)
    total = sum(tensor.nbytes for tensor in full[0].values())
    frozen = full[0]["frozen"].nbytes
    assert [one.io.data_bytes for one in checkpoints] == [total, total - frozen, total - frozen]


def test_a_tensor_that_is_new_or_has_another_shape_has_no_update(tmp_path: Path) -> None:
    states = [
        {"grown": torch.ones(3), "kept": torch.ones(9), "lost": torch.ones(2)},
        {"grown": torch.ones(4), "kept": torch.zeros(9), "new": torch.ones(5)},
        {"grown": torch.zeros(4), "kept": torch.zeros(9), "lost": torch.ones(2), "new": torch.ones(5)},
    ]
    for number, state in enumerate(states):
        write_state(tmp_path / str(number), 2, state, parts=("master",), step=number)
    found, _ = look(opened(tmp_path, 3))
    updates = [{key[7:]: one and one.update and one.update.norm for key, one in of_one.items()} for of_one in found]
    assert updates[0] == {"grown": None, "kept": None, "lost": None}
    assert updates[1] == {"grown": None, "kept": 3.0, "new": None}
    assert updates[2] == {"grown": 2.0, "kept": 0.0, "lost": None, "new": 0.0}


def flip(one: Written, file: str, place: int = -1) -> None:
    (found,) = one.path.glob(f"data-*/{file}")
    raw = bytearray(found.read_bytes())
    raw[place] ^= 1
    found.write_bytes(raw)


def test_what_is_damaged_is_left_out_and_said(tmp_path: Path) -> None:
    """In the middle of three checkpoints: one tensor has a wrong bit, and a file of another part is missing."""
    state = [{"a": torch.full((5000,), float(n)), "b": torch.full((5000,), float(n))} for n in range(3)]
    made = [write_state(tmp_path / str(n), 2, one, parts=("master", "exp_avg"), step=n) for n, one in enumerate(state)]
    flip(made[1], "rank-00001/master.safetensors")
    (gone,) = made[1].path.glob("data-*/rank-00000/exp_avg.safetensors")
    gone.unlink()
    found, errors = look(opened(tmp_path, 3))
    damaged = next(key for key, one in found[1].items() if one is None and key.startswith("master"))
    assert {key for key, one in found[1].items() if one is None} == {damaged, "exp_avg/a", "exp_avg/b"}
    assert sorted(error.rule or "" for error in errors[1]) == ["D003", "F001", "F001"]
    assert errors[0] == errors[2] == []
    assert [key for n in (0, 2) for key, one in found[n].items() if one is None] == []
    updates = {key: one is not None and one.update is not None for key, one in found[2].items()}
    assert updates == {key: found[1][key] is not None for key in updates}, "against the one before, or not at all"
