"""Compares the values of two tensors element by element."""

from __future__ import annotations

from typing import NamedTuple

import torch

PORTION_ITEMS = 1 << 16
"""The number of elements that are compared at once. It is so small that intermediate results stay in the processor's
cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes with which elements are compared bit for bit, by the size of an element in bytes."""


class Tally(NamedTuple):
    """The counts and maxima of the compared elements of one tensor. The fields have the same meaning as in
    ``TensorDifference``."""

    changed: int = 0
    nonfinite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def plus(self, other: Tally) -> Tally:
        """Returns the tally of the elements of both together."""
        changed, nonfinite, max_abs, max_rel = other
        return Tally(
            self.changed + changed, self.nonfinite + nonfinite, max(self.max_abs, max_abs), max(self.max_rel, max_rel)
        )


def compare(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> Tally:
    """Compares two 1-D tensors of the same dtype and length in host memory. Elements with equal bits are equal, even if
    they are NaN. With a tolerance above 0, finite elements are equal too if ``|a - b| <= atol + rtol * max(|a|,
    |b|)``."""
    tally = Tally()
    bits = _BITS[a.element_size()]
    for start in range(0, a.numel(), PORTION_ITEMS):
        bits_a, bits_b = (tensor[start : start + PORTION_ITEMS].view(bits) for tensor in (a, b))
        if torch.equal(bits_a, bits_b):
            continue
        differs = bits_a != bits_b
        wide = torch.complex128 if a.dtype.is_complex else torch.float64
        x, y = (all_bits[differs].view(a.dtype).to(wide) for all_bits in (bits_a, bits_b))
        difference, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
        finite = x.isfinite() & y.isfinite() & difference.isfinite()
        changed = torch.ones_like(finite)
        if rtol or atol:
            changed = ~(finite & (difference <= atol + rtol * larger))
        counted = changed & finite
        relative = torch.where(larger > 0, difference / larger, 0.0)
        tally = tally.plus(
            Tally(
                int(changed.sum()),
                int((changed & ~finite).sum()),
                float(difference[counted].max()) if counted.any() else 0.0,
                float(relative[counted].max()) if counted.any() else 0.0,
            )
        )
    return tally
