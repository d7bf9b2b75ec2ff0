"""Checkpoints in the formats of others, recognised by the names of their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def deepspeed_files(names: Iterable[str]) -> list[str]:
    """Those of ``names``, the entries of one directory, that belong to a checkpoint in DeepSpeed's own format, sorted.

    DeepSpeed 0.16 to 0.19 gives every file of a checkpoint a name that ends in ``_states.pt`` (``MODEL_FILE_SUFFIX``
    and ``OPTIM_FILE_SUFFIX`` in ``deepspeed/checkpoint/constants.py``), and copies NVMe swap files to the directory
    ``offloaded_tensors``.
    """
    return sorted(name for name in names if name.endswith("_states.pt") or name == "offloaded_tensors")
