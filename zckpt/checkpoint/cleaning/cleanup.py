"""The result of a clean-up, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from zckpt.errors import printable

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Removed:
    """A file or directory that ``zckpt.gc`` or ``zckpt.prune`` has removed. With ``dry_run``, it would be removed."""

    path: str
    """The path of the file or directory."""
    nbytes: int
    """The number of bytes of disk space that the removal has freed. A file with several hard links in several
    checkpoints is counted when the last link is removed."""
    shared_bytes: int
    """The size in bytes of the removed files that still have hard links in other checkpoints. Their disk space is not
    freed."""
    reason: str
    """The reason for the removal. ``leftover``: it belonged to a write that died, failed or was replaced.
    ``retention``: it belonged to a checkpoint that ``zckpt.prune`` does not keep. ``discarded``: it belonged to a
    checkpoint without a manifest that ``discard`` names."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """The result of ``zckpt.gc`` or ``zckpt.prune``. With ``dry_run``, nothing was removed."""

    removed: tuple[Removed, ...]
    """The files and directories that were removed. With ``dry_run``, they would be removed."""
    in_use: tuple[str, ...]
    """The paths of checkpoints that were left alone because another process is writing there. In object stores, also
    the paths of data that no manifest names and that are less than a day old, because a writer that was taken for dead
    may still commit them."""
    dry_run: bool
    """Whether the call had the argument ``dry_run``, so that nothing was removed."""
    recoverable: tuple[str, ...] = ()
    """The paths of checkpoints without a manifest that were left alone because all of their data are there.
    ``zckpt.repair`` can rebuild their manifests. Also the paths of checkpoints that are prepared on this machine, and
    that another machine may have committed: ``zckpt.restore`` on all machines settles these."""
    checkpoints: int = 0
    """The number of checkpoints that were found in the directory. Uncommitted checkpoints are counted too."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """For each checkpoint that ``zckpt.prune`` has kept, its path and why it was kept, in the order in which they were
    committed."""
    unreadable: tuple[str, ...] = ()
    """The paths of checkpoints that ``zckpt.prune`` has left alone because they are incomplete: their manifests cannot
    be read, or some of their files are missing or have the wrong length."""
    foreign: tuple[str, ...] = ()
    """The paths of files, directories and links that have names of zckpt or are in its directories, and that were left
    alone because zckpt has not made them, or not all that is in them."""

    @property
    def kept(self) -> tuple[str, ...]:
        """The paths of the checkpoints that ``zckpt.prune`` has kept, in the order in which they were committed."""
        return tuple(self.reasons)

    @property
    def nbytes(self) -> int:
        """The number of bytes of disk space that were freed."""
        return sum(removed.nbytes for removed in self.removed)

    @property
    def shared_bytes(self) -> int:
        """The size in bytes of the removed files that other checkpoints share, so that no disk space was freed."""
        return sum(removed.shared_bytes for removed in self.removed)

    def to_json(self) -> str:
        """Returns one line of JSON with the fields of this class, ``kept``, ``nbytes`` and ``shared_bytes``."""
        computed = {"kept": self.kept, "nbytes": self.nbytes, "shared_bytes": self.shared_bytes}
        return json.dumps({**asdict(self), **computed})

    def __str__(self) -> str:
        lines = [f"{removed.reason:9}  {removed.nbytes:>15,}  {printable(removed.path)}" for removed in self.removed]
        lines += [f"{'kept':26}  {printable(path)}  ({reason})" for path, reason in self.reasons.items()]
        remaining = {
            "in use": self.in_use,
            "unreadable": self.unreadable,
            "recoverable": self.recoverable,
            "foreign": self.foreign,
        }
        lines += [f"{label:26}  {printable(path)}" for label, paths in remaining.items() for path in paths]
        if self.recoverable:
            lines.append("recoverable: the manifest is lost, or was never written, and all data are there")
            lines.append("  `zckpt repair DIR` makes a checkpoint of it, `zckpt gc --discard DIR` removes it")
            lines.append("  (if other machines have parts of it, `zckpt.restore` on all of them commits it)")
        if not self.checkpoints and not self.removed:
            lines.append("no checkpoint was found there; to clean up after one, give its directory or that of its run")
        verb = "would remove" if self.dry_run else "removed"
        what = "1 file or directory" if len(self.removed) == 1 else f"{len(self.removed)} files and directories"
        done = f"{verb} {what}, {self.nbytes:,} bytes"
        if self.shared_bytes:
            done += f"; {self.shared_bytes:,} more bytes stay, because other checkpoints share them"
        return "\n".join([*lines, done])
