"""The memory that a load fills: new tensors, or tensors that the caller has passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from zckpt.errors import MismatchError
from zckpt.transfer.memory import check_cast, fresh_tensors, lies_in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def refuse_overlaps(targets: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises MismatchError if a place in memory would get several values: those of two tensors of the checkpoint, or of
    two elements of one tensor. ``targets``: keys of tensors in the checkpoint, and the memory that each is read into.
    Several names of one tensor have the same key, and may have the same memory."""
    in_order: list[tuple[str, torch.Tensor]] = []
    for key, target in targets:
        if target.is_meta or not target.numel():
            continue
        if target.is_contiguous():
            in_order.append((key, target))
        elif _shares_places(target):
            shape = f"shape {list(target.shape)}, strides {list(target.stride())}"
            message = f"elements of the tensor that it is read into share memory: {shape}"
            raise MismatchError(message, key=key, hint="give the tensor memory of its own, by clone()")
    start = np.array([target.data_ptr() for _, target in in_order], np.int64)
    stop = start + np.array([target.nbytes for _, target in in_order], np.int64)
    order = np.argsort(start, kind="stable")
    overlaps = start[order][1:] < np.maximum.accumulate(stop[order])[:-1]
    for number in np.flatnonzero(overlaps).tolist():
        (key, one), (other_key, other) = (in_order[place] for place in order[number : number + 2].tolist())
        is_same = key == other_key and one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes
        if not is_same and one.device == other.device:
            raise MismatchError(
                f"it shares memory with {other_key} here, and the checkpoint has a tensor for each", key=key,
                hint="give each of them a tensor of its own, or load only one of them",
            )  # fmt: skip


def _shares_places(tensor: torch.Tensor) -> bool:
    """Returns whether two elements of a tensor lie at the same place, as after ``expand``."""
    reached = 0  # the last place of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


def check_target(key: str, stored: torch.dtype, shape: tuple[int, ...], target: torch.Tensor) -> None:
    """Raises TypeError, MismatchError or CastError unless a tensor fits into the memory that a caller has passed."""
    value: object = target
    if not isinstance(value, torch.Tensor):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(f"out[{key!r}] must be a torch.Tensor, got {kind}; torch.from_numpy shares an array's memory")
    check_cast(stored, target.dtype, key)
    if target.shape != shape or not lies_in_order(target):
        other = str(list(target.shape)) if lies_in_order(target) else "a view whose elements do not lie in order"
        raise MismatchError(
            f"out has {other}, the checkpoint {list(shape)}", key=key,
            hint="pass a contiguous tensor of the checkpoint's shape, or leave the key out of `out`",
        )  # fmt: skip
