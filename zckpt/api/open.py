"""Opens the checkpoint at a path."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from zckpt.listing.find import advised, find, open_contents
from zckpt.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def open(path: StrPath, *, budget: Budget | None = None) -> Checkpoint:  # noqa: A001  reads like the builtin on purpose
    """Opens the checkpoint at ``path``, or, in the directory of a run, the one that ``latest`` names.

    ``budget``: memory, threads and kind of I/O of all reads; None means ``Budget.from_environment()``.

    It reads the manifest and nothing else. It needs neither the framework that wrote the checkpoint nor
    torch.distributed. Raises CheckpointNotFoundError, which says what is there instead, UnfinishedWriteError,
    VersionError, FeatureError, FormatError, StorageError, and UnsupportedError for a URL of an unknown kind of store.
    If something is damaged or missing, this error and that of every later load name the newest other checkpoints of the
    run that are whole.
    """
    found = find(path)
    with advised(found):
        return open_checkpoint(found, budget, partial(advised, found))


def open_checkpoint(
    store: Store, budget: Budget | None = None, advised: Callable[..., AbstractContextManager[None]] = nullcontext
) -> Checkpoint:
    """Opens the checkpoint in exactly this directory. ``advised`` extends the hints of its errors. Raises what
    ``open_contents`` raises."""
    return Checkpoint(str(store.location), open_contents(store), budget, advised)
