"""How the elements of a tensor lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` holds its elements as they are, one after the other: it is contiguous, and not a
    view that PyTorch conjugates or negates when it is read."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
