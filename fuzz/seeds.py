"""Writes the seeds: ``python fuzz/seeds.py``. They are small inputs that are valid, made from the example of the
specification."""

from __future__ import annotations

import io
import sys
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "fuzz"), str(ROOT)]

import msgpack  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import zstandard  # noqa: E402

from tests.support.apart import PIECE, ROW  # noqa: E402
from zckpt.format.tree import pack  # noqa: E402

EXAMPLE = ROOT / "spec" / "example" / "run" / "global_step7"
CORPUS = ROOT / "fuzz" / "corpus"
COLUMNS = {"name": [0, 1, 2, 3], "count": [2, 2, 1, 1], "rank": [0, 1, 0, 1, 0, 0], "tier": [0, 0, 2, 2, 0, 0]}
COLUMNS |= {"length": [4, 2, 4, 4, 0, 1], "offset": [0, 16, 8, 32, 64, 72], "block": [1, 2, 3, 4, 5, 6]}
TREES = {
    "plain": {"step": 7, "names": ["a", b"b", None, True, -1, 0.5], 3: {}},
    "kinds": {"tuple": (1, (2, [])), "long": 1 << 80, "text": "\N{SNOWMAN}"},
    "nothing": None,
}


PICKLED = {
    "tensors": [torch.zeros(4, 4)[1:, :2], torch.zeros(2).conj()],
    "unsigned": torch.zeros(32, dtype=torch.uint16),
    "containers": {"a": [1, 2.5, None, True], (1, "b"): {3, 4}, "more": OrderedDict(x=Counter("aab"))},
    "numpy": [np.float64(1.5), np.arange(3, dtype=">i2"), b"bytes"],
    "state": torch.nn.Parameter(torch.zeros(2)),
}  # fmt: skip
"""Values by the names of the seeds with their pickles."""


def _pickled(value: object) -> bytes:
    """Returns the pickle in a file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def seeds() -> dict[str, dict[str, bytes]]:
    """Returns the seeds of each target by their names."""
    manifest = (EXAMPLE / "manifest.msgpack").read_bytes()
    body = msgpack.unpackb(manifest)[3]
    data = EXAMPLE / "data-0123456789abcdef"
    master = (data / "rank-00000" / "master.safetensors").read_bytes()[8:4096].rstrip(b" ")
    filled = master.replace(b"[0,8]}}", b'[0,8]},"@pad":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}}')
    columns = b"".join(np.array(COLUMNS[name], dtype).tobytes() for name, dtype in ROW + PIECE)
    frame = zstandard.ZstdCompressor().compress(columns)
    trees = {name: pack(tree, "", lambda path, leaf: None) for name, tree in TREES.items()}
    return {
        "header": {"master": b"\x48" + master, "filler": b"\x4c" + filled, "file": b"\x08" + master},
        "index": {"columns": b"\x43" + columns, "frame": b"\x1b" + frame},
        "manifest": {"file": b"\0" + manifest, "body": b"\x40" + body},
        "tree": trees | {"references": msgpack.unpackb(body)["state"]},
        "checkpoint": {f"{what:02}": bytes([what, 7, 1, 3, 2, 5]) for what in range(12)},
        "latest": {
            "name": b"c\n",
            "path": b"a/b",
            "link": b"l/b\n",
            "last": b"a/l",
            "parent": b"a/../c\n",
            "twice": b"a//b",
        },
        "pickle": {name: _pickled(value) for name, value in PICKLED.items()},
        "repair": {f"{lost:02}": bytes([lost, lost % 12, 7, 1, 3, 2, 5]) for lost in (0, 1, 2, 3, 5, 8, 16, 129, 140)},
    }


for target, files in seeds().items():
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (CORPUS / target / name).write_bytes(content)
