"""Lists of pieces that are made in portions are the same as those that are made tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.checkpoint.listing import contents as listing
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.plan.inventory import STATE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3, 4], [1, 4], []], ids=str)
@pytest.mark.parametrize("portion", [1, listing.RANK_PIECES])
def test_each_rank_has_its_pieces_in_the_order_of_its_files(tmp_path: Path, portion: int, ranks: list[int]) -> None:
    buffers = {"mean": [torch.full((3,), float(rank)) for rank in range(5)]}
    write_state(tmp_path / "c", 5, layout="random", buffers=buffers, client_state={"x": torch.arange(5)})
    checkpoint = zckpt.open(tmp_path / "c")
    manifest = loader_of(checkpoint).manifest
    expected = {
        (key, piece.rank, piece.file, piece.start, piece.stop, piece.offset, piece.nbytes, piece.copy)
        for key, info in checkpoint.items()
        for piece in info.pieces
        if piece.rank in ranks
    }
    rows = [np.arange(0 if part.name == STATE else len(part.name_ids)) for part in manifest.parts]
    listed = []
    with mock.patch.object(listing, "RANK_PIECES", portion):
        each = dict(loader_of(checkpoint).contents.pieces_of_ranks(rows, ranks))
    assert list(each) == ranks
    for rank, pieces in each.items():
        places = list(zip(pieces.file.tolist(), pieces.offset.tolist(), strict=True))
        assert places == sorted(places)
        columns = (pieces.part_id, pieces.tensor, pieces.file, pieces.start, pieces.stop, pieces.offset, pieces.nbytes)
        for part_id, row, number, *start_and_stop, offset, nbytes, copy in zip(
            *(column.tolist() for column in (*columns, pieces.copy)), strict=True
        ):
            part, file = manifest.parts[part_id], manifest.files[number]
            key = f"{part.name}/{manifest.names[part.name_ids[row]]}"
            listed.append((key, rank, manifest.path(file), *start_and_stop, file.data_start + offset, nbytes, copy))
    assert len(listed) == len(expected)
    assert set(listed) == expected
