"""Loads and compiles DeepSpeed's C++ ops for the CPU. As a script, it does so before a test would have to wait.

The arguments of the script are the names of the ops to compile. Without arguments, it compiles all of them.
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
    """Loads the named ops, and compiles those that are not compiled yet.

    Compiling takes half a minute for each op, and minutes for async_io. Ops that this version of DeepSpeed or this
    machine does not have are left out: Adagrad and Lion before 0.19, and async_io without libaio.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # so that ninja is found
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
        # torch waits for ever for a lock that a killed build has left. No other process builds now, because this one
        # has the flock.
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
    """Compiles ops without debug information within the ``with`` block, which halves the time.

    A script named ``c++`` comes first in the PATH and adds a flag to the compiler's arguments. So the commands that
    DeepSpeed runs stay the same, and a later load finds nothing to compile.
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
    """Returns whether NVMe offload works on the CPU.

    Its op needs libaio's header. Its swapper needs pinned memory and aborts in its first write without it, and before
    0.19 DeepSpeed could pin memory only with CUDA.
    """
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    pins = importlib.util.find_spec("deepspeed.utils.pin_memory") is not None
    return pins and bool(AsyncIOBuilder().is_compatible(verbose=False))


if __name__ == "__main__":
    load(sys.argv[1:] or BUILDERS)
