"""The dtypes of the format, with the names that safetensors gives them."""

import numpy as np

_DTYPES = (
    ("BOOL", "bool", 1), ("U8", "uint8", 1), ("I8", "int8", 1), ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1), ("I16", "int16", 2), ("U16", "uint16", 2), ("F16", "float16", 2),
    ("BF16", "bfloat16", 2), ("I32", "int32", 4), ("U32", "uint32", 4), ("F32", "float32", 4), ("I64", "int64", 8),
    ("U64", "uint64", 8), ("F64", "float64", 8), ("C64", "complex64", 8),
)  # fmt: skip
ITEM_BYTES: dict[str, int] = {name: item_bytes for name, _, item_bytes in _DTYPES}
"""The size of one element of each dtype, in bytes."""
DTYPES: tuple[str, ...] = tuple(ITEM_BYTES)
"""The names of all dtypes. The ids of dtypes are positions in it."""
DTYPE_IDS: dict[str, int] = {name: number for number, name in enumerate(DTYPES)}
"""The id of each dtype."""
ITEM_BYTES_BY_ID = np.array([*ITEM_BYTES.values()], np.int64)
"""The size of one element of each dtype, in bytes, by the id of the dtype."""
TORCH_NAMES: dict[str, str] = {name: torch_name for name, torch_name, _ in _DTYPES}
"""PyTorch's name of each dtype."""
