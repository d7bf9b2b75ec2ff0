"""Translates the dtypes of the format, which have safetensors' names, to torch's dtypes, and back."""

import torch

from zckpt.format.dtypes import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in TORCH_NAMES.items()}
SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the dtype of this name: torch's name, such as ``"bfloat16"``, or DeepSpeed's name, such as ``"bf16"``. A
    dtype is returned as it is, and so is None. Raises ValueError for what is no dtype of the format."""
    if given is None or given in DTYPE_NAMES:
        return given
    named = {torch_name(dtype): dtype for dtype in DTYPE_NAMES} | SHORT_NAMES
    found = named.get(str(given).removeprefix("torch."))
    if found is None or not isinstance(given, (str, torch.dtype)):
        known = ", ".join(map(torch_name, DTYPE_NAMES))
        raise ValueError(f"dtype must be one of {known}, got {given!r}")
    return found
