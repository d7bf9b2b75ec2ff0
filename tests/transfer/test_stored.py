"""Tensors whose values are in a file are read right, whatever their strides are."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
import torch

from zckpt.errors import StorageError
from zckpt.plan.inventory import FileRange
from zckpt.transfer import stored
from zckpt.transfer.values_digest import values_digest

if TYPE_CHECKING:
    from pathlib import Path

OFFSET, NUMEL = 12, 20_000


def place_of(path: Path) -> FileRange:
    path.write_bytes(bytes(OFFSET) + torch.arange(NUMEL, dtype=torch.int32).numpy().tobytes())
    return FileRange(str(path), OFFSET, 4 * NUMEL)


@pytest.mark.parametrize("seed", range(5))
def test_any_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(stored, "PORTION_BYTES", 400)
    monkeypatch.setattr(stored, "GAP_BYTES", 40)
    place, chance, whole = place_of(tmp_path / "file"), random.Random(seed), torch.arange(NUMEL, dtype=torch.int32)
    cases = 0
    while cases < 60:
        dims = range(chance.randrange(5))
        sizes = [chance.choice((0, 1, 1, 2, 3, 7, 30)) for _ in dims]
        strides = [chance.choice((0, 1, 2, 3, 30, 200, 5000)) for _ in dims]
        first = chance.randrange(100)
        last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
        if last < NUMEL and math.prod(sizes) < 2000:
            actual = stored.read_strided(place, torch.int32, first, sizes, strides)
            assert actual.is_contiguous()
            assert torch.equal(actual, whole.as_strided(sizes, strides, first)), (sizes, strides, first)
            cases += 1


def test_a_tensor_knows_its_place(tmp_path: Path) -> None:
    place = place_of(tmp_path / "file")
    tensor = torch.empty(0, dtype=torch.int32, device="meta").set_(stored.stored_storage(place), 4, (5, 3), (3, 1))
    assert stored.stored_range(tensor) == place.narrow(16, 60)
    assert stored.stored_range(tensor.view(-1)[2:4].detach()) == place.narrow(24, 8)
    assert torch.equal(stored.with_values(tensor), torch.arange(4, 19, dtype=torch.int32).view(5, 3))
    assert stored.in_order(tensor) is tensor
    assert torch.equal(stored.in_order(tensor.t()), torch.arange(4, 19, dtype=torch.int32).view(5, 3).t())
    in_memory = torch.ones(3, 2)
    assert stored.stored_range(in_memory) is None
    assert stored.stored_range(torch.empty(3, device="meta")) is None
    assert stored.with_values(in_memory) is in_memory


def test_the_digest_is_that_of_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zckpt.transfer.values_digest.PORTION_BYTES", 400)
    place, whole = place_of(tmp_path / "file"), torch.arange(NUMEL, dtype=torch.int32)
    storage = stored.stored_storage(place)
    tensor = torch.empty(0, dtype=torch.int32, device="meta").set_(storage, 0, (200, 100), (100, 1))
    assert values_digest(tensor) == values_digest(whole)
    assert values_digest(tensor.t()) == values_digest(whole.view(200, 100).t())
    assert values_digest(tensor) != values_digest(whole + 1)


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    place = place_of(tmp_path / "file")
    with pytest.raises(StorageError, match="ends too early") as raised:
        stored.read_strided(FileRange(place.path, place.offset, 1 << 20), torch.int32, 0, [NUMEL + 1], [1])
    assert (raised.value.file, raised.value.start) == (place.path, OFFSET + 4 * NUMEL)
