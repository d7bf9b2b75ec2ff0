"""The types of what the calls of zckpt take and return, for annotations. The errors are in ``zckpt.errors``."""

from zckpt.checkpoint.background import PendingWrite as PendingWrite
from zckpt.checkpoint.cleaning.cleanup import Cleanup as Cleanup
from zckpt.checkpoint.cleaning.cleanup import Removed as Removed
from zckpt.checkpoint.listing.contents import PieceInfo as PieceInfo
from zckpt.checkpoint.listing.contents import TensorInfo as TensorInfo
from zckpt.checkpoint.reading.checkpoint import Checkpoint as Checkpoint
from zckpt.checkpoint.restore import RankStates as RankStates
from zckpt.checkpoint.restore import Restored as Restored
from zckpt.frameworks.preemption import Preemption as Preemption
from zckpt.offloading.offload import Offloaded as Offloaded
from zckpt.progress import Progress as Progress
from zckpt.tools.comparing.report import Difference as Difference
from zckpt.tools.comparing.report import StateDifference as StateDifference
from zckpt.tools.comparing.report import TensorDifference as TensorDifference
from zckpt.tools.converting.convert import Converted as Converted
from zckpt.tools.exporting.export import Exported as Exported
from zckpt.tools.repairing.repair import RepairReport as RepairReport
from zckpt.tools.validating.report import Finding as Finding
from zckpt.tools.validating.report import Observation as Observation
from zckpt.tools.validating.report import Report as Report
from zckpt.tools.where import Placement as Placement
from zckpt.tools.where import PlacementEntry as PlacementEntry
from zckpt.tools.where import RankMemory as RankMemory
