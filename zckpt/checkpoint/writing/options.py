"""The arguments of a write. They are checked once, and passed on as one object."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from zckpt.errors import check_flags, refuse_unknown
from zckpt.format.limits import WORLD_SIZE_MAX
from zckpt.plan.select import several
from zckpt.progress import check_progress
from zckpt.ranks.collectives import comparable
from zckpt.storage.location import Location
from zckpt.transfer.budget import budget_or_default

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from zckpt.progress import Progress
    from zckpt.storage.location import StrPath
    from zckpt.transfer.budget import Budget


def check_counts(**counts: int | None) -> None:
    """Raises ValueError for a count that is neither None nor an integer of at least 1."""
    for name, count in counts.items():
        if not (count is None or (type(count) is int and count >= 1)):
            raise ValueError(f"{name} must be a whole number of 1 or more, got {count!r}")


def check_retention(keep_last: int | None, keep_every: int | None, of: str = "") -> None:
    """Raises ValueError unless this says which checkpoints are kept. ``of`` stands behind the names in its text."""
    check_counts(**{f"keep_last{of}": keep_last, f"keep_every{of}": keep_every})
    if keep_every is not None and keep_last is None:
        raise ValueError(f"keep_every{of} says what is kept beside the last ones: pass keep_last{of} too")


@dataclass(frozen=True, slots=True)
class Background:
    """How ``zckpt.write`` works in the background: ``background=zckpt.Background(snapshot="lazy")``.

    Args:
        snapshot: what is copied before the call returns. "copy" copies everything. "lazy" copies only buffers,
            ``client_state`` and frozen weights. Master weights and moments are then read while the next forward and
            backward passes run, and the next optimizer step waits until that is done. Nothing else may change them
            before.
        snapshot_bytes: the number of bytes of memory that the copies may take on this rank. If the state is larger, the
            rest is on disk before training continues. None means half of the available memory, divided among the ranks
            of a machine.

    Making this object checks nothing. The call that gets it does, so that all ranks raise an error together.
    """

    snapshot: Literal["copy", "lazy"] = "copy"
    snapshot_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CopyTo:
    """Where ``zckpt.write`` also copies its checkpoint, and which copies are kept there:
    ``copy_to=zckpt.CopyTo("s3://bucket/run", keep_last=5)``.

    Args:
        path: the directory of the run that gets the copies.
        keep_last: the number of copies that are kept, as for ``zckpt.write``. None removes none, whatever the
            ``keep_last`` of the write is.
        keep_every: with ``keep_last``, copies whose step is a multiple of this number are kept too.

    Making this object checks nothing. The call that gets it does, so that all ranks raise an error together.
    """

    path: StrPath
    keep_last: int | None = None
    keep_every: int | None = None


class EarlierCopyOptions(TypedDict, total=False):
    """Arguments that are fields of ``CopyTo`` now. Calls still accept them."""

    copy_keep_last: int | None
    copy_keep_every: int | None


class EarlierOptions(EarlierCopyOptions, total=False):
    """Arguments that are fields of ``Background`` and ``CopyTo`` now. Calls still accept them."""

    snapshot: Literal["copy", "lazy"]
    snapshot_bytes: int | None


def only_earlier(function: Callable[..., Any], others: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``others``, the arguments that the signature of ``function`` does not name. Raises TypeError if one of
    them is not among ``EarlierOptions``."""
    known = [name for name in inspect.signature(function).parameters if name != "earlier"]
    refuse_unknown(f"zckpt.{function.__name__}", others.keys() - EarlierOptions.__annotations__.keys(), known)
    return others


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
    background: bool | Background = False
    keep_last: int | None = None
    keep_every: int | None = None
    reuse: StrPath | None = "latest"
    node_local: bool = False
    ranks_per_file: int = 1
    copy_to: StrPath | CopyTo | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)
    """Those of ``EarlierOptions`` that were given."""
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
        """Returns the options in the form that a write uses: names in collections, a budget, and nothing in
        ``earlier``. Raises ValueError and TypeError for values that are not allowed. It is called in a step of all
        ranks, so that no rank waits for one that refuses its options."""
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ValueError(f"step must be a whole number of 0 or more, got {self.step!r}")
        most = self.ranks_per_file
        if type(most) is not int or not 1 <= most <= WORLD_SIZE_MAX:
            raise ValueError(f"ranks_per_file must be a whole number from 1 to {WORLD_SIZE_MAX}, got {most!r}")
        check_retention(self.keep_last, self.keep_every)
        if not isinstance(self.reuse, str | os.PathLike | None):
            raise TypeError(f"reuse must be a path or None, got {self.reuse!r}")
        check_flags(overwrite=self.overwrite, latest=self.latest, node_local=self.node_local)
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
        return replace(
            self, parts=several(self.parts), exclude=several(self.exclude), budget=budget,
            background=self.in_background or False, copy_to=self.copies, earlier={},
        )  # fmt: skip

    @property
    def in_background(self) -> Background | None:
        """The options of a write in the background, or None if the write is not one. Raises TypeError and
        ValueError."""
        background = self.background
        if not isinstance(background, bool | Background):
            raise TypeError(f"background must be True, False or a zckpt.Background, got {background!r}")
        earlier = {name: value for name, value in self.earlier.items() if name in Background.__annotations__}
        if earlier and isinstance(background, Background):
            raise ValueError(f"background is a zckpt.Background: set {' and '.join(earlier)} there")
        options = background if isinstance(background, Background) else Background(**earlier)
        if options.snapshot not in ("copy", "lazy"):
            raise ValueError(f"snapshot must be 'copy' or 'lazy', got {options.snapshot!r}")
        nbytes = options.snapshot_bytes
        if nbytes is not None and not (type(nbytes) is int and nbytes >= 0):
            raise ValueError(f"snapshot_bytes must be a number of bytes, 0 or more, got {nbytes!r}")
        if not background and options != Background():
            raise ValueError("snapshot and snapshot_bytes are about a write in the background: pass background=True")
        return options if background else None

    @property
    def copies(self) -> CopyTo | None:
        """Where the checkpoint is copied to, or None if it is not copied. Raises TypeError and ValueError."""
        copy_to = self.copy_to
        names = (name for name in EarlierCopyOptions.__annotations__ if self.earlier.get(name) is not None)
        kept = {name.removeprefix("copy_"): self.earlier[name] for name in names}
        if copy_to is None:
            if kept:
                raise ValueError("copy_keep_last says how many copies are kept: pass copy_to too")
            return None
        if kept and isinstance(copy_to, CopyTo):
            raise ValueError(f"copy_to is a zckpt.CopyTo: set {' and '.join(kept)} there")
        copies = copy_to if isinstance(copy_to, CopyTo) else CopyTo(copy_to, **kept)
        if not isinstance(copies.path, str | os.PathLike):
            raise TypeError(f"copy_to must be a path, a zckpt.CopyTo or None, got {copies.path!r}")
        check_retention(copies.keep_last, copies.keep_every, " of copy_to")
        return copies

    @property
    def lazy(self) -> bool:
        return self.in_background is not None and self.in_background.snapshot == "lazy"

    def common(self, path: str) -> dict[str, object]:
        """Returns the arguments that have to be the same on every rank."""
        copies = self.copies
        return comparable(
            path=path, step=self.step, parts=self.parts, exclude=self.exclude, overwrite=self.overwrite,
            latest=self.latest, pending_gradients=self.pending_gradients, background=self.in_background is not None,
            snapshot="lazy" if self.lazy else "copy",
            reuse=None if self.reuse is None else str(self.reuse), node_local=self.node_local,
            ranks_per_file=self.ranks_per_file, keep_last=self.keep_last, keep_every=self.keep_every,
            copy_to=None if copies is None else str(Location.of(copies.path).absolute()),
            **{f"{name} of copy_to": getattr(copies, name, None) for name in ("keep_last", "keep_every")},
        )  # fmt: skip
