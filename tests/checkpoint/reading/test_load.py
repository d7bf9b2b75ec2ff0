"""An opened checkpoint: what it says about itself, any part of it as tensors, and what a load costs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.support.no_threads import no_further_threads
from tests.support.states import PARTS, SHAPES, Written, fragment, same, same_all, write_state
from zckpt.checkpoint.listing import contents as listing
from zckpt.checkpoint.reading import loader as reading
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.plan import catalog, data_files
from zckpt.plan.reads import plan_reads
from zckpt.storage.local_reader import LocalReader
from zckpt.storage.local_store import LocalStore
from zckpt.testing.fragments import write_fragments
from zckpt.transfer.budget import MIB

if TYPE_CHECKING:
    from zckpt.plan.reads import ReadOp
    from zckpt.plan.reshard import PieceRanges

WORLD_SIZE = 3
BUFFERS = {
    "mean": [torch.full((3,), float(rank)) for rank in range(WORLD_SIZE)],
    "count": [torch.tensor(7)] * WORLD_SIZE,
    "mask": [torch.tensor([True, False, True])] * WORLD_SIZE,
}
STATE: dict[str, Any] = {
    "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(2.5), torch.empty(0, 4, dtype=torch.bfloat16)],
    "array": np.arange(6, dtype=np.uint16).reshape(3, 2)[:, ::-1],
    "scalar array": np.array(1.5),
    "note": ("text", 1 << 70, float("inf")),
}


def write(path: Path, **options: Any) -> Written:
    usual = {"layout": "random", "buffers": BUFFERS, "aliases": {"tied": "a.weight"}, "client_state": STATE, "seed": 3}
    return write_state(path, WORLD_SIZE, **{**usual, **options})


@pytest.fixture(scope="module", params=["zero3", "random"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("run") / "global_step5", layout=request.param)


@pytest.fixture
def checkpoint(written: Written) -> zckpt.Checkpoint:
    return zckpt.open(written.path)


# What a checkpoint says about itself


def test_a_checkpoint_is_a_mapping(written: Written, checkpoint: zckpt.Checkpoint) -> None:
    assert set(checkpoint) == set(checkpoint.keys()) == written.full.keys()
    assert len(checkpoint) == len(written.full) == len(list(checkpoint))
    assert "master/a.weight" in checkpoint
    for key in ("a.weight", "master", "master/", "master/*", "state/rank/0", "", 5, None):
        assert key not in checkpoint
    assert checkpoint.get("master/nothing") is None
    with pytest.raises(zckpt.KeyNotFoundError, match=r"nearest are: .*master/a\.weight"):
        checkpoint["master/a.wieght"]
    with pytest.raises(zckpt.KeyNotFoundError):
        checkpoint["master/*"]  # only load takes patterns
    assert (checkpoint.step, checkpoint.world_size, checkpoint.aliases) == (5, WORLD_SIZE, {"tied": "a.weight"})
    assert checkpoint.parts == (*PARTS, "buffer")
    assert repr(str(checkpoint.path)) in repr(checkpoint)
    files = Path(checkpoint.path).rglob("*.safetensors")
    assert checkpoint.nbytes == sum(file.stat().st_size for file in files)


def test_the_facts_about_a_tensor_are_right(written: Written, checkpoint: zckpt.Checkpoint) -> None:
    for key, value in written.full.items():
        info = checkpoint[key]
        assert f"{info.part}/{info.name}" == info.key == key
        assert (info.dtype, info.shape, info.nbytes) == (value.dtype, tuple(value.shape), value.nbytes)
        expected_pieces = [
            (rank, start, stop)
            for rank, pieces_of_rank in enumerate(written.ranks)
            for k, start, stop in pieces_of_rank
            if k == key
        ]
        if info.part != "buffer":
            assert sorted((piece.start, piece.rank, piece.stop) for piece in info.pieces if value.numel()) == sorted(
                (start, rank, stop) for rank, start, stop in expected_pieces
            )
        assert info.ranks == tuple(sorted({piece.rank for piece in info.pieces}))
        assert set(info.files) == {piece.file for piece in info.pieces}
        for piece in info.pieces:
            data = (written.path / piece.file).read_bytes()[piece.offset : piece.offset + piece.nbytes]
            expected = written.ranks[piece.rank].get((key, piece.start, piece.stop))
            assert data == (b"" if expected is None else expected.view(torch.uint8).numpy().tobytes())


def test_buffers_keep_the_value_of_every_rank(checkpoint: zckpt.Checkpoint) -> None:
    pieces = checkpoint["buffer/mean"].pieces
    assert [(piece.rank, piece.copy, piece.start, piece.stop) for piece in pieces] == [
        (rank, rank, 0, 3) for rank in range(WORLD_SIZE)
    ]
    for rank in range(WORLD_SIZE):
        assert same(checkpoint.load_pieces(rank, "buffer/mean")["buffer/mean", 0, 3], BUFFERS["mean"][rank])


@pytest.mark.parametrize("as_path", [str, Path])
def test_latest_leads_to_the_last_one(tmp_path: Path, as_path: type) -> None:
    for step in (1, 2):
        write_state(tmp_path / f"global_step{step}", 1, {"w": (2,)}, step=step, seed=step)
    assert zckpt.open(as_path(tmp_path)).step == 2
    write_state(tmp_path / "aside", 1, {"w": (2,)}, step=3, latest=False)
    assert zckpt.open(as_path(tmp_path)).step == 2
    assert zckpt.open(as_path(tmp_path / "global_step1")).step == 1
    (tmp_path / "linked").symlink_to(tmp_path / "global_step1")
    assert zckpt.open(as_path(tmp_path / "linked")).load().keys()


# Loading


def keys_of(checkpoint: zckpt.Checkpoint, part: str) -> list[str]:
    return [key for key in checkpoint if key.startswith(f"{part}/")]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, list),
        ("master/big", lambda c: ["master/big"]),
        ("exp_avg/*", lambda c: keys_of(c, "exp_avg")),
        (["buffer/*", "master/one"], lambda c: ["master/one", *keys_of(c, "buffer")]),
        (lambda key: key.endswith("scalar"), lambda c: [f"{part}/scalar" for part in PARTS]),
        ([], lambda c: []),
    ],
    ids=["all", "key", "glob", "several", "predicate", "none"],
)
@pytest.mark.parametrize("verify", [True, False])
def test_load_gives_what_was_written(
    written: Written, checkpoint: zckpt.Checkpoint, wanted: Any, expected: Any, verify: bool
) -> None:
    keys = expected(checkpoint)
    values = {key: written.full[key] for key in keys}
    loaded = checkpoint.load(wanted, verify=verify)
    assert list(loaded) == keys
    assert same_all(loaded, values)
    assert same_all(dict(checkpoint.iter(wanted, verify=verify)), values)
    storages = [tensor.untyped_storage().data_ptr() for tensor in loaded.values() if tensor.numel()]
    assert len(set(storages)) == len(storages)  # each tensor has its own memory


def test_reads_of_many_pieces_are_planned_some_tensors_at_a_time(tmp_path: Path) -> None:
    write(tmp_path / "c")
    expected, planned = zckpt.open(tmp_path / "c").load(), []

    def plan(ranges: PieceRanges, **options: Any) -> tuple[ReadOp, ...]:
        planned.append(len(np.unique(ranges.target)))
        return plan_reads(ranges, **options)

    with (
        mock.patch.object(reading, "PLANNED_PIECES", 2 * WORLD_SIZE),
        mock.patch.object(listing, "LISTED_PIECES", 1),
        mock.patch.object(reading, "plan_reads", plan),
    ):
        assert same_all(zckpt.open(tmp_path / "c").load(), expected)
    assert len(planned) == -(-len(expected) // 2)
    assert max(planned) == 2


@pytest.mark.parametrize("direct", [False, True])
def test_a_load_needs_no_further_threads(written: Written, direct: bool) -> None:
    with (
        mock.patch.object(reading, "PLANNED_PIECES", 2 * WORLD_SIZE),
        mock.patch.object(LocalReader, "is_cached", return_value=False),
        no_further_threads(),
    ):
        assert same_all(zckpt.open(written.path, budget=zckpt.Budget(direct=direct)).load(), written.full)


def test_lengths_of_files_far_away_are_checked_without_further_threads(written: Written) -> None:
    with mock.patch.object(LocalStore, "requests_in_flight", 8), no_further_threads():
        loader_of(zckpt.open(written.path)).contents.check_lengths(dict.fromkeys(range(3)))


def test_a_write_that_can_start_no_thread_says_what_to_do(tmp_path: Path) -> None:
    with no_further_threads(), pytest.raises(zckpt.ZckptError, match=r"cannot start another thread .*\n.*ulimit -u"):
        zckpt.write_state_dict({"w": torch.ones(3)}, tmp_path / "c")
    assert list(tmp_path.rglob("*")) == []


def test_unknown_keys_read_nothing(checkpoint: zckpt.Checkpoint) -> None:
    before = checkpoint.io.bytes_read
    for action in (checkpoint.load, lambda key: list(checkpoint.iter(key)), lambda key: checkpoint.load_pieces(0, key)):
        with pytest.raises(zckpt.KeyNotFoundError):
            action(["master/one", "master/nothing"])
    assert checkpoint.io.bytes_read == before


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
def test_casts(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    value = (torch.arange(5000) % 100).to(stored)
    write_state(tmp_path / "c", 2, {"w": value}, parts=("master",))
    checkpoint = zckpt.open(tmp_path / "c")
    kinds = [(d.is_floating_point, d.is_complex, d is torch.bool) for d in (stored, wanted)]
    allowed = stored == wanted or (kinds[0] == kinds[1] and wanted not in (torch.bool, torch.complex64))
    if allowed:
        assert same(checkpoint.load("*", dtype=wanted)["master/w"], value.to(wanted))
        assert same(checkpoint.load_slice("master/w", slice(9, 4321), dtype=wanted), value[9:4321].to(wanted))
    else:
        for action in (checkpoint.load, lambda *a, **k: checkpoint.load_slice("master/w", slice(2), **k)):
            with pytest.raises(zckpt.CastError) as caught:
                action("master/w", dtype=wanted)
            assert caught.value.key == "master/w"


def test_small_elements_before_large_ones(tmp_path: Path) -> None:
    """zckpt writes the larger elements first. A reader does not depend on this order (see "Data files" in the spec)."""
    values = {"a": torch.randn(3).bfloat16(), "b": torch.randn(1).bfloat16(), "c": torch.randn(5)}
    with mock.patch.object(data_files, "_order", lambda file, item_bytes: np.arange(len(file))):
        write_state(tmp_path / "c", 1, values, parts=("master",))
    checkpoint = zckpt.open(tmp_path / "c")
    assert [checkpoint[f"master/{name}"].pieces[0].offset for name in values] == [4096, 4102, 4104]
    loaded = checkpoint.load(["master/b", "master/c"], dtype=torch.float64)
    assert same(loaded["master/b"], values["b"].double())
    assert same(loaded["master/c"], values["c"].double())
    assert zckpt.validate(tmp_path / "c").ok


@given(st.data(), st.sampled_from(sorted(SHAPES)), st.sampled_from([None, torch.bfloat16]), st.booleans())
def test_slices(written: Written, data: st.DataObject, name: str, dtype: torch.dtype | None, verify: bool) -> None:
    full = written.full[f"master/{name}"]
    bounds = st.none() | st.integers(-60, 60)
    index = tuple(slice(data.draw(bounds), data.draw(bounds)) for _ in range(data.draw(st.integers(0, full.dim()))))
    loaded = zckpt.open(written.path).load_slice(f"master/{name}", index, dtype=dtype, verify=verify)
    assert same(loaded, full[index].to(dtype or full.dtype))


def test_a_slice_reads_the_blocks_that_it_touches(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 1, {"w": (100, 1024)}, parts=("master",))  # each row is one block
    for verify, rows, nbytes in ((True, slice(3, 5), 8192), (False, slice(3, 5), 8192)):
        checkpoint = zckpt.open(tmp_path / "c")
        checkpoint.load_slice("master/w", rows, verify=verify)
        assert (checkpoint.io.data_bytes, checkpoint.io.reads) == (nbytes, 4 if verify else 3)
    for verify, nbytes in ((True, 2 * 4096), (False, 2 * 8)):
        checkpoint = zckpt.open(tmp_path / "c")
        checkpoint.load_slice("master/w", (slice(3, 5), slice(5, 7)), verify=verify)
        assert checkpoint.io.data_bytes == nbytes
    with pytest.raises(zckpt.MismatchError):
        checkpoint.load_slice("master/w", slice(0, 10, 2))
    for index, hint in ((-1, r"slice\(-1, None\) has index -1 alone; pass a slice"), (..., "or a tuple of slices")):
        with pytest.raises(zckpt.MismatchError, match=rf"is not a slice\n.*{hint}"):
            checkpoint.load_slice("master/w", index)  # type: ignore[arg-type]


def test_load_pieces_gives_what_each_rank_has_written(written: Written, checkpoint: zckpt.Checkpoint) -> None:
    for rank, expected in enumerate(written.ranks):
        loaded = {place: value for place, value in checkpoint.load_pieces(rank).items() if value.numel()}
        assert same_all(loaded, expected)
        assert same_all(
            checkpoint.load_pieces(rank, "exp_avg/big"), {p: v for p, v in expected.items() if p[0] == "exp_avg/big"}
        )
    assert checkpoint.load_pieces(WORLD_SIZE, "master/*") == {}


def test_a_state_dict_has_weights_buffers_and_every_name(tmp_path: Path) -> None:
    write(tmp_path / "c", parts=("param", "exp_avg", "master"), tensors={"a.weight": (5, 3), "b": (4,)})
    checkpoint = zckpt.open(tmp_path / "c")
    state_dict = checkpoint.state_dict()
    loaded = checkpoint.load()
    weights = {name: loaded[f"master/{name}"] for name in ("a.weight", "b")}
    assert same_all(
        state_dict, {**{name: values[0] for name, values in BUFFERS.items()}, **weights, "tied": weights["a.weight"]}
    )
    assert state_dict["tied"].data_ptr() == state_dict["a.weight"].data_ptr()
    half = checkpoint.state_dict(dtype=torch.bfloat16)
    assert same(half["a.weight"], weights["a.weight"].bfloat16())
    assert half["mean"].dtype == torch.float32
    assert checkpoint.io.data_bytes < 2 * checkpoint.nbytes
    model = torch.nn.ParameterDict({"b": torch.empty(4)})
    model.load_state_dict({"b": state_dict["b"]})


def test_a_state_dict_takes_params_where_there_is_no_master(tmp_path: Path) -> None:
    values = {name: torch.randn(3) for name in ("both", "frozen")}
    fragments = [fragment("master", "both", values["both"], 0, 3)]
    fragments += [fragment("param", name, value.bfloat16(), 0, 3) for name, value in values.items()]
    write_fragments(str(tmp_path / "c"), [fragments], catalog.SaveMetadata(0, 1 << 20, {}, b"\xc0", {}))
    checkpoint = zckpt.open(tmp_path / "c")
    assert same_all(checkpoint.state_dict(), {"both": values["both"], "frozen": values["frozen"].bfloat16()})
    assert checkpoint.state is None
    assert checkpoint.rank_state(0) is None


def test_state_comes_back_with_its_tensors_and_arrays(checkpoint: zckpt.Checkpoint) -> None:
    client_state = checkpoint.state["client_state"]
    assert same_all(dict(enumerate(client_state["tensors"])), dict(enumerate(STATE["tensors"])))
    for name in ("array", "scalar array"):
        assert isinstance(client_state[name], np.ndarray)
        assert client_state[name].dtype == STATE[name].dtype
        assert np.array_equal(client_state[name], STATE[name])
    assert client_state["note"] == STATE["note"]
    assert [checkpoint.rank_state(rank) for rank in range(WORLD_SIZE)] == [{"rank": rank} for rank in range(WORLD_SIZE)]
    assert checkpoint.rank_state(WORLD_SIZE) is None
    assert not any("state" in key or "tree" in key for key in checkpoint)


# What a load costs


def test_only_what_is_asked_for_is_read(written: Written) -> None:
    checkpoint = zckpt.open(written.path)
    opened = (written.path / "manifest.msgpack").stat().st_size
    assert (checkpoint.io.metadata_bytes, checkpoint.io.data_bytes) == (opened, 0)
    for keys in ("master/*", ["exp_avg/a.weight", "master/a.bias"], "buffer/*"):
        checkpoint = zckpt.open(written.path)
        loaded = checkpoint.load(keys)
        nbytes = sum(tensor.nbytes for tensor in loaded.values())
        assert nbytes <= checkpoint.io.data_bytes <= 1.05 * nbytes
        pieces = [piece for key in loaded for piece in checkpoint[key].pieces if piece.copy == 0 and piece.nbytes]
        tables = {f"data-{written.save_id}/rank-{piece.rank:05d}/digests.bin" for piece in pieces}
        layouts = {
            part.layout_id
            for part in loader_of(checkpoint).manifest.parts
            for key in loaded
            if key.startswith(f"{part.name}/")
        }
        chunks = sum(chunk.nbytes for chunk in loader_of(checkpoint).manifest.chunks if chunk.layout_id in layouts)
        digests = sum((written.path / table).stat().st_size for table in tables)
        assert checkpoint.io.metadata_bytes == opened + chunks + digests
        assert checkpoint.io.bytes_read == checkpoint.io.metadata_bytes + checkpoint.io.data_bytes
        unverified = zckpt.open(written.path)
        unverified.load(keys, verify=False)
        assert (unverified.io.metadata_bytes, unverified.io.data_bytes) == (opened + chunks, nbytes)


def test_files_of_other_parts_are_not_even_opened(tmp_path: Path) -> None:
    written = write(tmp_path / "c")
    for file in (tmp_path / "c").rglob("*.safetensors"):
        if not file.name.endswith("exp_avg.safetensors"):
            file.unlink()
    loaded = zckpt.open(tmp_path / "c").load("exp_avg/*")
    assert same_all(loaded, {key: value for key, value in written.full.items() if key.startswith("exp_avg/")})
    with pytest.raises(zckpt.MissingFileError):
        zckpt.open(tmp_path / "c").load("master/*")


def test_without_verification_digests_are_not_read(tmp_path: Path) -> None:
    written = write(tmp_path / "c")
    for table in (tmp_path / "c").rglob("digests.bin"):
        table.unlink()
    checkpoint = zckpt.open(tmp_path / "c")
    assert same_all(checkpoint.load(verify=False), written.full)
    with pytest.raises(zckpt.MissingFileError, match=r"digests\.bin"):
        checkpoint.load("master/big")


def high_water_mark(reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.linux
def test_iterating_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    shapes = {f"layer.{i}": (MIB + 1,) for i in range(50)}
    write_state(tmp_path / "c", 2, shapes, parts=("master",), block_bytes=MIB)
    gc.collect()
    # Memory that the write has freed would hide the memory that the load takes.
    ctypes.CDLL(None).malloc_trim(0)
    largest, total = 4 * (MIB + 1), 50 * 4 * (MIB + 1)
    checkpoint = zckpt.open(tmp_path / "c")
    before = high_water_mark(reset=True)
    for key, tensor in checkpoint.iter():
        assert tensor.count_nonzero() > 0, key
    assert high_water_mark() - before <= largest + 64 * MIB
    assert total <= checkpoint.io.data_bytes <= 1.01 * total  # reads are of whole pages
    loader_of(checkpoint).reader.close()
    shutil.rmtree(tmp_path / "c")


def open_files() -> int:
    """Returns how many files this process has open."""
    count = 0
    for fd in range(1024):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            count += 1
    return count


def test_threads_share_a_checkpoint(written: Written) -> None:
    gc.collect()
    before = open_files()
    checkpoint = zckpt.open(written.path)
    choice = random.Random(0)
    keys_of_loads = [choice.sample(sorted(written.full), 4) for _ in range(24)]
    with ThreadPoolExecutor(8) as pool, mock.patch("zckpt.storage.local_reader.IDLE_FILES_MAX", 2):
        results = list(pool.map(checkpoint.load, keys_of_loads))
    for keys, loaded in zip(keys_of_loads, results, strict=True):
        assert same_all(loaded, {key: written.full[key] for key in keys})
    nbytes = sum(
        math.prod(written.full[key].shape) * written.full[key].element_size() for keys in keys_of_loads for key in keys
    )
    assert checkpoint.io.data_bytes == nbytes
    assert open_files() <= before + 2
    loader_of(checkpoint).reader.close()
    assert open_files() <= before


WITHOUT_DEEPSPEED = """
import sys
for name in ("deepspeed", "transformers"):
    sys.modules[name] = None  # makes every import of it fail
import zckpt
import zckpt.cli
checkpoint = zckpt.open(sys.argv[1])
total = sum(float(tensor.double().sum()) for tensor in checkpoint.load("master/*").values())
valid = zckpt.cli.main(["validate", sys.argv[1]])
print(repr(total), checkpoint.state["client_state"]["note"], checkpoint.rank_state(1), valid)
"""


def test_it_all_works_without_deepspeed(tmp_path: Path) -> None:
    written = write(tmp_path / "c")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_DEEPSPEED, written.path],
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    total = sum(float(value.double().sum()) for key, value in written.full.items() if key.startswith("master/"))
    assert ran.stdout.splitlines()[-1] == f"{total!r} {STATE['note']} {{'rank': 1}} 0"


def test_a_tied_weight_is_found_under_every_name(tmp_path: Path) -> None:
    tensors = {"embed.weight": torch.randn(5, 3), "bias": torch.randn(3)}
    write_state(tmp_path / "c", 2, tensors, parts=("master",), aliases={"head.weight": "embed.weight"})
    checkpoint = zckpt.open(tmp_path / "c")
    assert "master/head.weight" in checkpoint
    assert checkpoint["master/head.weight"].key == "master/embed.weight"
    loaded = checkpoint.load(["master/head.weight", "master/bias"])
    assert set(loaded) == {"master/head.weight", "master/bias"}
    assert torch.equal(loaded["master/head.weight"], tensors["embed.weight"])
    assert set(checkpoint.load("master/*")) == {
        "master/embed.weight",
        "master/bias",
    }
    assert "master/none.weight" not in checkpoint
    assert set(checkpoint.load("master/head*")) == {"master/head.weight"}
    assert set(checkpoint.load("master/*weight")) == {"master/embed.weight"}, "the same tensor, and once is enough"
    assert set(checkpoint.load(["master/e*", "*/head*"])) == {"master/embed.weight", "master/head.weight"}
    assert [key for key, _ in checkpoint.iter("*/head.*")] == ["master/head.weight"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_ends_too_early_names_the_key_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    write_state(tmp_path / "checkpoint", 1, {"a": (100,), "b": (100,)}, parts=["master"])
    checkpoint = zckpt.open(tmp_path / "checkpoint")
    # The sizes of files are not checked here, as if the file became too short just after the check.
    monkeypatch.setattr(loader_of(checkpoint).contents, "check_sizes", lambda infos, unmeasured_bytes: [0] * len(infos))
    file = tmp_path / "checkpoint" / checkpoint["master/b"].files[0]
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(zckpt.FormatError, match=r"F003.*key master/b"):
        checkpoint.load(verify=verify)
