"""Which tensors of a checkpoint modules had added to their ``state_dict`` by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.errors import FormatError
from zckpt.plan.inventory import EXTRA_STATE

if TYPE_CHECKING:
    from zckpt.checkpoint.reading.loader import Loader


def extra_state(checkpoint: Loader) -> frozenset[str]:
    """Returns the names of these tensors, which are in the part ``buffer``. Raises FormatError."""
    engine = checkpoint.state.get("engine") if isinstance(checkpoint.state, dict) else None
    extra = engine.get(EXTRA_STATE, []) if isinstance(engine, dict) else []
    if not isinstance(extra, list) or not all(isinstance(name, str) for name in extra):
        raise FormatError(f"state: {EXTRA_STATE} is not a list of names", file=checkpoint.path)
    return frozenset(extra)
