"""Translates the dtypes of the format, which have the names of safetensors, to torch's dtypes, and back."""

import torch

from zckpt.errors import did_you_mean
from zckpt.format.dtypes import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items()}
SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
FLOATING_POINT = {dtype: name for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point}


def torch_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(
    dtype_or_name: torch.dtype | str | None, allowed: dict[torch.dtype, str] = DTYPE_NAMES
) -> torch.dtype | None:
    """Returns the dtype of this name, which is torch's name, such as ``"bfloat16"``, or DeepSpeed's, such as
    ``"bf16"``. Returns a dtype, and None, unchanged. Raises ValueError if it is none of the allowed dtypes, which are
    floating point dtypes or all of the format."""
    if dtype_or_name is None or (isinstance(dtype_or_name, torch.dtype) and dtype_or_name in allowed):
        return dtype_or_name
    dtypes_by_name = {torch_name(dtype): dtype for dtype in allowed} | SHORT_NAMES
    named_dtype = dtypes_by_name.get(str(dtype_or_name).removeprefix("torch."))
    if named_dtype is None or not isinstance(dtype_or_name, (str, torch.dtype)):
        # The name of a type, such as float or numpy.float16, and what torch has other names of, such as torch.half.
        given = str(getattr(dtype_or_name, "__name__", dtype_or_name)).removeprefix("torch.").lower()
        meant = getattr(torch, given, None)
        meant_name = torch_name(meant) if isinstance(meant, torch.dtype) else given
        raise ValueError(
            f"dtype must be one of {', '.join(dtypes_by_name)}, or one of torch's dtypes with these names, got "
            f"{dtype_or_name!r}{did_you_mean(meant_name, dtypes_by_name)}"
        )
    return named_dtype
