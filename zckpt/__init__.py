"""zckpt: sharded, verified checkpoints of ZeRO training states. See README.md; the format is in ``spec/``."""

from zckpt.background import PendingWrite, wait
from zckpt.checkpoint import Checkpoint
from zckpt.contents import PieceInfo, TensorInfo
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
from zckpt.integrations.deepspeed import attach, attach_all, detach
from zckpt.integrations.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zckpt.io.budget import Budget
from zckpt.pipelines.gc import Cleanup, Removed, gc
from zckpt.pipelines.open import open  # noqa: A004  zckpt.open reads like the builtin on purpose
from zckpt.pipelines.repair import RepairReport, repair
from zckpt.pipelines.restore import Restored, restore
from zckpt.pipelines.validate import validate
from zckpt.pipelines.write import write
from zckpt.progress import Progress, ProgressBar
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
