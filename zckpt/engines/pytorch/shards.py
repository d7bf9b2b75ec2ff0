"""Which elements of a tensor this rank holds, if the tensor is a DTensor.

FSDP2 cuts a tensor after tensor parallelism has cut it, so a ``_StridedShard``, which stands for FSDP's cut, is the
last one. Each cut divides a dimension as ``torch.chunk`` does: all chunks have the same size, which is rounded up,
except the last ones. ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset`` is not used, because it
is wrong for a ``_StridedShard`` of a size that cannot be divided: on a mesh of 3 by 2 ranks, a tensor of 7 rows would
lose one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt import geometry
from zckpt.engines.tensors import local_of

if TYPE_CHECKING:
    import torch

    from zckpt.geometry import Span


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return local_of(tensor) is not tensor


def bounds_of(tensor: Any) -> list[tuple[int, int]]:
    """Returns for each dimension of a tensor the first index that this rank holds, and the number of indices. Raises
    ValueError, with the end of a sentence about the tensor, if this cannot be told."""
    bounds: list[tuple[int, int]] = [(0, size) for size in tensor.shape]
    if not is_sharded(tensor):
        return bounds
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("lies on a mesh to which this rank does not belong")
    for dim in sorted(range(mesh.ndim), key=lambda dim: _is_strided(placements[dim])):
        placement = placements[dim]
        if placement.is_partial():
            raise ValueError("is a Partial DTensor, whose values are not summed yet")
        if not placement.is_replicate():
            first, size = bounds[placement.dim]
            bounds[placement.dim] = _chunk(first, size, mesh.size(dim), coordinate[dim])
    local, shape = list(local_of(tensor).shape), [size for _, size in bounds]
    if local != shape and not (0 in local and 0 in shape):
        raise ValueError(f"has a local shape of {local}, which is not that of its placements {placements}")
    return bounds


def span_of(tensor: Any) -> Span:
    """Returns the span of the elements of the whole tensor that this rank holds. Raises ValueError, with the end of a
    sentence about the tensor, if they are not one span."""
    span = geometry.span_of(tensor.shape, bounds_of(tensor))
    if span.grid.sections:
        raise ValueError(
            "is cut in another dimension than its first one, as row-wise tensor parallelism does it: zckpt cannot save "
            "such a tensor yet"
        )
    return span


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
