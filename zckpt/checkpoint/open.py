"""Opens the checkpoint at a path."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.find import advised, find_and_open, open_contents
from zckpt.checkpoint.reading.checkpoint import Checkpoint
from zckpt.checkpoint.reading.loader import Loader
from zckpt.checkpoint.tiers.choice import Chosen, choose
from zckpt.storage.cache import BlockCache, CachedReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.storage.contract import Store
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def open(  # noqa: A001  like the builtin, on purpose
    path: StrPath | Sequence[StrPath], *, budget: Budget | None = None, cache: StrPath | None = None
) -> Checkpoint:
    """Opens a checkpoint for reading.

    This reads only the manifest, and with several paths also looks at the lengths of all files. It needs neither the
    framework that wrote the checkpoint nor torch.distributed.

    Args:
        path: the directory of a checkpoint, or that of a run, whose file ``latest`` names the checkpoint. Or several
            of these, the nearest first, which together have the checkpoint. Each file is read from the first directory
            in which it has the right length. If they have several checkpoints, that of ``zckpt.restore`` is opened.
        budget: the memory, threads and kind of I/O of all later reads. None means ``Budget.from_environment()``.
        cache: a directory of a local disk, in which the bytes that are read are kept. All processes of this machine may
            share it, at the same time and later, and read each block of 4 MiB from the store once. It takes at most
            half of the space that its disk would have free without it, and can be removed at any time. It is of use for
            checkpoints in object stores and on web servers. It cannot be used with several paths.

    Returns:
        The checkpoint. Its methods load any part of it.

    Raises:
        CheckpointNotFoundError: there is no checkpoint. The error says what is there instead.
        UnfinishedWriteError: there are only the data of a write that was never committed.
        VersionError: the checkpoint has another major version of the format.
        FeatureError: the checkpoint uses a feature that this version of zckpt does not know.
        FormatError: the checkpoint is damaged. This error, and the FormatError of every later load, names the newest
            complete checkpoints of the same run.
        StorageError: the operating system reports an error when it reads.
        UnsupportedError: the path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
        ValueError: there are several paths and a cache.
    """
    return Checkpoint(open_loader(path, budget, cache))


def open_loader(
    path: StrPath | Sequence[StrPath], budget: Budget | None = None, cache: StrPath | None = None
) -> Loader:
    """Opens a checkpoint for the other modules of zckpt, as ``open`` does for users."""
    if isinstance(path, (str, os.PathLike)):
        store, contents = find_and_open(path)
    elif cache is not None:
        raise ValueError("give either several paths, of which the nearest is the cache, or one path and a cache")
    else:
        store, contents = choose(path).opened()
    if cache is None:
        return Loader(str(store.location), contents, budget, partial(advised, store))
    reader = contents.reader = CachedReader(contents.reader, contents.store.location, BlockCache(cache))
    return Loader(str(store.location), contents, budget, partial(_advised_with_cache, store, reader))


@contextmanager
def _advised_with_cache(store: Store, reader: CachedReader, *left: str) -> Iterator[None]:
    with reader.forgetting(), advised(store, *left):
        yield


def open_chosen(chosen: Chosen) -> Loader:
    """Opens a checkpoint that may be in several places. Raises the errors of ``Chosen.opened``."""
    store, contents = chosen.opened()
    return Loader(str(store.location), contents)


def open_store_loader(store: Store, budget: Budget | None) -> Loader:
    """Opens the checkpoint in exactly this directory. Raises the errors of ``open_contents``."""
    return Loader(str(store.location), open_contents(store), budget, partial(advised, store))
