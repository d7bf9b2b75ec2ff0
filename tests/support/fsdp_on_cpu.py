"""Accelerate with FSDP2 on the CPU. Accelerate uses FSDP only on accelerators, though FSDP2 works on the CPU all the
same."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def fsdp_accelerator(*args: Any, fsdp_plugin: Any, **options: Any) -> Any:
    """Returns an Accelerator with FSDP2. The arguments are those of ``accelerate.Accelerator``."""
    accelerator = accelerate.Accelerator(*args, fsdp_plugin=fsdp_plugin, **options)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=fsdp_plugin)
    return accelerator
