"""The result of a comparison of two checkpoints, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from zckpt.errors import count, printable


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs between the two checkpoints. If its shape or its dtype differs, its values are not
    compared, and all numbers are 0."""

    key: str
    """The key of the tensor in a."""
    dtype_a: str
    """Torch's name of the dtype in a, such as ``"float32"``."""
    dtype_b: str
    """Torch's name of the dtype in b."""
    shape_a: tuple[int, ...]
    """The shape in a."""
    shape_b: tuple[int, ...]
    """The shape in b."""
    compared: int = 0
    """The number of elements that were compared. For a buffer whose values differ from rank to rank, the elements of
    all its copies are counted."""
    changed: int = 0
    """The number of elements that differ by more than the tolerance. Without a tolerance, it is the number of elements
    in which any bit differs."""
    nonfinite: int = 0
    """The number of changed elements that are NaN or infinite in a or in b. They are left out of ``max_abs`` and
    ``max_rel``."""
    max_abs: float = 0.0
    """The largest ``|a - b|`` of the changed elements."""
    max_rel: float = 0.0
    """The largest ``|a - b| / max(|a|, |b|)`` of the changed elements."""

    @property
    def share(self) -> float:
        """The share of the compared elements that are changed, from 0 to 1."""
        return self.changed / self.compared if self.compared else 0.0

    def __str__(self) -> str:
        if (self.dtype_a, self.shape_a) != (self.dtype_b, self.shape_b):
            return f"{self.key}: {self.dtype_a} {[*self.shape_a]} in a, {self.dtype_b} {[*self.shape_b]} in b"
        nonfinite = f", {self.nonfinite:,} NaN or infinite" if self.nonfinite else ""
        return (
            f"{self.key}: {self.changed:,} of {self.compared:,} elements ({self.share:.3%}), "
            f"max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}{nonfinite}"
        )


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A place in the trees of non-tensor state at which the checkpoints differ."""

    path: str
    """The place in the tree, such as ``engine.counters.global_steps``."""
    a: str | None
    """The value in a as a short text, or None if a has nothing there."""
    b: str | None
    """The value in b as a short text, or None if b has nothing there. It is "other bytes" or "other values" if its
    text would be the same as that of a."""

    def __str__(self) -> str:
        sides = [f"{'nothing' if value is None else value} in {name}" for name, value in (("a", self.a), ("b", self.b))]
        return f"{self.path}: {', '.join(sides)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of ``zckpt.diff``."""

    a: str
    """The path of the first checkpoint."""
    b: str
    """The path of the second checkpoint."""
    tensors: tuple[TensorDifference, ...]
    """The tensors that both checkpoints have and that differ, in the order in which a has them."""
    state: tuple[StateDifference, ...]
    """The places at which the trees of non-tensor state differ."""
    only_in_a: tuple[str, ...]
    """The keys of the tensors that only a has."""
    only_in_b: tuple[str, ...]
    """The keys of the tensors that only b has."""
    compared: int
    """The number of tensors that both checkpoints have."""
    bytes_read: int
    """The number of bytes that were read from both checkpoints. Blocks with the same digests in both are not read."""

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not (self.tensors or self.state or self.only_in_a or self.only_in_b)

    def to_json(self) -> str:
        """Returns one line of JSON with the fields of this class and ``equal``. Each tensor also has its ``share``."""
        tensors = [{**asdict(tensor), "share": tensor.share} for tensor in self.tensors]
        return json.dumps({"equal": self.equal, **asdict(self), "tensors": tensors})

    def __str__(self) -> str:
        lines = [f"a: {self.a}", f"b: {self.b}"]
        lines += [f"only in a  {key}" for key in self.only_in_a]
        lines += [f"only in b  {key}" for key in self.only_in_b]
        lines += [f"state      {difference}" for difference in self.state]
        lines += [f"tensor     {difference}" for difference in self.tensors]
        verdict = (
            "equal" if self.equal else f"{len(self.tensors)} of them and {count(len(self.state), 'setting')} differ"
        )
        if self.only_in_a or self.only_in_b:
            verdict += f", {len(self.only_in_a)} more only in a, {len(self.only_in_b)} only in b"
        compared = count(self.compared, "tensor")
        return "\n".join([*map(printable, lines), f"{compared} compared: {verdict} ({self.bytes_read:,} bytes read)"])
