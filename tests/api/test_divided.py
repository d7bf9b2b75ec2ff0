"""Checkpoints whose tensors are stored in the order of a grid, as ranks of tensor parallelism have them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import zckpt
from tests.support.independent_reader import Reader
from tests.support.states import Written, same_all, write_state
from zckpt.geometry import slice_of
from zckpt.reading.statistics import statistics, stretches

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module", params=range(3))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_state(tmp_path_factory.mktemp("run") / "c", 4, layout="divided", seed=request.param)


def test_it_needs_the_feature_and_says_the_order(written: Written) -> None:
    body = Reader(written.path).body
    assert body["requires"] == ["box"]
    assert len(body["grids"]) > 1
    assert zckpt.validate(written.path).ok
    parts = zckpt.open(written.path).contents.manifest.parts
    assert [any(part.grid_ids) for part in parts] == [part.name != "state" for part in parts]


def test_loads_give_the_values(written: Written) -> None:
    checkpoint, independent = zckpt.open(written.path), Reader(written.path)
    assert same_all(checkpoint.load(), written.full)
    for verify in (True, False):
        assert same_all(checkpoint.load(verify=verify), written.full)
    for key, value in written.full.items():
        assert independent.load(key) == value.contiguous().numpy().tobytes(), key
        index = tuple(slice(size // 3, max(size - 1, 1)) for size in value.shape)
        assert torch.equal(checkpoint.load_slice(key, index), value[index])
    for rank, pieces in enumerate(written.ranks):
        loaded = checkpoint.load_pieces(rank)
        assert same_all({place: data for place, data in loaded.items() if data.numel()}, pieces)


def test_it_is_equal_to_the_same_values_in_row_major_order(written: Written, tmp_path: Path) -> None:
    values = {key.removeprefix("master/"): value for key, value in written.full.items() if key.startswith("master/")}
    write_state(tmp_path / "plain", 2, values, parts=("master",))
    difference = zckpt.diff(written.path, tmp_path / "plain", "master/*")
    assert (list(difference.tensors), list(difference.only_in_a), list(difference.only_in_b)) == ([], [], [])
    values["big"] = values["big"] + 1
    write_state(tmp_path / "other", 3, values, parts=("master",))
    (changed,) = zckpt.diff(written.path, tmp_path / "other", "master/*").tensors
    assert changed.key == "master/big"


def test_statistics_are_those_of_the_values(written: Written) -> None:
    checkpoint = zckpt.open(written.path)
    infos = list(checkpoint.values())
    found = statistics(checkpoint, infos, list(stretches(checkpoint, infos)), lambda nbytes: None)
    for info, of_tensor in zip(infos, found, strict=True):
        value = written.full[info.key].double()
        assert of_tensor.numel == value.numel()
        if value.numel():
            assert (of_tensor.min, of_tensor.max) == (float(value.min()), float(value.max())), info.key


def test_copies_and_repairs_keep_the_order(written: Written, tmp_path: Path) -> None:
    zckpt.cp(written.path, tmp_path / "copy", "master/*")
    copied = zckpt.open(tmp_path / "copy")
    assert copied.contents.manifest.grids == zckpt.open(written.path).contents.manifest.grids
    assert same_all(copied.load(), {key: value for key, value in written.full.items() if key.startswith("master/")})
    shutil.copytree(written.path, tmp_path / "lost")
    (tmp_path / "lost" / "manifest.msgpack").unlink()
    zckpt.repair(tmp_path / "lost")
    assert zckpt.validate(tmp_path / "lost").ok
    assert same_all(zckpt.open(tmp_path / "lost").load(), written.full)


def test_slices_that_are_consecutive_are_spans_in_row_major_order() -> None:
    numbers = np.arange(60).reshape(3, 4, 5)
    _, span = slice_of(numbers.shape, (slice(1, 2), slice(1, 3)))
    assert span.grid.sections == ()
    assert numbers.ravel()[span.start : span.stop].tolist() == numbers[1:2, 1:3].ravel().tolist()
