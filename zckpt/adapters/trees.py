"""The trees of non-tensor state that are the same for all engines.

    {"counters": {"global_steps": 5, "global_samples": 40, "micro_steps": 10, "skipped_steps": 0},
     "optimizer": {...}, "scheduler": {"class": "StepLR", "state": {...}} or None}

``optimizer/__init__.py`` describes the tree of an optimizer. An engine that does not count something writes 0 for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.errors import FormatError

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""The names of the counters of steps and samples. They are DeepSpeed's."""


def counters_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the counters in an engine's state. Raises FormatError if one of them is missing or not an integer."""
    tree = subtree(state, "counters")
    for name in COUNTERS:
        if type(tree.get(name)) is not int:
            raise FormatError(f"state: counters.{name} is missing or not an integer")
    return {name: tree[name] for name in COUNTERS}


def subtree(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the mapping that ``state`` has at ``key``. Raises FormatError if there is none."""
    tree = state.get(key)
    if not isinstance(tree, Mapping):
        raise FormatError(f"state: {key} is missing or not a mapping")
    return tree
