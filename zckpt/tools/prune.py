"""Removes older checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.checkpoint.cleaning.older import remove_older
from zckpt.checkpoint.writing.options import check_counts
from zckpt.errors import check_flags

if TYPE_CHECKING:
    from zckpt.checkpoint.cleaning.cleanup import Cleanup
    from zckpt.storage.location import StrPath


def prune(run: StrPath, *, keep_last: int, keep_every: int | None = None, dry_run: bool = False) -> Cleanup:
    """Removes older checkpoints of a run, and keeps the newest ones. Call this on one rank only.

    A directory may hold checkpoints of several training runs, such as those of an actor and of a critic, and of several
    uses: some to resume from, some that hold only weights, and partial copies. Each checkpoint records its run and its
    use. Each run and use keeps ``keep_last`` checkpoints of its own, so the last checkpoint from which a run can be
    resumed always stays.

    These checkpoints are never removed either:

    - the checkpoint that ``latest`` names,
    - a checkpoint that another process is writing at this moment,
    - an incomplete checkpoint, whose manifest cannot be read, or of which a file is missing or has the wrong length. It
      does not count as one of ``keep_last``.

    Of each checkpoint, the manifest is removed first, durably, and then the data.

    Args:
        run: the directory of the run. Its checkpoints are those that ``zckpt.gc`` finds.
        keep_last: the number of checkpoints of each run and use that are kept, counted from the one that was committed
            last.
        keep_every: if it is given, checkpoints whose step is a multiple of this number are kept too.
        dry_run: whether to remove nothing, and only return what would be removed.

    Returns:
        The files and directories that were removed, with their sizes, and why each of the others was kept.

    Raises:
        CheckpointNotFoundError: there is no such directory, or it is the directory of one checkpoint.
        FormatError: ``latest`` cannot be read.
        StorageError: the operating system reports an error when it reads or removes something.
        UnsupportedError: the path is a URL, and there is no store for its scheme, or a path of Windows elsewhere.
        ValueError: a number is not a whole number of 1 or more.
    """
    check_flags(dry_run=dry_run)
    check_counts(keep_last=keep_last, keep_every=keep_every)
    return remove_older(run, keep_last, keep_every, dry_run=dry_run)
