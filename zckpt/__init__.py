"""zckpt: sharded, verified checkpoints of ZeRO training states. See README.md; the format is in ``spec/``."""

from zckpt.api import open, restore, validate, write  # noqa: A004  zckpt.open reads like the builtin on purpose
from zckpt.background import PendingWrite, wait
from zckpt.checkpoint import Checkpoint, PieceInfo, TensorInfo
from zckpt.errors import (
    CastError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DigestError,
    FeatureError,
    FormatError,
    KeyNotFoundError,
    MismatchError,
    MissingFileError,
    NoSpaceError,
    RankError,
    SizeError,
    StateError,
    StorageError,
    UnfinishedWriteError,
    UnsupportedError,
    VersionError,
    ZckptError,
)
from zckpt.integrations.deepspeed import attach, detach
from zckpt.io.budget import Budget
from zckpt.progress import Progress, ProgressBar
from zckpt.validation import Finding, Report
from zckpt.version import __version__

__all__ = [
    "Budget",
    "CastError",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "DigestError",
    "FeatureError",
    "Finding",
    "FormatError",
    "KeyNotFoundError",
    "MismatchError",
    "MissingFileError",
    "NoSpaceError",
    "PendingWrite",
    "PieceInfo",
    "Progress",
    "ProgressBar",
    "RankError",
    "Report",
    "SizeError",
    "StateError",
    "StorageError",
    "TensorInfo",
    "UnfinishedWriteError",
    "UnsupportedError",
    "VersionError",
    "ZckptError",
    "__version__",
    "attach",
    "detach",
    "open",
    "restore",
    "validate",
    "wait",
    "write",
]
