"""Upper bounds that every reader enforces before it allocates or loops (spec, "Limits")."""

MANIFEST_BYTES_MAX = 256 << 20
HEADER_BYTES_MAX = 100_000_000
"""Of a data file's JSON header: the bound of safetensors itself."""
INDEX_CHUNK_RAW_BYTES_MAX = 64 << 20
INDEX_CHUNK_BYTES_MAX = 64 << 20
INDEX_PIECES_MAX = 1 << 26
"""Pieces in all chunks of one index together."""
DIGEST_TABLE_BYTES_MAX = 1 << 30
LATEST_BYTES_MAX = 256
NAME_BYTES_MAX = 1024
NAMES_MAX = 1 << 22
NDIM_MAX = 64
TENSOR_BYTES_MAX = (1 << 62) - 1
"""Of one tensor. Sums of two such numbers still fit a signed 64-bit integer."""
WORLD_SIZE_MAX = 1 << 20
TREE_DEPTH_MAX = 64
TREE_INTEGER_DIGITS_MAX = 4000
BLOCK_BYTES_MIN = 1 << 12
BLOCK_BYTES_MAX = 1 << 26
DATA_ALIGNMENT_BYTES = 4096
"""A data file's first tensor byte lies at a multiple of this."""
