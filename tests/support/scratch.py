"""Damage to the scratch files of ``zckpt.offload``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zckpt.offloading.files import Moved


def flip_a_bit(moved: Moved, at: int) -> None:
    """Flips a bit of byte ``at`` of a storage in its scratch file."""
    assert moved.saved is not None
    fd = moved.saved.file.open(os.O_RDWR)
    (before,) = os.pread(fd, 1, moved.start + at)
    os.pwrite(fd, bytes([before ^ 1]), moved.start + at)
    os.close(fd)
