"""The memory that a load fills: new tensors, or tensors that the caller has passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zckpt.errors import MismatchError
from zckpt.transfer.memory import check_cast, fresh_tensors, lies_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.checkpoint.listing.tensors import Tensors
    from zckpt.geometry import Ints


def empty_tensors(
    tensors: Tensors,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    dtypes: Sequence[torch.dtype | None],
    file_offsets: Sequence[int] | Ints,
) -> list[torch.Tensor]:
    """Returns memory for elements of each of ``tensors``. They begin at a byte of ``file_offsets``, and keep their
    dtype where ``dtypes`` has None. The caller has checked the tensors' sizes, so that a wrong manifest cannot make
    this allocate more than the files hold. The caller has called ``check_casts``, too."""
    made_as = [dtype or own for dtype, own in zip(dtypes, tensors.dtypes, strict=True)]
    return fresh_tensors(shapes, made_as, device, file_offsets)


def check_casts(tensors: Tensors, dtypes: Sequence[torch.dtype | None]) -> None:
    """Raises CastError unless each of ``tensors`` can be converted to its dtype. Those without one are not
    converted."""
    if any(dtypes):
        for key, own, dtype in zip(tensors.keys, tensors.dtypes, dtypes, strict=True):
            if dtype is not None:
                check_cast(own, dtype, key)


def check_target(key: str, stored: torch.dtype, shape: tuple[int, ...], target: torch.Tensor) -> None:
    """Raises TypeError, MismatchError or CastError unless a tensor fits into the memory that a caller has passed for
    it."""
    value: object = target
    if not isinstance(value, torch.Tensor):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(f"out[{key!r}] must be a torch.Tensor, got {kind}; torch.from_numpy shares an array's memory")
    check_cast(stored, target.dtype, key)
    if target.shape != shape or not lies_in_order(target):
        other = str(list(target.shape)) if lies_in_order(target) else "a view whose elements do not lie in order"
        raise MismatchError(f"out has {other}, the checkpoint {list(shape)}", key=key)
