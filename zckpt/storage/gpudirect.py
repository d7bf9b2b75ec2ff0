"""GPUDirect Storage: from the disk straight to device memory, by way of kvikio, where it is installed and works.

What does not pass through the host cannot be checked on the way: this serves loads with ``verify=False``. A write needs
the bytes on the host, for their digests. A file that the driver refuses, kvikio itself reads by way of the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zckpt.errors import StorageError

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1)
def _kvikio() -> Any:
    """The package; None where it is not installed, too old to tell (before 25.4), or without a driver that can."""
    try:
        import kvikio
        from kvikio import cufile_driver

        return kvikio if cufile_driver.get("is_gds_available") else None
    except (ImportError, AttributeError, OSError, RuntimeError):  # the last two: a library that it needs is missing
        return None


def serves(device: torch.device) -> bool:
    """Whether ``read`` can fill memory of this device."""
    return device.type == "cuda" and _kvikio() is not None


def read(fd: int, path: str, target: torch.Tensor, offset: int) -> int:
    """Fills ``target``, 1-D uint8 in device memory, from byte ``offset`` of an open file; returns the bytes read, fewer
    at its end. ``path`` names it in errors. Nobody else may be using the memory: this goes by no stream of torch's.

    Raises StorageError.
    """
    import torch

    try:
        # That file, wherever a link now leads
        with torch.cuda.device(target.device), _kvikio().CuFile(f"/proc/self/fd/{fd}") as file:
            torch.cuda.current_stream().synchronize()  # gives this thread a context: without one the driver refuses
            return int(file.raw_read(target, target.nbytes, offset))
    except RuntimeError as error:
        raise StorageError(
            f"cannot read by GPUDirect Storage: {error}", file=path, start=offset, stop=offset + target.nbytes,
            hint="with verify=True it is read by way of the host",
        ) from error  # fmt: skip
