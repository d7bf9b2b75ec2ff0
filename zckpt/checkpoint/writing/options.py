"""The arguments of a write. They are checked once, and passed on as one object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from zckpt.errors import check_flags
from zckpt.format.limits import WORLD_SIZE_MAX
from zckpt.plan.select import several
from zckpt.progress import check_progress
from zckpt.ranks.collectives import comparable
from zckpt.storage.location import Location
from zckpt.transfer.budget import budget_or_default

if TYPE_CHECKING:
    from collections.abc import Collection

    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def check_counts(**counts: int | None) -> None:
    """Raises ValueError for a count that is neither None nor an integer of at least 1."""
    for name, count in counts.items():
        if not (count is None or (type(count) is int and count >= 1)):
            raise ValueError(f"{name} must be a whole number of 1 or more, got {count!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The arguments of ``zckpt.write``, whose docstring explains them, and some that an attached engine needs."""

    step: int | None = None
    parts: Collection[str] | None = None
    exclude: Collection[str] = ()
    client_state: Mapping[str, Any] | None = None
    rank_state: Mapping[str, Any] | None = None
    overwrite: bool = False
    latest: bool = True
    budget: Budget | None = None
    progress: Progress | None = None
    pending_gradients: Literal["refuse", "drop"] = "refuse"
    background: bool = False
    snapshot: Literal["copy", "lazy"] = "copy"
    snapshot_bytes: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    reuse: StrPath | None = "latest"
    node_local: bool = False
    ranks_per_file: int = 1
    copy_to: StrPath | None = None
    copy_keep_last: int | None = None
    copy_keep_every: int | None = None
    run: StrPath | None = None
    """The directory that gets the file ``latest``, which names the checkpoint by its path relative to this directory.
    None means the parent of the checkpoint's directory."""
    each_client_state: bool = False
    """What is written if the ranks have different client_state. True: that of each rank, in the tree of the rank, under
    the key ``client_state``. False: only that of rank 0, and a warning says so."""
    leave_out: bool = False
    """Whether what cannot be saved is left out, and a warning says so. If not, it is an error."""
    replace_foreign: bool = False
    """Whether the files of DeepSpeed's own checkpoint in the target are removed after the commit. If not, they cause a
    CheckpointExistsError before a byte is written."""

    def checked(self) -> WriteOptions:
        """Returns the same options with collections of names, and with a budget. Raises ValueError and TypeError for
        values that are not allowed."""
        if self.snapshot not in ("copy", "lazy"):
            raise ValueError(f"snapshot must be 'copy' or 'lazy', got {self.snapshot!r}")
        if not self.background and (self.snapshot, self.snapshot_bytes) != ("copy", None):
            raise ValueError("snapshot and snapshot_bytes are about a write in the background: pass background=True")
        if self.snapshot_bytes is not None and not (isinstance(self.snapshot_bytes, int) and self.snapshot_bytes >= 0):
            raise ValueError(f"snapshot_bytes must be a number of bytes, 0 or more, got {self.snapshot_bytes!r}")
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ValueError(f"step must be a whole number of 0 or more, got {self.step!r}")
        most = self.ranks_per_file
        if type(most) is not int or not 1 <= most <= WORLD_SIZE_MAX:
            raise ValueError(f"ranks_per_file must be a whole number from 1 to {WORLD_SIZE_MAX}, got {most!r}")
        kept = ("", self.keep_last, self.keep_every), ("copy_", self.copy_keep_last, self.copy_keep_every)
        for of, last, every in kept:
            check_counts(**{f"{of}keep_last": last, f"{of}keep_every": every})
            if every is not None and last is None:
                raise ValueError(f"{of}keep_every says what is kept beside the last ones: pass {of}keep_last too")
        if self.copy_to is None and self.copy_keep_last is not None:
            raise ValueError("copy_keep_last says how many copies are kept: pass copy_to too")
        for name, path in (("reuse", self.reuse), ("copy_to", self.copy_to)):
            if not isinstance(path, str | os.PathLike | None):
                raise TypeError(f"{name} must be a path or None, got {path!r}")
        check_flags(
            overwrite=self.overwrite, latest=self.latest, background=self.background, node_local=self.node_local
        )  # fmt: skip
        check_progress(self.progress)
        given: tuple[tuple[str, object], ...] = ("client_state", self.client_state), ("rank_state", self.rank_state)
        for name, value in given:
            if not isinstance(value, Mapping | None):
                raise TypeError(
                    f"{name} must be a dict, of the caller's own values by name, got {type(value).__name__}"
                )
        if self.pending_gradients not in ("refuse", "drop"):
            raise ValueError(f"pending_gradients must be 'refuse' or 'drop', got {self.pending_gradients!r}")
        budget = budget_or_default(self.budget)
        return replace(self, parts=several(self.parts), exclude=several(self.exclude), budget=budget)

    @property
    def lazy(self) -> bool:
        return self.background and self.snapshot == "lazy"

    def common(self, path: str) -> dict[str, object]:
        """Returns the arguments that have to be the same on every rank."""
        return comparable(
            path=path, step=self.step, parts=self.parts, exclude=self.exclude, overwrite=self.overwrite,
            latest=self.latest, pending_gradients=self.pending_gradients, background=self.background,
            snapshot=self.snapshot,
            reuse=None if self.reuse is None else str(self.reuse), node_local=self.node_local,
            ranks_per_file=self.ranks_per_file,
            copy_to=None if self.copy_to is None else str(Location.of(self.copy_to).absolute()),
        )  # fmt: skip
