"""What a clean-up has removed or left alone, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that ``zckpt.gc`` or ``zckpt.prune`` has removed, or would remove."""

    path: str
    nbytes: int
    reason: str
    """``leftover``: of a write that died, failed or was replaced. ``retention``: of a checkpoint that ``zckpt.prune``
    was not told to keep. ``discarded``: of a checkpoint without a manifest, which ``discard`` has named."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What ``zckpt.gc`` or ``zckpt.prune`` did, or with ``dry_run`` would do."""

    removed: tuple[Removed, ...]
    in_use: tuple[str, ...]
    """Checkpoints that were left alone because somebody writes there now."""
    dry_run: bool
    recoverable: tuple[str, ...] = ()
    """Checkpoints without a manifest that were left alone because all of their data are there: ``zckpt.repair`` can
    make a checkpoint of each."""
    checkpoints: int = 0
    """How many checkpoints, committed or only begun, were found in the directory."""
    kept: tuple[str, ...] = ()
    """The checkpoints that ``zckpt.prune`` has kept, in the order in which they were committed."""
    unreadable: tuple[str, ...] = ()
    """Checkpoints that ``zckpt.prune`` has left alone because their manifest cannot be read."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.removed)

    def to_json(self) -> str:
        """One line, with the fields of this class, and ``nbytes``."""
        return json.dumps({**asdict(self), "nbytes": self.nbytes})

    def __str__(self) -> str:
        lines = [f"{one.reason:9}  {one.nbytes:>15,}  {one.path}" for one in self.removed]
        told = {
            "kept": self.kept,
            "in use": self.in_use,
            "unreadable": self.unreadable,
            "recoverable": self.recoverable,
        }
        lines += [f"{what:26}  {path}" for what, paths in told.items() for path in paths]
        if self.recoverable:
            lines.append("recoverable: the manifest is lost, or was never written, and all data are there")
            lines.append("  `zckpt repair DIR` makes a checkpoint of it, `zckpt gc --discard DIR` removes it")
        if not self.checkpoints:
            lines.append("no checkpoint was found there; to clean up one, give its directory or that of its run")
        verb = "would remove" if self.dry_run else "removed"
        return "\n".join([*lines, f"{verb} {len(self.removed)} files and directories, {self.nbytes:,} bytes"])
