"""Checkpoints whose tensors are stored in the order of a grid, as ranks of tensor parallelism have them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.independent_reader import Reader
from tests.support.states import Written, fragment, same_all, write_state
from zckpt import orders
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading import loader as reading
from zckpt.checkpoint.reading.checkpoint import Checkpoint, loader_of
from zckpt.geometry import Grid, all_of, slice_of
from zckpt.orders import row_count
from zckpt.plan import catalog
from zckpt.testing.fragments import write_fragments
from zckpt.tools.comparing.tensors import Pair, unequal
from zckpt.tools.statistics import statistics, stretches
from zckpt.tools.validating.values import derived_weights

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
    parts = open_loader(written.path).contents.manifest.parts
    assert [part.grid_ids.any() for part in parts] == [part.name != "state" for part in parts]


def test_loads_give_the_values(written: Written) -> None:
    checkpoint, independent = zckpt.open(written.path), Reader(written.path)
    assert same_all(checkpoint.load(), written.full)
    for verify in (True, False):
        assert same_all(checkpoint.load(verify=verify), written.full)
    for dtype in (torch.bfloat16, torch.float64):
        assert same_all(checkpoint.load(dtype=dtype), {key: value.to(dtype) for key, value in written.full.items()})
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
    difference = zckpt.diff(tmp_path / "plain", written.path, "master/*")
    assert (list(difference.tensors), list(difference.only_in_a), list(difference.only_in_b)) == ([], [], [])
    difference = zckpt.diff(written.path, tmp_path / "plain", "master/*")
    assert (list(difference.tensors), list(difference.only_in_a), list(difference.only_in_b)) == ([], [], [])
    values["big"] = values["big"] + 1
    write_state(tmp_path / "other", 3, values, parts=("master",))
    (changed,) = zckpt.diff(written.path, tmp_path / "other", "master/*").tensors
    assert changed.key == "master/big"


def test_tensors_in_different_orders_are_compared_row_by_row(written: Written, tmp_path: Path) -> None:
    """In the order of the boxes of one checkpoint, the bytes of the other one would be read once for each box."""
    values = {key.removeprefix("master/"): value for key, value in written.full.items() if key.startswith("master/")}
    write_state(tmp_path / "plain", 2, values, parts=("master",))
    divided, plain = open_loader(written.path), open_loader(tmp_path / "plain")
    keys = [
        key
        for key, info in plain.contents.items()
        if divided.contents.grid(divided.contents[key]).sections and info.nbytes
    ]
    assert keys
    for a, b in ((divided, plain), (plain, divided)):
        compared = [(Pair(key, a.contents[key], b.contents[key]), 0, 0) for key in keys]
        for key, (starts, spans) in zip(keys, unequal(a, b, compared), strict=True):
            assert spans == [all_of(plain.contents[key].shape)]
            assert starts.tolist() == [piece.start for piece in plain.contents[key].pieces]


def test_statistics_are_those_of_the_values(written: Written) -> None:
    checkpoint = open_loader(written.path)
    infos = list(checkpoint.contents.values())
    found = statistics(checkpoint, infos, list(stretches(checkpoint, infos)), lambda nbytes: None)
    for info, of_tensor in zip(infos, found, strict=True):
        value = written.full[info.key].double()
        assert of_tensor.numel == value.numel()
        if value.numel():
            assert (of_tensor.min, of_tensor.max) == (float(value.min()), float(value.max())), info.key


def test_copies_and_repairs_keep_the_order(written: Written, tmp_path: Path) -> None:
    zckpt.cp(written.path, tmp_path / "copy", "master/*")
    copied = zckpt.open(tmp_path / "copy")
    assert loader_of(copied).contents.manifest.grids == open_loader(written.path).contents.manifest.grids
    assert same_all(copied.load(), {key: value for key, value in written.full.items() if key.startswith("master/")})
    shutil.copytree(written.path, tmp_path / "lost")
    (tmp_path / "lost" / "manifest.msgpack").unlink()
    zckpt.repair(tmp_path / "lost")
    assert zckpt.validate(tmp_path / "lost").ok
    assert same_all(zckpt.open(tmp_path / "lost").load(), written.full)


def test_more_rows_of_runs_than_memory_allows_are_refused(written: Written) -> None:
    with mock.patch.object(orders, "ROWS_MAX", 0), pytest.raises(zckpt.UnsupportedError, match="smaller slices"):
        zckpt.open(written.path).load()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("columns", [1 << 10, 1 << 3])
def test_a_tensor_that_is_cut_in_its_columns_is_read_once(columns: int, verify: bool, tmp_path: Path) -> None:
    """This holds for all of it, and for a part of its rows, however short the runs of adjacent elements are."""
    value = torch.randn((1 << 20) // columns, columns)
    grid = Grid(tuple(value.shape), ((), tuple(((columns // 4 * rank, columns // 4),) for rank in range(4))))
    spans = [grid.box(rank) for rank in range(4)]
    ranks = [[fragment("master", "w", value, *span[1:], grid=grid)] for span in spans]
    write_fragments(str(tmp_path / "c"), ranks, catalog.SaveMetadata(1, 4096, {}, b"\xc0", {}))
    some_rows = value[len(value) // 4 : len(value) // 2]
    for wanted, load in (
        (value, lambda checkpoint: checkpoint.load(verify=verify)["master/w"]),
        (
            some_rows,
            lambda checkpoint: checkpoint.load_slice(
                "master/w", slice(len(value) // 4, len(value) // 2), verify=verify
            ),
        ),
    ):
        checkpoint = zckpt.open(tmp_path / "c")
        assert torch.equal(load(checkpoint), wanted)
        assert checkpoint.io.bytes_read <= 1.05 * wanted.nbytes
        assert checkpoint.io.reads <= 32


def test_weights_are_compared_with_masters_in_the_same_order_only(tmp_path: Path) -> None:
    value = torch.randn(4, 6)
    grid = Grid((4, 6), ((), (((0, 2),), ((2, 4),))))
    for number, (of_master, same) in enumerate([(grid, True), (Grid((4, 6)), False)]):
        fragments = [
            fragment("master", "w", value, 0, 24, grid=of_master),
            fragment("param", "w", value.bfloat16(), 0, 24, grid=grid),
        ]
        metadata = catalog.SaveMetadata(1, 4096, {}, b"\xc0", {})
        write_fragments(str(tmp_path / str(number)), [fragments], metadata)
        checkpoint = open_loader(tmp_path / str(number))
        assert derived_weights(checkpoint.contents) == ({"w": "BF16"} if same else {})
        assert zckpt.validate(tmp_path / str(number)).ok


def test_reads_in_another_order_are_planned_in_batches(written: Written) -> None:
    checkpoint = open_loader(written.path)
    with (
        mock.patch.object(reading, "PLANNED_PIECES", 64),
        mock.patch.object(checkpoint, "_plan", wraps=checkpoint._plan) as planned,
    ):
        assert same_all(Checkpoint(checkpoint).load(), written.full)
    batches = [call.args[0] for call in planned.call_args_list]
    assert [key for batch in batches for key in batch.tensors.keys] == list(checkpoint.contents)
    for batch in batches:
        counts = list(map(row_count, batch.spans, batch.tensors.grids))
        assert len(counts) == 1 or sum(counts) <= 64


def test_ranges_with_long_gaps_between_them_are_planned_in_batches(tmp_path: Path) -> None:
    """Without digests, each range is read by itself. With digests, whole blocks are read, in one plan."""
    values = [torch.randn(8, 1 << 16) for _ in range(3)]
    fragments = [fragment("master", f"w{n}", value, 0, value.numel()) for n, value in enumerate(values)]
    write_fragments(str(tmp_path / "c"), [fragments], catalog.SaveMetadata(1, 4096, {}, b"\xc0", {}))
    for verify, count in ((True, 1), (False, 3)):
        checkpoint = open_loader(tmp_path / "c")
        requests = []
        for info in checkpoint.contents.values():
            shape, span = slice_of(info.shape, (slice(None), slice(5, 9)))
            requests.append(reading.ReadRequest(info, span, torch.empty(shape)))
        with (
            mock.patch.object(reading, "PLANNED_PIECES", 32),
            mock.patch.object(checkpoint, "_plan", wraps=checkpoint._plan) as planned,
        ):
            checkpoint.read(requests, verify=verify)
        assert len(planned.call_args_list) == count
        for request, value in zip(requests, values, strict=True):
            assert torch.equal(request.target, value[:, 5:9])
