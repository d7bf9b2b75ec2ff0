"""The targets that are fuzzed. Each takes bytes, and raises an exception if zckpt does with them what it must not do.

zckpt may raise nothing but ZckptError. What it accepts, another implementation has to accept too, with the same values:
safetensors for headers, and the independent reader of the tests for trees and whole checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import zipfile
from datetime import date, time
from pathlib import Path, PurePath
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
from tests.support.index_pieces import pieces as pieces_of_row
from zckpt.errors import FormatError, StateError
from zckpt.format import data_file as data_file_format
from zckpt.format import index as index_format
from zckpt.format import manifest as manifest_format
from zckpt.format import tree as tree_format
from zckpt.format.digest import digest
from zckpt.format.dtypes import DTYPE_IDS, ITEM_BYTES
from zckpt.format.manifest import Chunk, File, Files, Manifest, Part
from zckpt.format.names import Tier
from zckpt.geometry import Grid
from zckpt.tools.converting.pickle_objects import Inert
from zckpt.tools.converting.restricted_pickle import load
from zckpt.transfer.stored import stored_range, with_values
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "spec" / "example" / "run" / "global_step7"
DATA_FILE = data_file_format.DataFileId("0123456789abcdef", 0, 2, "master", Tier.DEVICE)
DATA_BYTES_MAX = 1 << 16
BUDGET = zckpt.Budget(nbytes=4 << 20, threads=1, direct=False)


def header(data: bytes) -> None:
    """Fuzzes the header of a data file. The first byte says whether the rest is all of the header, or only its text,
    without the length and the padding."""
    raw = data[1:]
    if data[:1] >= b"\x40":
        length = -(-(8 + len(raw)) // 4096) * 4096
        raw = (length - 8).to_bytes(8, "little") + raw.ljust(length - 8)
    stops = [0]
    for nbytes in (data[0] & 0x3F if data else 0, 4104 - 4096, 0):
        try:
            parsed = data_file_format.decode_header(raw, len(raw) + nbytes, DATA_FILE)
        except FormatError:
            continue
        stops = [stop for _, stop in data_file_format.regions(parsed)]
        assert stops == sorted(stops)
        assert stops[-1] == len(raw) + nbytes
        tensors = dict(safetensors.deserialize(raw + bytes(nbytes)))
        assert tensors.keys() == {entry.name for entry in parsed.entries}
        for entry in parsed.entries:
            tensor = tensors[entry.name]
            assert (tensor["dtype"], tuple(tensor["shape"])) == (entry.dtype, entry.shape)
            assert len(tensor["data"]) == entry.nbytes


_SHAPES = ((3, 2), (4,), (0, 5), ())
_DTYPES = {"a": ("F32", "F32", "U8", "I64"), "b": ("F32", "BF16", "U8", "I64")}


def index(data: bytes) -> None:
    """Fuzzes a chunk of the index. The first byte says how many rows it has, and whether the rest is a zstd frame, or
    columns that are to be compressed."""
    mode, raw = data[0] if data else 0, data[1:]
    rows = 1 + mode % len(_SHAPES)
    if mode >= 0x40:
        raw = raw[: rows * index_format.ROW_BYTES + 40 * index_format.PIECE_BYTES]
        count = max(len(raw) - rows * index_format.ROW_BYTES, 0) // index_format.PIECE_BYTES
        frame = zstandard.ZstdCompressor(level=1).compress(raw)
    else:
        count, frame = mode >> 2, raw
    chunk = Chunk(0, 0, rows, count, 0, len(frame), digest(frame))
    ids = np.arange(rows)
    manifest = Manifest(
        save_id=DATA_FILE.save_id, step=0, world_size=2, block_bytes=4096, names=tuple("abcd"), shapes=_SHAPES,
        parts=tuple(
            Part(name, 0, ids, ids, np.array(dtype_ids[:rows], np.uint8), np.zeros_like(ids))
            for name, dtypes in _DTYPES.items()
            for dtype_ids in [[*map(DTYPE_IDS.__getitem__, dtypes)]]
        ),
        files=Files.of(File(rank, part_id, tier, 4096 + 512, 4096, 0)
            for rank, part_id, tier in itertools.product((0, 1), (0, 1), (Tier.DEVICE, Tier.NVME))),
        digests=(b"\0" * 16,) * 2, chunks=(chunk,), index_bytes=len(frame),
    )  # fmt: skip
    try:
        layout = index_format.decode(frame, chunk, manifest)
    except FormatError:
        return
    for row, shape in enumerate(_SHAPES[:rows]):
        numel = math.prod(shape)
        pieces = tuple(pieces_of_row(layout, row, Grid(shape)))
        assert pieces
        for number, copy in itertools.groupby(pieces, key=lambda piece: piece.copy):
            bounds = [piece.span[1:] for piece in copy]
            if numel:
                elements = [element for bound in bounds for element in range(*bound)]
                assert elements == list(range(numel)), (number, bounds)
            else:
                assert bounds == [(0, 0)]
        item = max(ITEM_BYTES[dtypes[row]] for dtypes in _DTYPES.values())
        for piece in pieces:
            assert piece.rank in (0, 1)
            assert piece.tier in (Tier.DEVICE, Tier.NVME)
            assert 0 <= piece.offset <= piece.offset + piece.span.numel * item <= 512


def manifest(data: bytes) -> None:
    """Fuzzes the manifest. The first byte says whether the rest is all of the file, or only the body, which is to be
    given an envelope."""
    raw = data[1:]
    if data[:1] >= b"\x40":
        raw = msgpack.packb(["zckpt", [1, 0], digest(raw), raw])
    try:
        decoded = manifest_format.decode(raw)
    except FormatError:
        return
    assert manifest_format.decode(manifest_format.encode(decoded)) == decoded
    for file in decoded.files:
        components = decoded.path(file).split("/")
        assert len(components) == 3
        assert not {"", ".", ".."} & {*components}


class _Reference(tuple[int, str]):
    """The extension type and the name of a reference in a tree, in the place of a tensor."""

    __slots__ = ()


def tree(data: bytes) -> None:
    """Fuzzes a packed tree."""

    def get(ext: int, name: str) -> object:
        if not name:
            raise FormatError("no such tensor", rule="T003")
        return _Reference((ext, name))

    try:
        value = tree_format.unpack(data, get, "a tree")
    except FormatError:
        return
    reader: Any = Reader.__new__(Reader)
    reader.body, reader.tensors, reader.load = {"state": data}, _Any(), lambda key: key.removeprefix("state/")
    assert str(reader.tree()) == str(_plain(value, lambda reference: (*_Any.TENSOR[:2], reference[1])))
    try:
        packed = tree_format.pack(value, "", lambda _, leaf: leaf if isinstance(leaf, _Reference) else None)
    except StateError as error:
        assert error.rule == "T004", error
        return
    assert str(tree_format.unpack(packed, get, "a tree")) == str(value)


class _Any:
    """A table of tensors that has a tensor of every name except the empty one."""

    TENSOR = ("U8", [1], ())

    def __contains__(self, key: str) -> bool:
        return key != "state/"

    def __getitem__(self, key: str) -> tuple[Any, ...]:
        return self.TENSOR


def _plain(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Returns a tree as the independent reader returns it. ``of_leaf`` converts references, tensors and arrays."""
    if isinstance(value, (_Reference, torch.Tensor, np.ndarray)):
        return of_leaf(value)
    if isinstance(value, dict):
        return {key: _plain(item, of_leaf) for key, item in value.items()}
    return type(value)(_plain(item, of_leaf) for item in value) if isinstance(value, (list, tuple)) else value


def _raw(tensor: torch.Tensor | np.ndarray[Any, Any]) -> tuple[str, list[int], bytes]:
    """Returns the dtype, the shape and the bytes of a tensor, as the independent reader returns them."""
    tensor = torch.as_tensor(tensor)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return DTYPE_NAMES[tensor.dtype], list(tensor.shape), data


_SOUND = Apart.of(EXAMPLE)


def checkpoint(data: bytes) -> None:
    """Fuzzes a whole checkpoint. The bytes choose what is changed in it. Most of the time, its lengths and digests are
    corrected after that."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        path = Path(directory) / "c"
        spoil(_SOUND.copy(), Draw(data)).write(path)
        check_checkpoint(path)


def check_checkpoint(path: Path) -> None:
    """Checks that zckpt's reader, its validator and the independent reader agree on whether a checkpoint conforms, and
    on everything that is in it."""
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
        our_trees = [ours.state, *map(ours.rank_state, range(ours.world_size))]
    except zckpt.ZckptError:
        assert not report.ok, "the reader refuses it, the validator does not"
        return
    if theirs is None:
        return  # Only validation finds the rule that is broken.
    assert report.ok, f"the independent reader accepts it: {report}"
    assert [key for key in theirs.tensors if not key.startswith("state/")] == list(tensors)
    for key, tensor in tensors.items():
        assert (*theirs.tensors[key][:2], theirs.load(key)) == _raw(tensor), key
    assert str(trees) == str(_plain(our_trees, _raw))
    for by_range in pieces:
        for (key, start, stop), piece in by_range.items():
            assert piece.shape == (stop - start,), key


LOSSES = ("manifest.msgpack", *(f"data-{DATA_FILE.save_id}/{name}" for name in (
    "index.bin", "rank-00000/digests.bin", "rank-00001/digests.bin", "rank-00000/master.safetensors"
)))  # fmt: skip
"""The files of which some are removed before a repair."""


def repair(data: bytes) -> None:
    """Fuzzes a repair. The first byte says which files are removed, and whether data that cannot be verified are
    accepted. The other bytes are as for ``checkpoint``."""
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
            return  # Data that differ from their digest still do so after the repair.
        assert zckpt.validate(path, level="structure").ok
        assert not any(finding.rule.startswith("D") for finding in zckpt.validate(path).findings)
        assert zckpt.repair(path, budget=BUDGET).rebuilt == (), "it is whole"


def latest(data: bytes) -> None:
    """Fuzzes the file ``latest`` in a run that has checkpoints, directories with checkpoints, and links to both."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        run = Path(directory) / "run"
        for name in ("c", "a/b"):
            _SOUND.write(run / name)
        (run / "l").symlink_to("a")
        (run / "a" / "l").symlink_to("b")
        (run / "latest").write_bytes(data)
        try:
            our_path = Path(zckpt.open(run, budget=BUDGET).path).relative_to(run)
        except (FormatError, zckpt.CheckpointNotFoundError):
            our_path = None
        try:
            their_path = Reader(run).root.relative_to(run)
        except (ValueError, OSError) as error:  # An OSError is raised for a name that no file can have.
            assert our_path is None, error
            return
        assert str(our_path) == str(their_path) == data.decode().removesuffix("\n")
        assert our_path in (Path("c"), Path("a/b"))


def pickle(data: bytes) -> None:
    """Fuzzes the pickle in a file of another program. The file has one storage of 64 bytes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        path = Path(directory) / "file.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", bytes(64))
        with contextlib.suppress(zckpt.ZckptError):
            _check_values(load(str(path)), path.stat().st_size)


def _check_values(value: Any, file_bytes: int) -> None:
    """Checks that the tensors in what was loaded are parts of the file, and that all values are of known types."""
    if isinstance(value, torch.Tensor):
        place = stored_range(value)
        assert place is None or 0 < place.offset <= place.offset + place.nbytes <= file_bytes
        assert with_values(value).shape == value.shape
    elif isinstance(value, dict):
        _check_values([*value, *value.values()], file_bytes)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _check_values(item, file_bytes)
    else:
        kinds = (bool, int, float, complex, str, bytes, np.ndarray, date, time, PurePath, Inert, torch.dtype)
        assert value is None or isinstance(value, kinds) or type(value).__module__ in KNOWN_MODULES, type(value)


KNOWN_MODULES = {"builtins", "zckpt.tools.converting.pickle_objects", "zckpt.tools.converting.restricted_pickle"}
"""The modules of what stands in a pickle for a class, a function, a dtype of NumPy or a storage."""
TARGETS = {target.__name__: target for target in (header, index, manifest, tree, checkpoint, repair, latest, pickle)}
"""The targets by name."""
LENGTH_MAX = {"header": 4096, "index": 2048, "manifest": 4096, "tree": 1024, "checkpoint": 24, "repair": 25}
LENGTH_MAX |= {"latest": 260, "pickle": 2048}
"""The most bytes of an input of each target."""
