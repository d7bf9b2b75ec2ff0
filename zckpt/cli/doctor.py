"""Show what a bug report needs, and what a long run depends on: software, limits, network, and one directory.

To find out what the directory can do, this writes a file of 1 MiB there, reads it past the page cache, and makes a
second file of the same bytes without writing them. Both are removed again, and so is the directory if it did not exist.
The exit status is 1 if no file can be written there, or if torch cannot be imported or its devices fail.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import sys
from contextlib import closing, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from zckpt.cli import output
from zckpt.errors import UnsupportedError
from zckpt.storage.process_names import own_temporary
from zckpt.storage.schemes import open_store
from zckpt.system import linux
from zckpt.system.available import available_bytes
from zckpt.version import __version__

if TYPE_CHECKING:
    import argparse

EXAMPLES = """
  zckpt doctor
  zckpt doctor /nvme/checkpoints --json
"""
_LIMITS = {"open_files": "RLIMIT_NOFILE", "locked_memory_bytes": "RLIMIT_MEMLOCK", "file_length_bytes": "RLIMIT_FSIZE"}
_SETTINGS = ("DS_ACCELERATOR", "GLOO_", "THP_MEM_ALLOC_ENABLE", "ZCKPT_")
"""How the names begin of environment variables that change what zckpt and its ranks do."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default=".", help="where checkpoints are to be written; default: here")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    found, problems = {**_machine(), "path": arguments.path}, []
    for look in (_devices, lambda: _directory(arguments.path)):
        try:
            found |= look()
        except (ImportError, OSError, RuntimeError) as error:  # such as a StorageError, or a device that fails
            problems.append("; ".join(str(error).split("\n  ")))
    found["problems"] = problems
    if arguments.json:
        output.print_json(found)
    else:
        output.print_fields((name.removesuffix("_bytes").replace("_", " "), _text(name, found[name])) for name in found)
    return 1 if problems else 0


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(value) or "none"
    if value is None:
        return "no limit" if name in _LIMITS else "unknown"
    return output.size(value) if name.endswith("_bytes") else str(value)


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {"zckpt": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in ("torch", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["settings"] = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS)]
    found |= {"processors": linux.processors(), "huge_pages": linux.huge_pages()}
    with suppress(UnsupportedError):
        found["memory_bytes"] = available_bytes()
    if sys.platform != "win32":  # Windows has no such limits
        import resource

        for name, limit in _LIMITS.items():
            number = resource.getrlimit(getattr(resource, limit))[0]
            found[name] = None if number == resource.RLIM_INFINITY else number
    found |= {"interfaces": [name for _, name in socket.if_nameindex()], "host_address": None}
    with suppress(OSError):  # no address has this name
        found["host_address"] = socket.gethostbyname(socket.gethostname())
    return found


def _devices() -> dict[str, Any]:
    import torch

    if not torch.accelerator.is_available():
        return {"devices": []}
    kind = torch.accelerator.current_accelerator()
    name = getattr(torch.get_device_module(kind), "get_device_name", str)
    return {"devices": [f"{kind} {name(number)}" for number in range(torch.accelerator.device_count())]}


def _directory(path: str) -> dict[str, Any]:
    store, first, second = open_store(path), own_temporary("doctor"), own_temporary("doctor")
    room = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)  # begins at a page, as direct I/O needs
    try:
        store.put_new(first, room.tobytes())
        shared = store.entry(second) if store.share(second, store.location.child(first)) else None
        with closing(store.reader()) as reader:
            is_direct = reader.direct is not None and reader.direct.read_direct(first, [room], 0) == len(room)
        return {
            "file_system": store.location.scheme or linux.file_system(path),
            "free_bytes": store.free_bytes(),
            "direct_io": "yes" if is_direct else "no",
            "shared_by": "no" if shared is None else "reflinks" if shared.links == 1 else "hard links",
        }
    finally:
        store.remove(first, second)
        store.remove_made()
