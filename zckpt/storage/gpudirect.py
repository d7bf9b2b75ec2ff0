"""GPUDirect Storage: reads from the disk straight into device memory, by kvikio, if it is installed and works.

Bytes that do not pass through the host cannot be checked during the read. So this is used only for loads with
``verify=False``. Writes do not use it, because they need the bytes on the host to compute digests. If the driver
refuses a file, kvikio itself reads the file through host memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zckpt.errors import StorageError
from zckpt.progress import logger

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1)
def _kvikio() -> Any:
    """Returns the module kvikio. Returns None if it is not installed, if it is older than 25.4, which cannot tell
    whether it works, or if there is no driver that supports GPUDirect Storage."""
    try:
        import kvikio
        from kvikio import cufile_driver

        if cufile_driver.get("is_gds_available"):
            return kvikio
        logger.debug("no GPUDirect Storage: kvikio finds no driver for it")
    # OSError and RuntimeError mean that a library is missing.
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        logger.debug("no GPUDirect Storage: %s", error)
    return None


def serves(device: torch.device) -> bool:
    """Returns whether ``read`` can fill memory of this device."""
    return device.type == "cuda" and _kvikio() is not None


def read(fd: int, path: str, target: torch.Tensor, offset: int) -> int:
    """Fills ``target``, a 1-D uint8 tensor in device memory, from byte ``offset`` of an open file. Returns the number
    of bytes read, which is smaller than the length of ``target`` only if the file ends before. ``path`` is the name of
    the file in errors. Nobody else may be using the memory, because the read is not ordered by any stream of torch.
    Raises StorageError."""
    import torch

    try:
        # The path by descriptor leads to the file that was opened, even if its own path has become a link since.
        with torch.cuda.device(target.device), _kvikio().CuFile(f"/proc/self/fd/{fd}") as file:
            # This gives the thread a CUDA context, without which the driver refuses the read.
            torch.cuda.current_stream().synchronize()
            return int(file.raw_read(target, target.nbytes, offset))
    except RuntimeError as error:
        raise StorageError(
            f"cannot read by GPUDirect Storage: {error}", file=path, start=offset, stop=offset + target.nbytes,
            hint="with verify=True it is read by way of the host",
        ) from error  # fmt: skip
