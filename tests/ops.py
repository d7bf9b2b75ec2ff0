"""DeepSpeed's C++ ops for the CPU. As a script: compiles them, so that no test has to wait for a compiler."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load() -> None:
    """Loads the ops that training on the CPU uses; compiles those that are not there yet, 30 to 45 seconds each."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    import deepspeed
    import torch
    from deepspeed.ops.op_builder import cpu

    directory = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        made_with = directory / "made_with"
        versions = f"python {sys.version}\ntorch {torch.__version__}\ndeepspeed {deepspeed.__version__}\n"
        if made_with.exists() and made_with.read_text() != versions:
            for op in directory.glob("*/"):
                shutil.rmtree(op)
        # torch waits for ever for a lock that a killed build left. Nobody builds now: the flock is ours.
        for lock in directory.glob("*/lock"):
            lock.unlink()
        names = ["ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder"]
        builders = [getattr(cpu, name) for name in names if hasattr(cpu, name)]  # before 0.19, not the last two
        if async_io():
            builders.append(cpu.AsyncIOBuilder)
        for builder in builders:
            builder().load(verbose=False)
        made_with.write_text(versions)


def async_io() -> bool:
    """Whether there is NVMe offload on the CPU: its op needs libaio's header, and before DeepSpeed 0.19 pinned memory
    was CUDA's alone; without any, the swapper aborts in its first write.
    """
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    pins = importlib.util.find_spec("deepspeed.utils.pin_memory") is not None
    return pins and bool(AsyncIOBuilder().is_compatible(verbose=False))


if __name__ == "__main__":
    load()
