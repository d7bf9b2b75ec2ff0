"""zckpt: sharded, verified checkpoints of ZeRO training states. See README.md; the format is in ``spec/``."""

from zckpt.api.attach import attach, attach_all, detach
from zckpt.api.background import PendingWrite, wait
from zckpt.api.gc import Cleanup, Removed, gc
from zckpt.api.open import open  # noqa: A004  zckpt.open reads like the builtin on purpose
from zckpt.api.repair import RepairReport, repair
from zckpt.api.restore import Restored, restore
from zckpt.api.validate import validate
from zckpt.api.write import write
from zckpt.api.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zckpt.errors import (
    CastError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DeviceError,
    DigestError,
    FeatureError,
    FormatError,
    KeyNotFoundError,
    LockedError,
    MismatchError,
    MissingFileError,
    NoSpaceError,
    RankError,
    RepairError,
    SizeError,
    StateError,
    StorageError,
    TagError,
    UnfinishedWriteError,
    UnsupportedError,
    VersionError,
    ZckptError,
)
from zckpt.progress import Progress, ProgressBar
from zckpt.reading.checkpoint import Checkpoint
from zckpt.reading.contents import PieceInfo, TensorInfo
from zckpt.transfer.budget import Budget
from zckpt.validation.report import Finding, Observation, Report
from zckpt.version import __version__

__all__ = [
    "Budget",
    "CastError",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "Cleanup",
    "DeviceError",
    "DigestError",
    "FeatureError",
    "Finding",
    "FormatError",
    "KeyNotFoundError",
    "LockedError",
    "MismatchError",
    "MissingFileError",
    "NoSpaceError",
    "Observation",
    "PendingWrite",
    "PieceInfo",
    "Progress",
    "ProgressBar",
    "RankError",
    "Removed",
    "RepairError",
    "RepairReport",
    "Report",
    "Restored",
    "SizeError",
    "StateError",
    "StorageError",
    "TagError",
    "TensorInfo",
    "UnfinishedWriteError",
    "UnsupportedError",
    "VersionError",
    "ZckptError",
    "__version__",
    "attach",
    "attach_all",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "detach",
    "gc",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "open",
    "repair",
    "restore",
    "validate",
    "wait",
    "write",
]
