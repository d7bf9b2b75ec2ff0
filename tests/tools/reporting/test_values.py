"""The statistics of several checkpoints are those that torch computes of the tensors, and few bytes are read."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.states import Written, write_state
from zckpt.checkpoint.open import open_loader
from zckpt.tools.reporting import values as module
from zckpt.tools.reporting.values import EXPONENT_BIAS, TensorStatistics, joined, look

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.tools.statistics import Statistics

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
    """Returns the histogram of a tensor, computed with Python's own floats."""
    counts: Counter[int] = Counter()
    for value in plain(tensor).tolist():
        if value and math.isfinite(value):
            exponent = math.frexp(value)[1] - 1
            counts[int(math.copysign(exponent + EXPONENT_BIAS, value))] += 1
    return dict(counts)


def assert_is(values: TensorStatistics | None, tensor: torch.Tensor, before: torch.Tensor | None) -> None:
    assert values is not None
    assert_are(values.statistics, plain(tensor))
    assert dict(values.histogram) == expected_histogram(tensor)
    if before is None:
        assert values.update is None
    else:
        assert values.update is not None
        assert_are(values.update, plain(tensor) - plain(before))


def assert_are(statistics: Statistics, values: torch.Tensor) -> None:
    finite = values[values.isfinite()]
    assert (statistics.numel, statistics.nan, statistics.inf) == (
        len(values),
        int(values.isnan().sum()),
        int(values.isinf().sum()),
    )
    assert statistics.zeros == int((finite == 0).sum())
    if len(finite):
        assert (statistics.min, statistics.max) == (float(finite.min()), float(finite.max()))
    assert statistics.norm == pytest.approx(float(finite.norm()), rel=1e-12)
    assert statistics.sum == pytest.approx(float(finite.sum()), rel=1e-9, abs=1e-9)


def written(directory: Path, layouts: list[tuple[str, int]]) -> list[dict[str, torch.Tensor]]:
    """Writes a checkpoint for each layout to ``directory``/<number>, and returns the tensors of each."""
    states = []
    for number, (layout, world_size) in enumerate(layouts):
        states.append(tensors(number))
        place = directory / str(number)
        write_state(place, world_size, states[-1], layout=layout, parts=("master",), seed=number, step=number)
    return states


def opened(directory: Path, count: int) -> list[Loader]:
    return [open_loader(directory / str(number)) for number in range(count)]


@pytest.mark.parametrize("size", [1, 3])
def test_statistics_of_tensors_and_updates_do_not_depend_on_the_layout_or_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(module, "STRETCH_BYTES", 1 << 14)
    monkeypatch.setattr("zckpt.tools.statistics.STRETCH_BYTES", 1 << 14)
    monkeypatch.setattr(module, "AT_ONCE", 1000)
    full = written(tmp_path, [("zero3", 3), ("random", 2), ("random", 3)])
    shares = [look(opened(tmp_path, 3), number, size) for number in range(size)]
    assert all(errors == [[], [], []] for _, errors in shares)
    for n, state in enumerate(full):
        values_by_key = joined([values[n] for values, _ in shares])
        assert values_by_key.keys() == {f"master/{name}" for name in state}
        for name, tensor in state.items():
            assert_is(values_by_key[f"master/{name}"], tensor, full[n - 1][name] if n else None)


def test_no_byte_is_read_twice_and_equal_tensors_are_read_once(tmp_path: Path) -> None:
    full = written(tmp_path, [("zero3", 2)] * 3)
    checkpoints = opened(tmp_path, 3)
    look(checkpoints)
    total = sum(tensor.nbytes for tensor in full[0].values())
    frozen = full[0]["frozen"].nbytes
    assert [checkpoint.reader.count.data_bytes for checkpoint in checkpoints] == [total, total - frozen, total - frozen]


def test_a_tensor_that_is_new_or_has_another_shape_has_no_update(tmp_path: Path) -> None:
    states = [
        {"grown": torch.ones(3), "kept": torch.ones(9), "lost": torch.ones(2)},
        {"grown": torch.ones(4), "kept": torch.zeros(9), "new": torch.ones(5)},
        {"grown": torch.zeros(4), "kept": torch.zeros(9), "lost": torch.ones(2), "new": torch.ones(5)},
    ]
    for number, state in enumerate(states):
        write_state(tmp_path / str(number), 2, state, parts=("master",), step=number)
    values, _ = look(opened(tmp_path, 3))
    updates = [{key[7:]: v and v.update and v.update.norm for key, v in by_key.items()} for by_key in values]
    assert updates[0] == {"grown": None, "kept": None, "lost": None}
    assert updates[1] == {"grown": None, "kept": 3.0, "new": None}
    assert updates[2] == {"grown": 2.0, "kept": 0.0, "lost": None, "new": 0.0}


def flip(written: Written, name: str, place: int = -1) -> None:
    (file,) = written.path.glob(f"data-*/{name}")
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


def test_damaged_tensors_have_errors_and_no_statistics(tmp_path: Path) -> None:
    """The second of three checkpoints has a tensor with a wrong bit, and lacks a file of another part."""
    states = [{"a": torch.full((5000,), float(n)), "b": torch.full((5000,), float(n))} for n in range(3)]
    checkpoints = [
        write_state(tmp_path / str(n), 2, s, parts=("master", "exp_avg"), step=n) for n, s in enumerate(states)
    ]
    flip(checkpoints[1], "rank-00001/master.safetensors")
    (lost_file,) = checkpoints[1].path.glob("data-*/rank-00000/exp_avg.safetensors")
    lost_file.unlink()
    values, errors = look(opened(tmp_path, 3))
    damaged = next(key for key, v in values[1].items() if v is None and key.startswith("master"))
    assert {key for key, v in values[1].items() if v is None} == {damaged, "exp_avg/a", "exp_avg/b"}
    assert sorted(error.rule or "" for error in errors[1]) == ["D003", "F001", "F001"]
    assert errors[0] == errors[2] == []
    assert [key for n in (0, 2) for key, v in values[n].items() if v is None] == []
    updates = {key: v is not None and v.update is not None for key, v in values[2].items()}
    assert updates == {key: values[1][key] is not None for key in updates}, (
        "compared with the one before, or not at all"
    )
