"""The result of a clean-up: what it has removed and what it has left alone, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Removed:
    """A file or directory that ``zckpt.gc`` or ``zckpt.prune`` has removed, or, with ``dry_run``, would remove."""

    path: str
    """The path of the file or directory."""
    nbytes: int
    """The size in bytes of the file, or of all files in the directory, as far as their space is free now. A file that
    several checkpoints share is counted when the last of them is removed."""
    shared_bytes: int
    """The size in bytes of those of these files that other checkpoints share. They take their space as before."""
    reason: str
    """Why it was removed. ``leftover``: it belonged to a write that died, failed or was replaced. ``retention``: it
    belonged to a checkpoint that ``zckpt.prune`` was not told to keep. ``discarded``: it belonged to a checkpoint
    without a manifest that ``discard`` has named."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What ``zckpt.gc`` or ``zckpt.prune`` has done, or, with ``dry_run``, would do."""

    removed: tuple[Removed, ...]
    """The files and directories that were removed, or would be."""
    in_use: tuple[str, ...]
    """The paths of checkpoints that were left alone because somebody is writing there now."""
    dry_run: bool
    """Whether nothing was removed, because the call was only to say what it would remove."""
    recoverable: tuple[str, ...] = ()
    """The paths of checkpoints without a manifest that were left alone because all of their data are there:
    ``zckpt.repair`` can make a checkpoint of each."""
    checkpoints: int = 0
    """The number of checkpoints, committed or only begun, that were found in the directory."""
    kept: tuple[str, ...] = ()
    """The paths of the checkpoints that ``zckpt.prune`` has kept, in the order in which they were committed."""
    unreadable: tuple[str, ...] = ()
    """The paths of checkpoints that ``zckpt.prune`` has left alone because they are not whole: their manifests
    cannot be read, or some of their files are missing or have another length than they should."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of everything in ``removed`` whose space is free now."""
        return sum(one.nbytes for one in self.removed)

    @property
    def shared_bytes(self) -> int:
        """The size in bytes of everything in ``removed`` that other checkpoints share."""
        return sum(one.shared_bytes for one in self.removed)

    def to_json(self) -> str:
        """Returns one line of JSON with the fields of this class, ``nbytes`` and ``shared_bytes``."""
        return json.dumps({**asdict(self), "nbytes": self.nbytes, "shared_bytes": self.shared_bytes})

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
        what = "1 file or directory" if len(self.removed) == 1 else f"{len(self.removed)} files and directories"
        done = f"{verb} {what}, {self.nbytes:,} bytes"
        if self.shared_bytes:
            done += f"; {self.shared_bytes:,} more bytes stay, because other checkpoints share them"
        return "\n".join([*lines, done])
