"""Which elements of a tensor this rank holds, if it is a DTensor.

FSDP2 cuts a tensor after tensor parallelism has cut it, so a ``_StridedShard``, which stands for FSDP's cut, is the
last one. Each cut divides a dimension as ``torch.chunk`` does: all chunks have the same size, which is rounded up,
except the last ones. ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset`` is not used, because it
is wrong for a ``_StridedShard`` of a size that cannot be divided: on a mesh of 3 by 2 ranks, a tensor of 7 rows would
lose one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zckpt.engines.tensors import local_of
from zckpt.geometry import all_of, box_of

if TYPE_CHECKING:
    import torch

    from zckpt.geometry import Span


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return local_of(tensor) is not tensor


def span_of(tensor: Any) -> Span:
    """Returns the elements of a tensor that this rank holds, in the order of its local tensor. Raises ValueError, with
    the end of a sentence about the tensor, if this cannot be told."""
    return _place(tensor)[0] if is_sharded(tensor) else all_of(tensor.shape)


def bounds_of(tensor: Any) -> tuple[tuple[int, int], ...]:
    """Returns the first index and the number of indices that this rank holds of a DTensor in each dimension. Raises
    ValueError as ``span_of`` does."""
    return _place(tensor)[1]


def _place(tensor: Any) -> tuple[Span, tuple[tuple[int, int], ...]]:
    """Returns ``span_of`` and ``bounds_of`` of a DTensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("lies on a mesh to which this rank does not belong")
    cuts = []
    for mesh_dim in sorted(range(mesh.ndim), key=lambda dim: type(placements[dim]).__name__ == "_StridedShard"):
        placement = placements[mesh_dim]
        if placement.is_partial():
            raise ValueError("is a Partial DTensor, whose values are not summed yet")
        if not placement.is_replicate():
            cuts.append((placement.dim, mesh.size(mesh_dim), coordinate[mesh_dim]))
    span, bounds = _cut(tuple(tensor.shape), tuple(cuts))
    local, held = list(local_of(tensor).shape), [size for _, size in bounds]
    if local != held and not (0 in local and 0 in held):
        raise ValueError(f"has a local shape of {local}, which is not that of its placements {placements}")
    return span, bounds


@lru_cache(maxsize=1 << 12)  # Many tensors have the same shape, and there may be a thousand chunks.
def _cut(shape: tuple[int, ...], cuts: tuple[tuple[int, int, int], ...]) -> tuple[Span, tuple[tuple[int, int], ...]]:
    """Returns what a rank holds of a tensor of this shape. ``cuts``: for each cut its dimension, the number of chunks,
    and which of them this rank holds."""
    # For each dimension of the tensor, the first index and the size of each chunk, and which of them this rank holds.
    chunks: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]
    own = [0] * len(shape)
    for dim, count, number in cuts:
        chunks[dim] = [_chunk(first, size, count, index) for first, size in chunks[dim] for index in range(count)]
        own[dim] = own[dim] * count + number
    bounds = tuple(of_dim[index] for of_dim, index in zip(chunks, own, strict=True))
    return box_of(shape, chunks, bounds), bounds


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
