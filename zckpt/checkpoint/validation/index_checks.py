"""The checks of the index: rules I001 to I007."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from zckpt.checkpoint.validation.report import failures
from zckpt.format.index import check_claims

if TYPE_CHECKING:
    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.errors import FormatError


def check_index(contents: Contents) -> tuple[list[FormatError], bool]:
    """Returns the rules that the index breaks, and whether the pieces that it lists can be used."""
    errors = failures(contents.check_index_length)
    damaged = failures(*(partial(contents.chunk, number) for number in range(len(contents.manifest.chunks))))
    if damaged:
        return [*errors, *damaged], False
    claims = ((pieces.file, pieces.nbytes) for pieces in contents.pieces_of_parts(contents.all_rows))
    wrong = failures(partial(check_claims, contents.manifest, claims))
    return [*errors, *wrong], not wrong
