"""What is fuzzed: each target takes bytes and raises for whatever the format's code must not do with them.

Only ZckptError may come from zckpt. What it accepts another implementation accepts too, with the same values:
safetensors a header, the independent reader of tests/ trees and whole checkpoints.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import safetensors
import torch
import zstandard

import zckpt
from mutate import Draw, spoil
from tests.support.apart import Apart
from tests.support.independent_reader import Reader
from zckpt.errors import FormatError, StateError
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format import shard as shard_format
from zckpt.format import tree as tree_format
from zckpt.format.digest import digest
from zckpt.format.manifest import Chunk, File, Files, Manifest, Part
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "spec" / "example" / "run" / "global_step7"
SHARD = shard_format.ShardId("0123456789abcdef", 0, 2, "master", "device")
DATA_BYTES_MAX = 1 << 16
BUDGET = zckpt.Budget(nbytes=4 << 20, threads=1, direct=False)


def header(data: bytes) -> None:
    """The first byte says how much is made up: nothing, or the length and the padding."""
    raw = data[1:]
    if data[:1] >= b"\x40":
        length = -(-(8 + len(raw)) // 4096) * 4096
        raw = (length - 8).to_bytes(8, "little") + raw.ljust(length - 8)
    stops = [0]
    for nbytes in (data[0] & 0x3F if data else 0, 4104 - 4096, 0):
        try:
            found = shard_format.decode_header(raw, len(raw) + nbytes, SHARD)
        except FormatError:
            continue
        stops = [stop for _, stop in shard_format.regions(found)]
        assert stops == sorted(stops)
        assert stops[-1] == len(raw) + nbytes
        others = dict(safetensors.deserialize(raw + bytes(nbytes)))
        assert others.keys() == {entry.name for entry in found.entries}
        for entry in found.entries:
            other = others[entry.name]
            assert (other["dtype"], tuple(other["shape"])) == (entry.dtype, entry.shape)
            assert len(other["data"]) == entry.nbytes


_SHAPES = ((3, 2), (4,), (0, 5), ())
_DTYPES = {"a": ("F32", "F32", "U8", "I64"), "b": ("F32", "BF16", "U8", "I64")}


def index(data: bytes) -> None:
    """The first byte says whether the rest is a frame or a chunk's columns, to be compressed, and its rows."""
    mode, raw = data[0] if data else 0, data[1:]
    rows = 1 + mode % len(_SHAPES)
    if mode >= 0x40:
        raw = raw[: rows * index_format.ROW_BYTES + 40 * index_format.PIECE_BYTES]
        count = max(len(raw) - rows * index_format.ROW_BYTES, 0) // index_format.PIECE_BYTES
        frame = zstandard.ZstdCompressor(level=1).compress(raw)
    else:
        count, frame = mode >> 2, raw
    chunk = Chunk(0, 0, rows, count, 0, len(frame), digest(frame))
    ids = tuple(range(rows))
    manifest = Manifest(
        save_id=SHARD.save_id, step=0, world_size=2, block_bytes=4096, names=tuple("abcd"), shapes=_SHAPES,
        parts=tuple(Part(name, 0, ids, ids, dtypes[:rows]) for name, dtypes in _DTYPES.items()),
        files=Files.of(File(*place, 4096 + 512, 4096, 0) for place in itertools.product((0, 1), (0, 1), (0, 2))),
        digests=(b"\0" * 16,) * 2, chunks=(chunk,), index_bytes=len(frame),
    )  # fmt: skip
    try:
        layout = index_format.decode(frame, chunk, manifest)
    except FormatError:
        return
    for row, shape in enumerate(_SHAPES[:rows]):
        numel = math.prod(shape)
        pieces = tuple(index_format.pieces(layout, row, numel))
        assert pieces
        for number, copy in itertools.groupby(pieces, key=lambda piece: piece.copy):
            bounds = [(piece.start, piece.stop) for piece in copy]
            if numel:
                elements = [element for bound in bounds for element in range(*bound)]
                assert elements == list(range(numel)), (number, bounds)
            else:
                assert bounds == [(0, 0)]
        item = max(shard_format.ITEM_BYTES[dtypes[row]] for dtypes in _DTYPES.values())
        for piece in pieces:
            assert piece.rank in (0, 1)
            assert piece.tier in (0, 2)
            assert 0 <= piece.offset <= piece.offset + (piece.stop - piece.start) * item <= 512


def manifest(data: bytes) -> None:
    """The first byte says whether the rest is the file, or its body, to be given an envelope."""
    raw = data[1:]
    if data[:1] >= b"\x40":
        raw = msgpack.packb(["zckpt", [1, 0], digest(raw), raw])
    try:
        found = manifest_format.decode(raw)
    except FormatError:
        return
    assert manifest_format.decode(manifest_format.encode(found)) == found
    for file in found.files:
        parts = found.path(file).split("/")
        assert len(parts) == 3
        assert not {"", ".", ".."} & {*parts}


class _Reference(tuple):
    """What a reference in a tree stands for here: its extension type and name."""

    __slots__ = ()


def tree(data: bytes) -> None:
    def get(ext: int, name: str) -> object:
        if not name:
            raise FormatError("no such tensor", rule="T003")
        return _Reference((ext, name))

    try:
        value = tree_format.unpack(data, get, "a tree")
    except FormatError:
        return
    reader = Reader.__new__(Reader)
    reader.body, reader.tensors, reader.load = {"state": data}, _Any(), lambda key: key.removeprefix("state/")
    assert str(reader.tree()) == str(_plain(value, lambda one: (*_Any.TENSOR[:2], one[1])))
    try:
        packed = tree_format.pack(value, "", lambda _, leaf: leaf if isinstance(leaf, _Reference) else None)
    except StateError as error:
        assert error.rule == "T004", error
        return
    assert str(tree_format.unpack(packed, get, "a tree")) == str(value)


class _Any:
    """A table of tensors with every name but the empty one."""

    TENSOR = ("U8", [1], ())

    def __contains__(self, key: str) -> bool:
        return key != "state/"

    def __getitem__(self, key: str) -> tuple[Any, ...]:
        return self.TENSOR


def _plain(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """A tree as the independent reader gives it."""
    if isinstance(value, (_Reference, torch.Tensor, np.ndarray)):
        return of_leaf(value)
    if isinstance(value, dict):
        return {key: _plain(item, of_leaf) for key, item in value.items()}
    return type(value)(_plain(item, of_leaf) for item in value) if isinstance(value, (list, tuple)) else value


def _raw(tensor: torch.Tensor | np.ndarray[Any, Any]) -> tuple[str, list[int], bytes]:
    tensor = torch.as_tensor(tensor)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return DTYPE_NAMES[tensor.dtype], list(tensor.shape), data


_SOUND = Apart.of(EXAMPLE)


def checkpoint(data: bytes) -> None:
    """The bytes choose what is changed in a whole checkpoint; lengths and digests are made to fit, mostly."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        path = Path(directory) / "c"
        spoil(_SOUND.copy(), Draw(data)).write(path)
        check_checkpoint(path)


def check_checkpoint(path: Path) -> None:
    """Reader, validator and the independent reader agree on the checkpoint, and on all that is in it."""
    report = zckpt.validate(path)
    try:
        theirs = Reader(path)
        trees = [theirs.tree(), *map(theirs.tree, range(theirs.world_size))]
    except (ValueError, KeyError) as error:
        assert not report.ok, f"the independent reader refuses it: {error}"
        theirs, trees = None, []
    try:
        ours = zckpt.open(path, budget=BUDGET)
        tensors = ours.load()
        pieces = [ours.load_pieces(rank) for rank in range(min(ours.world_size, 3))]
        found = [ours.state, *map(ours.rank_state, range(ours.world_size))]
    except zckpt.ZckptError:
        assert not report.ok, "the reader refuses it, the validator does not"
        return
    if theirs is None:
        return  # what only validation finds
    assert report.ok, f"the independent reader accepts it: {report}"
    assert [key for key in theirs.tensors if not key.startswith("state/")] == list(tensors)
    for key, tensor in tensors.items():
        assert (*theirs.tensors[key][:2], theirs.load(key)) == _raw(tensor), key
    assert str(trees) == str(_plain(found, _raw))
    for own in pieces:
        for (key, start, stop), piece in own.items():
            assert piece.shape == (stop - start,), key


LOSSES = ("manifest.msgpack", *(f"data-{SHARD.save_id}/{name}" for name in (
    "index.bin", "rank-00000/digests.bin", "rank-00001/digests.bin", "rank-00000/master.safetensors"
)))  # fmt: skip


def repair(data: bytes) -> None:
    """The first byte says which files are lost, and whether what cannot be verified is accepted; the rest is as for
    ``checkpoint``."""
    lost = data[0] if data else 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        path = Path(directory) / "c"
        spoil(_SOUND.copy(), Draw(data[1:])).write(path)
        for bit, name in enumerate(LOSSES):
            if lost >> bit & 1:
                (path / name).unlink(missing_ok=True)
        before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        try:
            report = zckpt.repair(path, accept_unverified=lost >= 0x80, budget=BUDGET)
        except zckpt.ZckptError:
            assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
            return
        after = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
        kept = {file: content for file, content in before.items() if file.suffix == ".safetensors"}
        assert all(file.read_bytes() == content for file, content in kept.items()), "data has changed"
        assert {*before.values()} <= {*after}, "what was there is gone"
        assert report.unverified == () or lost >= 0x80
        if report.unverified:
            return  # what differs from its digest stays so
        assert zckpt.validate(path, level="structure").ok
        assert not any(finding.rule.startswith("D") for finding in zckpt.validate(path).findings)
        assert zckpt.repair(path, budget=BUDGET).rebuilt == (), "it is whole"


def latest(data: bytes) -> None:
    """The bytes of ``latest`` in a run with checkpoints, directories of checkpoints and links to both."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        run = Path(directory) / "run"
        for name in ("c", "a/b"):
            _SOUND.write(run / name)
        (run / "l").symlink_to("a")
        (run / "a" / "l").symlink_to("b")
        (run / "latest").write_bytes(data)
        try:
            found = Path(zckpt.open(run, budget=BUDGET).path).relative_to(run)
        except (FormatError, zckpt.CheckpointNotFoundError):
            found = None
        try:
            other = Reader(run).root.relative_to(run)
        except (ValueError, OSError) as error:  # the last: a name that no file can have
            assert found is None, error
            return
        assert str(found) == str(other) == data.decode().removesuffix("\n")
        assert found in (Path("c"), Path("a/b"))


TARGETS = {one.__name__: one for one in (header, index, manifest, tree, checkpoint, repair, latest)}
LENGTH_MAX = {"header": 4096, "index": 2048, "manifest": 4096, "tree": 1024, "checkpoint": 24, "repair": 25}
LENGTH_MAX |= {"latest": 260}
