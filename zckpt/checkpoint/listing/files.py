"""Which files a checkpoint has besides its manifest, and which of them a directory has with the right length."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from zckpt.errors import FormatError
from zckpt.format import names
from zckpt.format.digest import DIGEST_BYTES, block_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Store


def digest_counts(manifest: Manifest) -> list[int]:
    """Returns for each rank the fewest digests that its table may have. The exact number is known only from the
    index."""
    counts = [0] * manifest.world_size
    for file in manifest.files:
        spans = (file.data_start, file.nbytes - file.data_start)
        count = file.first_block + sum(block_count(nbytes, manifest.block_bytes) for nbytes in spans)
        counts[file.rank] = max(counts[file.rank], count)
    return counts


def lengths(manifest: Manifest) -> dict[str, range]:
    """Returns the lengths in bytes that each file may have, by its path."""
    exact = {manifest.path(file): file.nbytes for file in manifest.files}
    exact[names.index_path(manifest.save_id)] = manifest.index_bytes
    least = {
        names.digests_path(manifest.save_id, rank): count * DIGEST_BYTES
        for rank, count in enumerate(digest_counts(manifest))
    }
    may_have = {path: range(nbytes, nbytes + 1) for path, nbytes in exact.items()}
    return may_have | {path: range(nbytes, sys.maxsize) for path, nbytes in least.items()}


def files_in(store: Store, manifest: Manifest, paths: Iterable[str] | None = None) -> dict[str, int]:
    """Returns those of these files that are in a directory and may have the length that they have there, each with its
    length in bytes. ``paths``: None means all files of the checkpoint. Raises StorageError."""
    may_have, directory = lengths(manifest), names.data_dir(manifest.save_id)
    listed = store.entries(directory, deep=True)
    entries = {f"{directory}/{entry.path}": entry for entry in listed or ()}
    found: dict[str, int] = {}
    with closing(store.reader()) as reader:
        for path in may_have if paths is None else paths:
            if listed is not None and path not in entries:
                continue
            nbytes = entries[path].nbytes if path in entries else None
            if nbytes is None:  # The store cannot list files, or the file is a link, which the reader may follow.
                with suppress(FormatError):
                    nbytes = reader.size(path)
            if nbytes is not None and nbytes in may_have[path]:
                found[path] = nbytes
    return found
