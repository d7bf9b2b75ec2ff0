"""What users see of the tensors of a checkpoint: their shapes and dtypes, and where their pieces are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, overload

import numpy as np

from zckpt.format.dtypes import DTYPES, ITEM_BYTES, ITEM_BYTES_BY_ID, TORCH_NAMES
from zckpt.geometry import distinct

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from zckpt.checkpoint.listing.contents import Contents
    from zckpt.format.manifest import Manifest
    from zckpt.geometry import Grid, Ints


@dataclass(frozen=True, slots=True)
class PieceInfo:
    """A piece of a tensor: the elements ``[start, stop)``, and where they are stored. The elements are counted in
    row-major order, or, if tensor parallelism has divided the tensor, in the order that the manifest gives."""

    rank: int
    """The rank that wrote the piece."""
    tier: str
    """The memory that the piece was in when it was saved, ``"device"``, ``"host"`` or ``"nvme"``."""
    copy: int
    """The number of the copy that the piece belongs to. It is above 0 only for values that differ from rank to rank,
    such as some buffers."""
    start: int
    """The first element of the piece."""
    stop: int
    """The element after the last one of the piece."""
    file: str
    """The file that holds the piece, relative to the directory of the checkpoint."""
    offset: int
    """The byte of ``file`` at which the piece begins."""
    nbytes: int
    """The size of the piece in bytes."""


@dataclass(frozen=True, slots=True)
class Holders:
    """How the pieces of one tensor are spread over the ranks that wrote it."""

    pieces: int
    """The number of pieces of the tensor, over all its copies."""
    ranks: int
    """The number of ranks that have at least one piece of the tensor."""
    first_rank: int
    """The lowest of these ranks."""
    last_rank: int
    """The highest of these ranks."""
    tiers: tuple[str, ...]
    """The tiers that the pieces were in when they were saved."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint: its key, dtype, shape and size in bytes (``nbytes``). ``ranks``, ``files`` and
    ``pieces`` say where it is stored."""

    part: str
    """The part of the state that the tensor belongs to, such as ``"master"`` or ``"exp_avg"``."""
    name: str
    """The name of the parameter or buffer in the model."""
    dtype_name: str
    """The name of the dtype in the format, which is safetensors' name, such as ``"F32"``."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    _part_id: int = field(repr=False)
    """The position of the tensor's part in the manifest."""
    _row: int = field(repr=False)
    """The tensor's row in that part."""
    _contents: Contents = field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """The key of the tensor: ``<part>/<parameter name>``."""
        return f"{self.part}/{self.name}"

    @property
    def nbytes(self) -> int:
        """The size of one whole copy of the tensor in bytes."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def _place(self) -> tuple[int, int]:
        return self._part_id, self._row

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, as a ``torch.dtype``. Reading this attribute imports torch."""
        return _torch_dtype(self.dtype_name)

    @property
    def torch_name(self) -> str:
        """Torch's name for the dtype, such as ``"float32"``."""
        return TORCH_NAMES[self.dtype_name]

    @property
    def item_bytes(self) -> int:
        """The size of one element in bytes."""
        return ITEM_BYTES[self.dtype_name]

    @property
    def pieces(self) -> tuple[PieceInfo, ...]:
        """All pieces of the tensor. The list is made anew each time that this attribute is read."""
        return self._contents.piece_infos(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote the tensor, in ascending order."""
        return tuple(sorted({piece.rank for piece in self.pieces}))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold the tensor, relative to the directory of the checkpoint."""
        return tuple(dict.fromkeys(piece.file for piece in self.pieces))


class Tensors(Sequence[TensorInfo]):
    """Tensors of a checkpoint. There may be very many, so this has only their places, and makes a TensorInfo when one
    is asked for."""

    def __init__(self, contents: Contents, part_id: Ints, row: Ints) -> None:
        """``part_id``, ``row``: for each tensor, the position of its part in the manifest, and its row in that part."""
        self._contents, self.part_id, self.row = contents, part_id, row

    def __len__(self) -> int:
        return len(self.row)

    def __iter__(self) -> Iterator[TensorInfo]:
        columns = (self.part_id, self.row, *map(self._column, ("name_ids", "shape_ids", "dtype_ids")))
        return map(self._contents._info_of, *(column.tolist() for column in columns))

    @overload
    def __getitem__(self, i: int) -> TensorInfo: ...
    @overload
    def __getitem__(self, i: slice) -> Tensors: ...
    def __getitem__(self, i: int | slice) -> TensorInfo | Tensors:
        if isinstance(i, slice):
            return self.take(i)
        return self._contents._info(int(self.part_id[i]), int(self.row[i]))

    def key(self, number: int) -> str:
        """Returns the key of one tensor."""
        return self[number].key

    def take(self, which: slice | Ints | NDArray[np.bool_]) -> Tensors:
        """Returns the tensors that ``which`` selects."""
        return Tensors(self._contents, self.part_id[which], self.row[which])

    @property
    def keys(self) -> list[str]:
        """The key of each tensor. A tied weight has the one under which it is stored."""
        prefixes, names = [f"{part.name}/" for part in self._manifest.parts], self._manifest.names
        ids = self._column("name_ids").tolist()
        return [prefixes[part] + names[name] for part, name in zip(self.part_id.tolist(), ids, strict=True)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        return [*map(self._manifest.shapes.__getitem__, self._column("shape_ids").tolist())]

    @property
    def grids(self) -> list[Grid]:
        """The grid of each tensor. Tensors with the same one share one object."""
        return [*map(self._manifest.grid_of, *(self._column(name).tolist() for name in ("shape_ids", "grid_ids")))]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype of each tensor. Reading this attribute imports torch."""
        return [_torch_dtype(DTYPES[dtype_id]) for dtype_id in self._column("dtype_ids").tolist()]

    @property
    def item_bytes(self) -> Ints:
        """For each tensor, the size of an element in bytes."""
        return ITEM_BYTES_BY_ID[self._column("dtype_ids")]

    @property
    def nbytes(self) -> Ints:
        """For each tensor, the size of one whole copy in bytes."""
        return self._manifest.numel[self._column("shape_ids")] * self.item_bytes

    @property
    def _manifest(self) -> Manifest:
        return self._contents.manifest

    def _column(self, name: str) -> Ints:
        """Returns one column of the manifest's parts, such as ``name_ids``, with a value for each of these tensors."""
        column = np.empty(len(self), np.int64)
        for part_id in distinct(self.part_id)[0].tolist():
            of_part = self.part_id == part_id
            column[of_part] = getattr(self._manifest.parts[part_id], name)[self.row[of_part]]
        return column


@cache
def _torch_dtype(name: str) -> torch.dtype:
    from zckpt.transfer.torch_dtypes import TORCH_DTYPES  # imported late, because listing tensors needs no torch

    return TORCH_DTYPES[name]
