"""The memory that a load fills: new tensors, or tensors that the caller has passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zckpt.errors import MismatchError
from zckpt.transfer.memory import check_cast, fresh_tensors, lies_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.checkpoint.listing.contents import TensorInfo


def empty_tensors(
    infos: Sequence[TensorInfo],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    dtypes: Sequence[torch.dtype | None],
    file_offsets: Sequence[int],
) -> list[torch.Tensor]:
    """Returns memory for elements of each of ``infos``. They begin at a byte of ``file_offsets``, and keep their dtype
    where ``dtypes`` has None. The caller has checked the tensors' sizes, so that a wrong manifest cannot make this
    allocate more than the files hold. Raises CastError."""
    stored = [info.dtype for info in infos]
    for info, own, dtype in zip(infos, stored, dtypes, strict=True):
        if dtype is not None:
            check_cast(own, dtype, info.key)
    return fresh_tensors(
        shapes, [dtype or own for dtype, own in zip(dtypes, stored, strict=True)], device, file_offsets
    )


def checked_target(info: TensorInfo, target: torch.Tensor) -> torch.Tensor:
    """Returns the memory that a caller has passed for a tensor, if the tensor fits. Raises TypeError, MismatchError and
    CastError."""
    value: object = target
    if not isinstance(value, torch.Tensor):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(
            f"out[{info.key!r}] must be a torch.Tensor, got {kind}; torch.from_numpy shares an array's memory"
        )
    check_cast(info.dtype, target.dtype, info.key)
    if target.shape != info.shape or not lies_in_order(target):
        shape = str(list(target.shape)) if lies_in_order(target) else "a view whose elements do not lie in order"
        raise MismatchError(f"out has {shape}, the checkpoint {list(info.shape)}", key=info.key)
    return target
