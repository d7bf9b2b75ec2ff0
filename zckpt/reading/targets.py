"""The memory that a load fills: new tensors, or tensors that the caller has passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zckpt.errors import MismatchError
from zckpt.transfer.memory import check_cast, fresh_tensor, lies_in_order

if TYPE_CHECKING:
    from zckpt.listing.contents import TensorInfo


def empty_tensor(
    info: TensorInfo,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
    file_offset: int = 0,
) -> torch.Tensor:
    """Returns memory for elements of a tensor that begin at byte ``file_offset`` of a file. The caller has checked the
    tensor's sizes, so that a wrong manifest cannot make this allocate more than the files hold. Raises CastError."""
    stored = info.dtype
    check_cast(stored, dtype or stored, info.key)
    return fresh_tensor(shape, dtype or stored, device, file_offset)


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
