"""Compiles the C++ part of the simulated accelerator. As a script, it does so before a test would have to wait."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp")))
MODULE = "zckpt_sim"


def is_possible() -> bool:
    """Returns whether torch has a class of allocators for the devices of any backend."""
    import torch

    return hasattr(torch.accelerator, "empty_cache")


def built() -> Path:
    """Returns the path of the compiled module. It differs with the content of the sources and the versions of Python
    and torch.
    """
    from torch import __version__ as torch_version

    content = hashlib.sha256(f"{sys.version} {torch_version}".encode())
    for source in (*SOURCES, Path(__file__)):
        content.update(source.read_bytes())
    return HERE.parents[2] / ".cache" / "accelerator" / content.hexdigest()[:16] / f"{MODULE}.so"


def build() -> None:
    """Compiles the module, unless that has been done. It takes a minute."""
    import fcntl

    module = built()
    module.parent.parent.mkdir(parents=True, exist_ok=True)
    with (module.parent.parent / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        if module.exists():
            return
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # so that ninja is found
        from torch.utils import cpp_extension

        partial = module.parent.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # a killed build may have left it
        partial.mkdir()
        cpp_extension.load(
            MODULE,
            [str(source) for source in SOURCES if source.suffix == ".cpp"],
            extra_cflags=["-O1", "-g0", "-Wall", "-Werror=return-type"],
            build_directory=str(partial),
        )
        partial.rename(module.parent)


if __name__ == "__main__" and is_possible():
    build()
