"""A reader that was written from the specification alone finds what the library has written, bit for bit."""

from __future__ import annotations

import ast
import json
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zckpt
from tests.support.apart import edit_field
from tests.support.independent_reader import Reader
from tests.support.states import write_state
from zckpt.format.digest import digest
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster

READER = Path(__file__).parents[1] / "support" / "independent_reader.py"
EXAMPLE = Path(__file__).parents[2] / "spec" / "example"
GOLDEN = Path(__file__).parents[1] / "golden"
TIERS = ["device", "host", "nvme"]
FORMATS = {"F32": "f", "I16": "h", "I64": "q", "U8": "B"}
STATE = {
    "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(2.5), torch.empty(0, 4, dtype=torch.bfloat16)],
    "array": np.arange(6, dtype=np.uint16).reshape(3, 2)[:, ::-1],
    "numbers": (None, True, -5, 1 << 63, 1 << 70, -(1 << 90), float("inf"), 0.1),
    "text": {"": "\N{SNOWMAN}", 7: b"\0\xff", "nested": [((), [], {})]},
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def plain(tree: Any) -> Any:
    """Returns a tree as the independent reader does, with the dtype, shape and bytes of each tensor and array."""
    if isinstance(tree, np.ndarray):
        return plain(torch.from_numpy(tree.copy()))
    if isinstance(tree, torch.Tensor):
        return DTYPE_NAMES[tree.dtype], list(tree.shape), raw(tree)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return type(tree)(map(plain, tree)) if isinstance(tree, list | tuple) else tree


def assert_agree(path: Path) -> Reader:
    """Checks that the library and the independent reader find the same in a checkpoint, bit for bit."""
    reader, checkpoint = Reader(path), zckpt.open(path)
    assert (reader.step, reader.world_size) == (checkpoint.step, checkpoint.world_size)
    assert reader.aliases == dict(checkpoint.aliases)
    assert [key for key in reader.tensors if not key.startswith("state/")] == list(checkpoint)
    for key, tensor in checkpoint.load().items():
        assert reader.tensors[key][:2] == (DTYPE_NAMES[tensor.dtype], list(tensor.shape)), key
        assert reader.load(key) == raw(tensor), key
    assert reader.tree() == plain(checkpoint.state)
    for rank in range(reader.world_size):
        assert reader.tree(rank) == plain(checkpoint.rank_state(rank))
    return reader


def numbers(dtype: str, data: bytes) -> list[Any]:
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return [value for (value,) in struct.iter_unpack(f"<{FORMATS[dtype]}", data)]


def untag(tree: Any, reader: Reader) -> Any:
    """Returns the tree that a tree of ``expected.json`` stands for. That file has lists in place of tuples, and names
    in place of tensors."""
    if not isinstance(tree, dict):
        return tree
    if "tuple" in tree:
        return tuple(tree["tuple"])
    if "tensor" in tree:
        key = f"state/{tree['tensor']}"
        return *reader.tensors[key][:2], reader.load(key)
    return {key: untag(value, reader) for key, value in tree.items()}


@pytest.mark.parametrize(
    ("run", "content"),
    [("run", "expected.json"), ("second", "expected-second.json"), ("third", "expected-third.json")],
)
def test_the_examples_of_the_specification(run: str, content: str) -> None:
    expected = json.loads((EXAMPLE / content).read_text())
    reader = assert_agree(EXAMPLE / run)
    for field in ("step", "world_size", "block_bytes", "save_id", "aliases", "writer"):
        assert reader.body[field] == expected[field]
    assert [part["name"] for part in reader.body["parts"]] == expected["parts"]
    assert list(reader.tensors) == list(expected["tensors"])
    for key, tensor in expected["tensors"].items():
        dtype, shape, places, grid = reader.tensors[key]
        assert [dtype, shape, grid] == [tensor["dtype"], tensor["shape"], tensor.get("grid", [])]
        assert [numbers(dtype, data) for data in reader.copies(key)] == tensor["copies"]
        tiers = [TIERS.index(piece["tier"]) for piece in tensor["pieces"]]
        pieces = [(p["copy"], p["rank"], tier, p["offset"]) for p, tier in zip(tensor["pieces"], tiers, strict=True)]
        assert [(copy, rank, tier, begin) for copy, (rank, _, tier), begin, _ in places] == pieces
    for alias, name in expected["aliases"].items():
        assert reader.load(f"master/{alias}") == reader.load(f"master/{name}")
    assert reader.tree() == untag(expected["state"], reader)
    assert [reader.tree(rank) for rank in range(reader.world_size)] == expected["rank_states"]


DTYPES = st.sampled_from(sorted(DTYPE_NAMES, key=str))
SHAPE = st.lists(st.integers(0, 9) | st.integers(0, 99), max_size=3).map(tuple)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=np.uint8)
    return torch.from_numpy(data).reshape(-1).view(dtype).reshape(shape)


@settings(max_examples=50)
@given(st.lists(st.tuples(DTYPES, SHAPE), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 1 << 30))
def test_any_tensors_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Any], world_size: int, seed: int
) -> None:
    tensors = {f"layer.{i}": random_tensor(dtype, shape, seed + i) for i, (dtype, shape) in enumerate(kinds)}
    mean = [random_tensor(torch.bfloat16, (3,), rank * seed) for rank in range(world_size)]
    path = tmp_path_factory.mktemp("run") / "step"
    write_state(
        path,
        world_size,
        tensors,
        layout=["zero3", "random"][seed % 2],
        buffers={"mean": mean, "none": [torch.empty(0)] * world_size},
        aliases={"tied": "layer.0"},
        client_state=STATE,
        seed=seed,
    )
    reader = assert_agree(path)
    for name, tensor in tensors.items():
        assert reader.load(f"exp_avg/{name}") == raw(tensor)
    assert reader.load("master/tied") == raw(tensors["layer.0"])
    assert list(reader.copies("buffer/mean")) == list(map(raw, mean))
    assert list(reader.copies("buffer/none")) == [b""] * world_size


def write_engine(path: str) -> None:
    from tests.support.models import make_engine, train

    engine = make_engine(model="odd", groups=True)
    train(engine, 2)
    zckpt.write(engine, path, client_state=STATE)


def test_a_real_engine(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_engine, 2, str(tmp_path / "run" / "global_step2"))
    reader = assert_agree(tmp_path / "run")
    assert any(len(list(reader.copies(key))) > 1 for key in reader.tensors)
    assert reader.tree()["client_state"] == plain(STATE)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_golden_checkpoints(name: str) -> None:
    assert_agree(GOLDEN / name / "run")


def edit_file(change: Callable[[bytes], bytes], name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        (path,) = checkpoint.glob(name)
        data = change(path.read_bytes())
        path.write_bytes(data)

    return damage


def edit_body(field: str, change: Any) -> Callable[[Path], None]:
    """Returns a function that changes a field of a manifest's body, and makes the digest of the body fit."""

    def pack(manifest: bytes) -> bytes:
        magic, version, _, packed = msgpack.unpackb(manifest)
        body = msgpack.unpackb(packed)
        edit_field(body, field, change)
        packed = msgpack.packb(body)
        return msgpack.packb([magic, version, digest(packed), packed])

    return edit_file(pack, "manifest.msgpack")


def replace(old: bytes, new: bytes, name: str = "data-*/rank-00000/master.safetensors") -> Callable[[Path], None]:
    assert len(old) == len(new)

    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return edit_file(change, name)


def link(checkpoint: Path) -> None:
    (path,) = checkpoint.glob("data-*/rank-00001")
    path.symlink_to(path.rename(checkpoint.parent / "elsewhere"))


MANIFEST = "manifest.msgpack"
DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "other magic": ("M001", replace(b"zckpt", b"zcqpt", MANIFEST)),
    "another major version": ("M002", replace(b"\x92\x01\x00", b"\x92\x02\x00", MANIFEST)),
    "cut manifest": ("M001", edit_file(lambda data: data[:-1], MANIFEST)),
    "bytes behind the manifest": ("M001", edit_file(lambda data: data + b"\0", MANIFEST)),
    "unknown feature": ("M006", edit_body("requires", ["zstd"])),
    "missing field": ("M005", edit_body("step", None)),
    "boolean for an integer": ("M005", edit_body("step", True)),
    "unequal columns": ("M005", edit_body("files.tier", lambda column: column[:-1])),
    "path for a save id": ("N004", edit_body("save_id", "../../../../etc0")),
    "path for a part": ("N003", edit_body("parts.0.name", "../master")),
    "control character": ("N001", edit_body("names.1", "a\nb")),
    "reserved name": ("N002", edit_body("names.1", "w@0:3")),
    "alias of nothing": ("M012", edit_body("aliases.head", "nothing")),
    "name twice in a part": ("M010", edit_body("parts.3.names", [2, 2, 4])),
    "another shape": ("I005", edit_body("shapes.0", [4])),
    "huge shape": ("M008", edit_body("shapes.0", [1 << 31, 1 << 31])),
    "unknown dtype": ("M009", edit_body("parts.0.dtypes.0", "F31")),
    "another dtype": ("S007", edit_body("parts.0.dtypes.0", "I32")),
    "file of no rank": ("M011", edit_body("files.rank.7", 2)),
    "data at an odd place": ("S003", edit_body("files.data_start.0", 4097)),
    "odd blocks": ("M005", edit_body("block_bytes", 4097)),
    "file not listed": ("I006", edit_body("files.tier.7", 0)),
    "gap between chunks": ("M013", edit_body("chunks.offset.1", 36)),
    "chunk of other rows": ("I003", edit_body("chunks.rows.0", 2)),
    "damaged manifest": ("M003", replace(b"master", b"mastes", MANIFEST)),
    "damaged chunk": ("I002", replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfc", "data-*/index.bin")),
    "cut index": ("I001", edit_file(lambda data: data[:-1], "data-*/index.bin")),
    "cut data": ("F003", edit_file(lambda data: data[:-1], "data-*/rank-00001/buffer.safetensors")),
    "missing file": ("F001", lambda path: next(path.glob("data-*/rank-00001/exp_avg.safetensors")).unlink()),
    "link": ("F002", link),
    "header of another length": ("S003", replace(b"\xf8\x0f\0\0", b"\xf8\x0f\1\0")),
    "damaged header": ("D003", replace(b'{"__metadata__"', b'{,__metadata__"')),
    "damaged digests": ("D002", edit_file(lambda data: data[:-1] + b"!", "data-*/rank-00001/digests.bin")),
    "damaged data": ("D003", edit_file(lambda data: data[:-1] + b"!", "data-*/rank-00001/master.safetensors")),
    "reference to nothing": ("T003", edit_body("state", lambda tree: tree.replace(b"tree/0/0", b"tree/0/1"))),
    "unknown extension": ("T001", edit_body("state", lambda tree: tree.replace(b"\xd7\x01", b"\xd7\x06"))),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_structure_is_refused(tmp_path: Path, case: str) -> None:
    rule, damage = DAMAGES[case]
    shutil.copytree(EXAMPLE / "run", tmp_path / "run")
    damage(tmp_path / "run" / "global_step7")
    with pytest.raises(ValueError, match=rule):
        Reader(tmp_path / "run").tree()


@pytest.mark.parametrize(
    "latest",
    [b"", b"\n", b".", b"..\n", b"../run/global_step7", b"global_step7\n\n", b"\xff", b"global_step7/", b"a//b"],
)
def test_a_bad_latest_is_refused(tmp_path: Path, latest: bytes) -> None:
    shutil.copytree(EXAMPLE / "run", tmp_path / "run")
    assert Reader(tmp_path / "run").step == Reader(tmp_path / "run" / "global_step7").step == 7
    (tmp_path / "run" / "latest").write_bytes(latest)
    with pytest.raises(ValueError, match="L001"):
        Reader(tmp_path / "run")


def test_trees_of_every_kind() -> None:
    reader = Reader(EXAMPLE / "run")

    def read(tree: Any) -> Any:
        reader.body["state"] = msgpack.packb(tree)
        return reader.tree()

    def named(name: str, value: Any) -> msgpack.ExtType:
        return msgpack.ExtType(5, msgpack.packb([name, value]))

    deep: Any = 0
    for _ in range(64):
        deep = [deep]
    assert read(deep) == deep
    assert read(named("Counter", {"b": 1, "a": named("OrderedDict", {3: 4})})) == {"b": 1, "a": {3: 4}}
    assert read(msgpack.ExtType(4, b"-" + b"9" * 4000)) == -(10**4000) + 1
    refused = [
        ("T002", [deep]),
        ("T001", named("dict", {})),
        ("T001", msgpack.ExtType(3, b"\x80")),
        ("T001", msgpack.ExtType(3, b"\x90\xc0")),
        ("T001", msgpack.ExtType(4, b"07")),
        ("T001", msgpack.ExtType(4, b"9" * 4001)),
        ("T001", msgpack.ExtType(4, b"18446744073709551615")),
        ("T001", msgpack.Timestamp(1)),
        ("T001", {True: 1}),
        ("T001", msgpack.ExtType(2, b"\xff")),
    ]
    for rule, tree in refused:
        with pytest.raises(ValueError, match=rule):
            read(tree)


def test_the_reader_is_small_and_independent() -> None:
    source = READER.read_text()
    assert len(source.splitlines()) <= 415
    nodes = list(ast.walk(ast.parse(source)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += ["." * node.level + str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {module.partition(".")[0] for module in modules}
    assert imported <= {*sys.stdlib_module_names, "msgpack", "xxhash", "zstandard"} - {"importlib"}
    assert "__import__" not in source
