"""Upper bounds that every reader enforces before it allocates or loops (spec, "Limits")."""

MANIFEST_BYTES_MAX = 256 << 20
CONTAINERS_MAX = 1 << 22
"""Arrays and maps in the manifest's body, or in one tree: each takes far more memory than its byte in the file."""
PARTS_MAX = 1 << 8
HEADER_BYTES_MAX = 100_000_000
"""Of a data file's JSON header: the bound of safetensors itself."""
INDEX_CHUNK_RAW_BYTES_MAX = 64 << 20
INDEX_CHUNK_BYTES_MAX = 64 << 20
INDEX_CHUNKS_MAX = 1 << 12
"""Counted once for each part with the chunk's layout: each is checked against all of these."""
INDEX_PIECES_MAX = 1 << 26
"""Pieces in all chunks of one index together, counted once for each part with the chunk's layout."""
DIGEST_TABLE_BYTES_MAX = 1 << 30
LATEST_BYTES_MAX = 256
NAME_BYTES_MAX = 1024
NAMES_MAX = 1 << 22
NDIM_MAX = 64
TENSOR_BYTES_MAX = (1 << 62) - 1
"""Of one tensor. Sums of two such numbers still fit a signed 64-bit integer."""
WORLD_SIZE_MAX = 1 << 20
TREE_BYTES_MAX = 256 << 20
"""Of one tree, and of all payloads inside it that are packed again: each is in memory beside the one around it."""
TREE_DEPTH_MAX = 64
TREE_INTEGER_DIGITS_MAX = 4000
BLOCK_BYTES_MIN = 1 << 12
BLOCK_BYTES_MAX = 1 << 26
DATA_ALIGNMENT_BYTES = 4096
"""A data file's first tensor byte lies at a multiple of this."""
