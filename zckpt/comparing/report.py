"""What a comparison of two checkpoints has found, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both checkpoints have, and that differs. Where its shape or dtype differs, no values are compared,
    and all numbers are 0."""

    key: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    compared: int = 0
    """Elements of the tensor; of a buffer whose values differ from rank to rank, those of all its values."""
    changed: int = 0
    """Elements that differ by more than the tolerance; without one, those of which any bit differs."""
    nonfinite: int = 0
    """Changed elements that are NaN or infinite in a or in b. They are left out of ``max_abs`` and ``max_rel``."""
    max_abs: float = 0.0
    """The largest ``|a - b|`` of the changed elements."""
    max_rel: float = 0.0
    """The largest ``|a - b| / max(|a|, |b|)`` of the changed elements."""

    @property
    def share(self) -> float:
        """Of the elements, how many are changed: from 0 to 1."""
        return self.changed / self.compared if self.compared else 0.0

    def __str__(self) -> str:
        if (self.dtype_a, self.shape_a) != (self.dtype_b, self.shape_b):
            return f"{self.key}: {self.dtype_a} {[*self.shape_a]} in a, {self.dtype_b} {[*self.shape_b]} in b"
        odd = f", {self.nonfinite:,} NaN or infinite" if self.nonfinite else ""
        return (
            f"{self.key}: {self.changed:,} of {self.compared:,} elements ({self.share:.3%}), "
            f"max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}{odd}"
        )


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A place in the trees of non-tensor state at which the checkpoints differ. ``a`` and ``b`` are the values as short
    text, or None where there is none."""

    path: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        told = [f"{'nothing' if value is None else value} in {name}" for name, value in (("a", self.a), ("b", self.b))]
        return f"{self.path}: {', '.join(told)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """What ``zckpt.diff`` found."""

    a: str
    b: str
    """The paths of both checkpoints."""
    tensors: tuple[TensorDifference, ...]
    """Those of both that differ, in the order of a."""
    state: tuple[StateDifference, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    """Keys."""
    compared: int
    """How many tensors both have."""
    bytes_read: int
    """Of both. What has the same digests in both is not read."""

    @property
    def equal(self) -> bool:
        return not (self.tensors or self.state or self.only_in_a or self.only_in_b)

    def to_json(self) -> str:
        """One line, with the fields of this class, and ``equal``; those of a tensor, and ``share``."""
        tensors = [{**asdict(one), "share": one.share} for one in self.tensors]
        return json.dumps({"equal": self.equal, **asdict(self), "tensors": tensors})

    def __str__(self) -> str:
        lines = [f"a: {self.a}", f"b: {self.b}"]
        lines += [f"only in a  {key}" for key in self.only_in_a]
        lines += [f"only in b  {key}" for key in self.only_in_b]
        lines += [f"state      {one}" for one in self.state]
        lines += [f"tensor     {one}" for one in self.tensors]
        verdict = "equal" if self.equal else f"{len(self.tensors)} of them and {len(self.state)} settings differ"
        return "\n".join([*lines, f"{self.compared} tensors compared: {verdict} ({self.bytes_read:,} bytes read)"])
