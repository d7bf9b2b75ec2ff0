"""The dtypes of the format (safetensors' names) as torch's, and back."""

import torch

<<<<<<< HEAD
from zckpt.format.dtypes import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in TORCH_NAMES.items()}
=======
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
>>>>>>> 6d76834 (zckpt.export: a checkpoint's weights as save_pretrained writes them, or one file of torch.load's, in slices)
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype of the format by torch's name, such as ``"bfloat16"``, or by DeepSpeed's, such as ``"bf16"``; a dtype, or
    None, is returned as it is. Raises ValueError."""
    if given is None or given in DTYPE_NAMES:
        return given
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES} | SHORT_NAMES
    found = named.get(str(given).removeprefix("torch."))
    if found is None or not isinstance(given, (str, torch.dtype)):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise ValueError(f"dtype must be one of {known}, got {given!r}")
    return found
