"""From a path to a Checkpoint."""

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

    ``budget``: memory, threads and kind of I/O of all reads; None: ``Budget.from_environment()``.

    Reads the manifest and nothing else. Needs neither the framework that wrote it nor torch.distributed. Raises
    CheckpointNotFoundError, which says what is there instead, UnfinishedWriteError, VersionError, FeatureError,
    FormatError, StorageError, and UnsupportedError for the URL of a store that does not exist. Where something is
    damaged or missing, the error, and so that of every load, names the newest other checkpoints of the run that are
    whole.
    """
    found = find(path)
    with advised(found):
        return open_checkpoint(found, budget, partial(advised, found))


def open_checkpoint(
    store: Store, budget: Budget | None = None, advised: Callable[..., AbstractContextManager[None]] = nullcontext
) -> Checkpoint:
    """The checkpoint in exactly this directory. ``advised`` adds to the hints of its errors. Raises as
    ``open_contents`` does."""
    return Checkpoint(str(store.location), open_contents(store), budget, advised)
