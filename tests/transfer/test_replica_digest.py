"""The sums by which replicas on GPUs are compared. Here they are computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from zckpt.transfer import stored
from zckpt.transfer.stored import weighted_sums


@pytest.mark.parametrize("portion_bytes", [16, 8 << 20])
@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 50])
def test_any_changed_byte_changes_the_sums(monkeypatch: pytest.MonkeyPatch, portion_bytes: int, nbytes: int) -> None:
    monkeypatch.setattr(stored, "PORTION_BYTES", portion_bytes)
    room = torch.randint(256, (nbytes + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = room[3:]  # an address at which no int64 may lie
    sums = weighted_sums(values)
    assert len(sums) == -(-nbytes // portion_bytes)
    assert torch.equal(weighted_sums(values.clone()), sums)
    for number in range(nbytes):
        for bit in (1, 128):
            values[number] ^= bit
            assert not torch.equal(weighted_sums(values), sums)
            values[number] ^= bit


def test_values_that_change_places_change_the_sums() -> None:
    values = torch.arange(64.0)
    assert not torch.equal(weighted_sums(values), weighted_sums(values.flip(0)))
