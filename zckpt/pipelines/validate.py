"""From a path to a Report."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zckpt.errors import (
    FormatError,
)
from zckpt.pipelines.open import StrPath, find, open_checkpoint
from zckpt.validation import Finding, Report, check_checkpoint

if TYPE_CHECKING:
    from zckpt.progress import Progress


def validate(path: StrPath, *, data: bool = True, progress: Progress | None = None) -> Report:
    """Checks a checkpoint against the specification. ``data``: read every byte and compare it with its digest; without,
    only names, sizes, headers and the index are checked. ``progress``: such as ``zckpt.ProgressBar()``.

    Never raises for what is wrong with the checkpoint: that is in the report, one finding per broken rule and place.
    Raises CheckpointNotFoundError if there is nothing to check, and StorageError.
    """
    try:
        checkpoint = open_checkpoint(find(os.fspath(path)))
    except FormatError as error:
        return Report(os.fspath(path), [Finding.of(error)], files=1)
    return check_checkpoint(checkpoint, data=data, progress=progress)
