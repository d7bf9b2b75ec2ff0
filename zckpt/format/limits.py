"""The limits of the format (spec, "Limits").

A reader compares a value with its limit before it allocates memory or begins a loop of that size.
"""

MANIFEST_BYTES_MAX = 256 << 20
"""The most bytes of a manifest."""
CONTAINERS_MAX = 1 << 22
"""The most arrays and maps in the body of a manifest, or in one tree. Each takes far more memory than bytes in the
file."""
PARTS_MAX = 1 << 8
"""The most parts of a checkpoint."""
HEADER_BYTES_MAX = 100_000_000
"""The most bytes of the header text of a data file. It is the limit of safetensors itself."""
INDEX_CHUNK_RAW_BYTES_MAX = 64 << 20
"""The most bytes of a chunk of the index when it is decompressed, and of the window of its zstd frame."""
INDEX_CHUNK_BYTES_MAX = 64 << 20
"""The most bytes of a chunk of the index as it is in the file."""
INDEX_CHUNKS_MAX = 1 << 12
"""The most chunks in an index without the feature ``pieces``. A chunk counts once for each part with its layout,
because it is checked against each of them."""
INDEX_PIECES_MAX = 1 << 26
"""The most pieces in all chunks of an index without the feature ``pieces``. The pieces of a chunk count once for each
part with its layout."""
MANY_CHUNKS_MAX = 1 << 16
"""The most chunks in an index with the feature ``pieces``, counted in the same way."""
MANY_PIECES_MAX = 1 << 32
"""The most pieces in all chunks of an index with the feature ``pieces``, counted in the same way."""
PIECES_PER_BYTE_MAX = 1024
"""The most pieces for each byte of an index with the feature ``pieces``, counted in the same way."""
DIGEST_TABLE_BYTES_MAX = 1 << 30
"""The most bytes of the digest table of one rank."""
LATEST_BYTES_MAX = 256
"""The most bytes of the file ``latest``."""
NAME_BYTES_MAX = 1024
"""The most bytes of the name of a tensor, in UTF-8."""
NAMES_MAX = 1 << 22
"""The most names of tensors, the most aliases, and the largest id of a layout."""
NDIM_MAX = 64
"""The most dimensions of a tensor."""
BOXES_MAX = 1 << 20
"""The most boxes of a grid."""
TENSOR_BYTES_MAX = (1 << 62) - 1
"""The most bytes of one tensor. The sum of two such numbers still fits a signed 64-bit integer."""
WORLD_SIZE_MAX = 1 << 20
"""The most ranks."""
TREE_BYTES_MAX = 256 << 20
"""The most bytes of one tree and of all payloads that are packed inside it. Each payload is in memory at the same time
as the one around it."""
TREE_DEPTH_MAX = 64
"""The highest level of a value in a tree. The root value is at level 0."""
TREE_INTEGER_DIGITS_MAX = 4000
"""The most decimal digits of an integer in a tree."""
BLOCK_BYTES_MIN = 1 << 12
"""The fewest bytes of a full block. The size of a full block is also a multiple of this number."""
BLOCK_BYTES_MAX = 1 << 26
"""The most bytes of a full block."""
DATA_ALIGNMENT_BYTES = 4096
"""The data of a data file begin at a multiple of this number of bytes."""
