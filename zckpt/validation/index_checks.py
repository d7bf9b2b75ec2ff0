"""The index: rules I001 to I007."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.index import check_claims
from zckpt.plan.reshard import StoredPieces
from zckpt.validation.report import failures

if TYPE_CHECKING:
    from zckpt.errors import FormatError
    from zckpt.format.index import Ints
    from zckpt.listing.contents import Contents


def check_index(contents: Contents) -> tuple[list[FormatError], StoredPieces | None]:
    """What is wrong with the index, and all pieces that it lists, in the order of their files; None if it cannot be
    used. ``want`` of a piece is the row of its tensor in the part of its file."""
    errors = failures(contents.check_index_length)
    damaged = failures(*(partial(contents.chunk, number) for number in range(len(contents.manifest.chunks))))
    if damaged:
        return [*errors, *damaged], None
    pieces, nbytes = _all_pieces(contents)
    claims = failures(partial(check_claims, contents.manifest, pieces.file, nbytes))
    return [*errors, *claims], None if claims else pieces


def _all_pieces(contents: Contents) -> tuple[StoredPieces, Ints]:
    """The pieces, and the bytes of each."""
    found = [np.empty((7, 0), np.int64)]
    for part_id, part in enumerate(contents.manifest.parts):
        item = np.array([ITEM_BYTES[dtype] for dtype in part.dtypes], np.int64)
        for number, chunk in enumerate(contents.manifest.chunks):
            if chunk.layout == part.layout:
                rows = np.arange(chunk.first_row, chunk.first_row + chunk.rows)
                (number_of, *columns), _, _ = contents.pieces_of_rows(part_id, number, rows)
                row, start, stop = rows[number_of], columns[1], columns[2]
                found.append(np.stack([row, *columns, (stop - start) * item[row]]))
    table = np.concatenate(found, axis=1)
    *columns, nbytes = table[:, np.argsort(table[1], kind="stable")]
    return StoredPieces(*columns), nbytes
