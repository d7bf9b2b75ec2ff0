"""Compares the values of two tensors element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PORTION_ITEMS = 1 << 16
"""The number of elements that are compared at once. What is computed from them stays in the processor's cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For the size of an element in bytes, the dtype under which elements are compared bit for bit."""


@dataclass(slots=True)
class Tally:
    """What has been found about one tensor so far. The fields have the meaning that they have in
    ``TensorDifference``."""

    changed: int = 0
    nonfinite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, other: Sequence[float]) -> None:
        """Adds what was found in other elements of the tensor, in the order of the fields."""
        changed, nonfinite, max_abs, max_rel = other
        self.changed += int(changed)
        self.nonfinite += int(nonfinite)
        self.max_abs = max(self.max_abs, max_abs)
        self.max_rel = max(self.max_rel, max_rel)

    @property
    def row(self) -> tuple[int, int, float, float]:
        """The values of the fields, in their order."""
        return self.changed, self.nonfinite, self.max_abs, self.max_rel


def compare(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> Tally:
    """Compares two 1-D tensors of the same dtype and length in host memory. Elements whose bits are equal are equal,
    even if they are NaN. With a tolerance above 0, finite elements are equal too if ``|a - b| <= atol + rtol *
    max(|a|, |b|)``."""
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
