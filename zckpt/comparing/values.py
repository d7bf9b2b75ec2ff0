"""How the values of two tensors differ, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PORTION_ITEMS = 1 << 16
"""So many elements are compared at once: what is computed of them stays in the processor's cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that compare bit for bit, by the bytes of an element."""


@dataclass(slots=True)
class Tally:
    """What was found of one tensor so far; the fields are those of ``TensorDifference``."""

    changed: int = 0
    nonfinite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, other: Sequence[float]) -> None:
        """Of other elements of the tensor, in the order of the fields."""
        changed, nonfinite, max_abs, max_rel = other
        self.changed += int(changed)
        self.nonfinite += int(nonfinite)
        self.max_abs = max(self.max_abs, max_abs)
        self.max_rel = max(self.max_rel, max_rel)

    @property
    def row(self) -> tuple[int, int, float, float]:
        return self.changed, self.nonfinite, self.max_abs, self.max_rel


def compare(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> Tally:
    """Compares two 1-D tensors of one dtype and length in host memory. Elements whose bits are equal are equal, NaN
    too; others are, where both are finite and ``|a - b| <= atol + rtol * max(|a|, |b|)`` with a tolerance above 0."""
    tally = Tally()
    bits = _BITS[a.element_size()]
    for start in range(0, a.numel(), PORTION_ITEMS):
        one, other = (tensor[start : start + PORTION_ITEMS].view(bits) for tensor in (a, b))
        if torch.equal(one, other):
            continue
        places = one != other
        wide = torch.complex128 if a.dtype.is_complex else torch.float64
        x, y = (bits_of[places].view(a.dtype).to(wide) for bits_of in (one, other))
        difference, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
        finite = x.isfinite() & y.isfinite() & difference.isfinite()
        changed = torch.ones_like(finite)
        if rtol or atol:
            changed = ~(finite & (difference <= atol + rtol * larger))
        counted = changed & finite
        relative = torch.where(larger > 0, difference / larger, 0.0)
        tally.add(
            (
                int(changed.sum()),
                int((changed & ~finite).sum()),
                float(difference[counted].max()) if counted.any() else 0.0,
                float(relative[counted].max()) if counted.any() else 0.0,
            )
        )
    return tally
