"""Which elements of a tensor this rank holds, if the tensor is a DTensor.

FSDP2 cuts a tensor after tensor parallelism has cut it, so a ``_StridedShard``, which stands for FSDP's cut, is the
last one. Each cut divides a dimension as ``torch.chunk`` does: all chunks have the same size, which is rounded up,
except the last ones. ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset`` is not used, because it
is wrong for a ``_StridedShard`` of a size that cannot be divided: on a mesh of 3 by 2 ranks, a tensor of 7 rows would
lose one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zckpt.engines.tensors import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return local_of(tensor) is not tensor


def box_of(tensor: Any) -> list[tuple[int, int]]:
    """Returns for each dimension of a tensor the first index that this rank holds, and the number of indices. Raises
    ValueError, with the end of a sentence about the tensor, if this cannot be told."""
    box = [(0, size) for size in tensor.shape]
    if not is_sharded(tensor):
        return box
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("lies on a mesh to which this rank does not belong")
    for dim in sorted(range(mesh.ndim), key=lambda dim: _is_strided(placements[dim])):
        placement = placements[dim]
        if placement.is_partial():
            raise ValueError("is a Partial DTensor, whose values are not summed yet")
        if not placement.is_replicate():
            first, size = box[placement.dim]
            box[placement.dim] = _chunk(first, size, mesh.size(dim), coordinate[dim])
    local = tuple(local_of(tensor).shape)
    if math.prod(local) != math.prod(size for _, size in box) or (math.prod(local) and local != _sizes(box)):
        raise ValueError(f"has a local shape of {list(local)}, which is not that of its placements {placements}")
    return box


def span_of(tensor: Any) -> tuple[int, int]:
    """Returns the range ``[start, stop)`` of the elements of a tensor that this rank holds, in row-major order. Raises
    ValueError, with the end of a sentence about the tensor, if they are not one range."""
    shape, box = tuple(tensor.shape), box_of(tensor)
    if 0 in _sizes(box):
        return 0, 0
    # Beyond the first dimension of which more than one index is held, all others have to be whole.
    inner = next((dim for dim, (_, size) in enumerate(box) if size > 1), len(box))
    if any(held != (0, size) for held, size in zip(box[inner + 1 :], shape[inner + 1 :], strict=True)):
        raise ValueError(
            "is cut in another dimension than its first one, as row-wise tensor parallelism does it: zckpt cannot save "
            "such a tensor yet"
        )
    start = sum(first * math.prod(shape[dim + 1 :]) for dim, (first, _) in enumerate(box))
    return start, start + math.prod(_sizes(box))


def replica_set(tensor: Any, ranks: int) -> str:
    """Returns the label of the set of replicas to which a DTensor belongs (see ``plan.replicas``), or an empty text if
    no other of the ``ranks`` ranks of the engine holds any of its elements."""
    mesh, placements = tensor.device_mesh, tensor.placements
    copies = any(placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(placements))
    return f"{mesh.mesh_dim_names} {tuple(mesh.shape)} {placements}" if copies or mesh.size() < ranks else ""


def _chunk(first: int, size: int, chunks: int, index: int) -> tuple[int, int]:
    """Returns the first index and the size of a chunk of ``size`` indices that begin at ``first``."""
    chunk_size = -(-size // chunks)
    offset = min(chunk_size * index, size)
    return first + offset, min(chunk_size, size - offset)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _sizes(box: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(size for _, size in box)
