"""The sums by which replicas on GPUs are compared. Here they are computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from zckpt.geometry import all_of
from zckpt.plan.inventory import PARAM, Fragment
from zckpt.tools.converting.replica_sums import sum_of
from zckpt.transfer import values_digest
from zckpt.transfer.torch_dtypes import DTYPE_NAMES
from zckpt.transfer.values_digest import portion_sums


@pytest.mark.parametrize("portion_bytes", [16, 8 << 20])
@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 50])
def test_any_changed_byte_changes_the_sums(monkeypatch: pytest.MonkeyPatch, portion_bytes: int, nbytes: int) -> None:
    monkeypatch.setattr(values_digest, "PORTION_BYTES", portion_bytes)
    room = torch.randint(256, (nbytes + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = room[3:]  # an address at which no int64 may lie
    sums = portion_sums(values)
    assert len(sums) == -(-nbytes // portion_bytes)
    assert torch.equal(portion_sums(values.clone()), sums)
    for number in range(nbytes):
        for bit in (1, 128):
            values[number] ^= bit
            assert not torch.equal(portion_sums(values), sums)
            values[number] ^= bit


def test_values_that_change_places_change_the_sums() -> None:
    values = torch.arange(64.0)
    assert not torch.equal(portion_sums(values), portion_sums(values.flip(0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("count", [2, 3, 1024])
def test_signs_of_several_values_change_the_sums(dtype: torch.dtype, count: int) -> None:
    def sum_of_fragment(values: torch.Tensor) -> int:
        return sum_of(Fragment(PARAM, "w", DTYPE_NAMES[dtype], all_of(values.shape), data=values))

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(1, 100, (4096,), generator=generator).to(dtype)
    sums, of_fragment = portion_sums(values), sum_of_fragment(values)
    for _ in range(20):
        changed = values.clone()
        changed[torch.randperm(len(values), generator=generator)[:count]] *= -1
        assert not torch.equal(portion_sums(changed), sums)
        assert sum_of_fragment(changed) != of_fragment
