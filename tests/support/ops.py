"""DeepSpeed's C++ ops for the CPU. As a script, compiles them, so that no test has to wait for a compiler.

Without arguments it compiles all of them, otherwise those that its arguments name.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = {
    "shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "async_io": "AsyncIOBuilder",
}


def load(names: Iterable[str] = BUILDERS) -> None:
    """Loads the named ops; compiles those that are not there yet, half a minute each, but async_io in minutes.

    Leaves out what this DeepSpeed or this machine does not have: Adagrad and Lion before 0.19, async_io without libaio.
    """
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
        with without_debug_information():
            for name in names:
                builder = getattr(cpu, BUILDERS[name], None)
                if builder is not None and (name != "async_io" or async_io()):
                    builder().load(verbose=False)
        made_with.write_text(versions)


@contextmanager
def without_debug_information() -> Iterator[None]:
    """DeepSpeed has its ops compiled with it, which takes half of the time. The ``c++`` that is found here adds a flag
    against it; so the commands stay as they were, and a later load finds nothing to compile.
    """
    path, compiler = os.environ["PATH"], shutil.which("c++")
    with tempfile.TemporaryDirectory(prefix="zckpt-compiler-") as directory:
        if compiler is not None:
            script = Path(directory) / "c++"
            script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -g0\n')
            script.chmod(0o755)
        os.environ["PATH"] = f"{directory}{os.pathsep}{path}"
        try:
            yield
        finally:
            os.environ["PATH"] = path


def async_io() -> bool:
    """Whether there is NVMe offload on the CPU: its op needs libaio's header, and before DeepSpeed 0.19 pinned memory
    was CUDA's alone; without any, the swapper aborts in its first write.
    """
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    pins = importlib.util.find_spec("deepspeed.utils.pin_memory") is not None
    return pins and bool(AsyncIOBuilder().is_compatible(verbose=False))


if __name__ == "__main__":
    load(sys.argv[1:] or BUILDERS)
