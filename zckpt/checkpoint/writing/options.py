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

    The write refuses values that are not allowed, on all ranks together.
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

    The write refuses values that are not allowed, on all ranks together.
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


def _grouped(
    background: bool | Background, copy_to: StrPath | CopyTo | None, earlier: Mapping[str, Any]
) -> tuple[Background | None, CopyTo | None]:
    """Returns how a write works in the background, and where its checkpoint is copied, or None for either. ``earlier``:
    those of ``EarlierOptions`` that were given. Raises TypeError and ValueError. This is called in a step of all ranks,
    so that none waits for one that refuses its options."""
    if not isinstance(background, bool | Background):
        raise TypeError(f"background must be True, False or a zckpt.Background, got {background!r}")
    of_background = {name: value for name, value in earlier.items() if name in Background.__annotations__}
    if of_background and isinstance(background, Background):
        raise ValueError(f"background is a zckpt.Background: set {' and '.join(of_background)} there")
    in_background = background if isinstance(background, Background) else Background(**of_background)
    if in_background.snapshot not in ("copy", "lazy"):
        raise ValueError(f"snapshot must be 'copy' or 'lazy', got {in_background.snapshot!r}")
    nbytes = in_background.snapshot_bytes
    if nbytes is not None and not (type(nbytes) is int and nbytes >= 0):
        raise ValueError(f"snapshot_bytes must be a number of bytes, 0 or more, got {nbytes!r}")
    if not background and in_background != Background():
        raise ValueError("snapshot and snapshot_bytes are about a write in the background: pass background=True")

    kept = {name: value for name, value in earlier.items() if name.startswith("copy_") and value is not None}
    if kept and copy_to is None:
        raise ValueError("copy_keep_last says how many copies are kept: pass copy_to too")
    if kept and isinstance(copy_to, CopyTo):
        raise ValueError(f"copy_to is a zckpt.CopyTo: set {' and '.join(kept)} there, without copy_")
    copies: CopyTo | None
    if copy_to is None or isinstance(copy_to, CopyTo):
        copies = copy_to
    else:
        copies = CopyTo(copy_to, kept.get("copy_keep_last"), kept.get("copy_keep_every"))
    if copies is not None:
        if not isinstance(copies.path, str | os.PathLike):
            raise TypeError(f"copy_to must be a path, a zckpt.CopyTo or None, got {copies.path!r}")
        check_retention(copies.keep_last, copies.keep_every, " of copy_to")
    return in_background if background else None, copies


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
        """Returns the same options with collections of names, a budget, and none in ``earlier``. Raises ValueError and
        TypeError for values that are not allowed."""
        background, copies = _grouped(self.background, self.copy_to, self.earlier)
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
            background=background or False, copy_to=copies, earlier={},
        )  # fmt: skip

    @property
    def in_background(self) -> Background | None:
        """How the write works in the background. None if it does not."""
        return _grouped(self.background, self.copy_to, self.earlier)[0]

    @property
    def copies(self) -> CopyTo | None:
        """Where the checkpoint is copied. None if it is not."""
        return _grouped(self.background, self.copy_to, self.earlier)[1]

    @property
    def lazy(self) -> bool:
        return self.in_background is not None and self.in_background.snapshot == "lazy"

    def common(self, path: str) -> dict[str, object]:
        """Returns the arguments that have to be the same on every rank."""
        return comparable(
            path=path, step=self.step, parts=self.parts, exclude=self.exclude, overwrite=self.overwrite,
            latest=self.latest, pending_gradients=self.pending_gradients, background=self.in_background is not None,
            snapshot="lazy" if self.lazy else "copy",
            reuse=None if self.reuse is None else str(self.reuse), node_local=self.node_local,
            ranks_per_file=self.ranks_per_file,
            copy_to=None if self.copies is None else str(Location.of(self.copies.path).absolute()),
        )  # fmt: skip
