"""The dtypes of the format, with the names that safetensors gives them."""

_DTYPES = (
    ("BOOL", "bool", 1), ("U8", "uint8", 1), ("I8", "int8", 1), ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1), ("I16", "int16", 2), ("U16", "uint16", 2), ("F16", "float16", 2),
    ("BF16", "bfloat16", 2), ("I32", "int32", 4), ("U32", "uint32", 4), ("F32", "float32", 4), ("I64", "int64", 8),
    ("U64", "uint64", 8), ("F64", "float64", 8), ("C64", "complex64", 8),
)  # fmt: skip
ITEM_BYTES: dict[str, int] = {name: item_bytes for name, _, item_bytes in _DTYPES}
"""The size of one element of each dtype, in bytes."""
TORCH_NAMES: dict[str, str] = {name: torch_name for name, torch_name, _ in _DTYPES}
"""PyTorch's name of each dtype."""
