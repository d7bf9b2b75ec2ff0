"""ZeRO-3 with optimizer and parameters offloaded, in fp16, and with states moved away by offload_states().

These tests read the state of an engine with DeepSpeed's public functions and from its swap files, and not with zckpt's
adapter.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.memory import peak_growth
from tests.support.models import Deep, make_engine, train
from tests.support.offload import (
    CASES,
    CPU,
    NVME,
    ODD,
    PARAM_DISK,
    PIPELINED,
    WIDE,
    restore_and_go_on,
    write_and_go_on,
)
from tests.support.runs import ADAM, assert_at_rest, fingerprint, fingerprints_of
from tests.support.states import same_all, write_state
from zckpt.format.names import Tier
from zckpt.geometry import Grid, Span
from zckpt.plan import catalog
from zckpt.plan.inventory import FileRange, Fragment
from zckpt.testing.fragments import write_fragments

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

EVERY_TIME = {"cpu", "cpu-torch-adam", "nvme-pipelined", "nvme+disk", "fp16-dynamic"}


def marked(cases: dict[str, Any]) -> list[Any]:
    marks = {case: [] if case in EVERY_TIME else [pytest.mark.matrix] for case in cases}
    return [pytest.param(case, marks=marks[case]) for case in cases]


def restore_and_look(path: str, setup: dict[str, Any], swap: str, trained: int) -> dict[str, str]:
    engine = make_engine(**setup, swap=swap, seed=1)
    train(engine, trained, 100)
    zckpt.restore(engine, path)
    assert_at_rest(engine)
    fingerprints = fingerprints_of(engine)
    train(engine, 1)
    return fingerprints


def tiers(checkpoint: zckpt.Checkpoint) -> dict[str, set[str]]:
    tiers_of_part: dict[str, set[str]] = {part: set() for part in checkpoint.parts}
    for info in checkpoint.values():
        tiers_of_part[info.part].update(piece.tier for piece in info.pieces)
    return tiers_of_part


@pytest.mark.parametrize("case", marked(CASES))
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, case: str) -> None:
    """Restores into a fresh engine and into one that has trained."""
    steps, setup = CASES[case]
    path = str(tmp_path / "checkpoint")
    through = cluster.run(write_and_go_on, 2, path, setup, str(tmp_path / "swap"), steps)
    for trained in (0, 2):
        resumed = cluster.run(restore_and_go_on, 2, path, setup, str(tmp_path / f"swap{trained}"), trained, steps)
        assert resumed == through
    if "dynamic" in case:
        assert 0 < through[0]["before"][1]["skipped"] < steps
    for name in (path, f"{path}-all"):
        report = zckpt.validate(name)
        assert report.ok, str(report)
    # Each tensor in the checkpoint is equal to the one that DeepSpeed's functions have returned.
    loaded = zckpt.open(f"{path}-all").load()
    truth = through[0]["before"][0]
    assert {key: fingerprint(t) for key, t in loaded.items() if t.numel() and "buffer" not in key} == {
        key: value for key, value in truth.items() if key in loaded and loaded[key].numel() and "buffer" not in key
    }


@pytest.mark.nvme
def test_swap_files_go_to_their_own_files_without_padding(cluster: Cluster, tmp_path: Path) -> None:
    path, swap = str(tmp_path / "checkpoint"), tmp_path / "swap"
    setup = {**WIDE, "offload_optimizer": NVME, "offload_param": PARAM_DISK}
    cluster.run(write_and_go_on, 2, path, setup, str(swap), 1)
    checkpoint = zckpt.open(path)
    where = tiers(checkpoint)
    assert where == {part: {"nvme", "host"} for part in ("master", *ADAM, "param")}
    # A second engine trains one step and stops. Its raw swap files contain the master and the moment of a weight.
    cluster.run(train_and_leave, 2, setup, str(tmp_path / "again"), 1)
    for rank in range(2):
        files = sorted((tmp_path / "again" / "zero_stage_3" / "optimizer" / f"rank{rank}").glob("*.swp"))
        pieces = checkpoint.load_pieces(rank, ["master/first.weight", "exp_avg/first.weight"])
        for (key, start, stop), piece in pieces.items():
            names = [f for f in files if "gradient" not in f.name and f.name.startswith("exp_avg-") == ("avg" in key)]
            raw = [np.fromfile(file, dtype="<f4")[: stop - start] for file in names]
            assert any(np.array_equal(content, piece.numpy()) for content in raw), key


def train_and_leave(setup: dict[str, Any], swap: str, steps: int) -> None:
    train(make_engine(**setup, swap=swap), steps)


MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": CPU, "offload_param": CPU},
    "nvme": {"offload_optimizer": NVME, "offload_param": PARAM_DISK},
}
CROSSED = [(a, b, size) for a in MODES for b in MODES for size in (1, 2, 3) if a != b or size != 2]
CROSSED_EVERY_TIME = {("none", "nvme", 3), ("nvme", "none", 1), ("cpu", "nvme", 2), ("nvme", "cpu", 3)}


@pytest.mark.parametrize(
    ("saved", "wanted", "size"),
    [pytest.param(*x, marks=[] if x in CROSSED_EVERY_TIME else [pytest.mark.matrix]) for x in CROSSED],
)
def test_any_mode_restores_into_any_other_at_any_world_size(
    cluster: Cluster, tmp_path: Path, saved: str, wanted: str, size: int
) -> None:
    path = str(tmp_path / "checkpoint")
    through = cluster.run(write_and_go_on, 2, path, {**WIDE, **MODES[saved]}, str(tmp_path / "swap"), 2)
    setup = {**WIDE, **MODES[wanted], "sub_group_size": 10**9}
    for restored in cluster.run(restore_and_look, size, path, setup, str(tmp_path / "other"), size % 2):
        assert restored == through[0]["before"][0]


FUSED = {"adamw": {}, "groups": ODD | {"model": "mlp"}, "gpt2": {"model": "gpt2", "groups": True}}


MOVED = {"saved": (True, False), "restored": (False, True), "both": (True, True)}
MOVED_EVERY_TIME = {("saved", "gpt2"), ("restored", "groups"), ("both", "adamw"), ("both", "gpt2")}


@pytest.mark.parametrize(
    ("when", "case"),
    [
        pytest.param(*x, marks=[] if x in MOVED_EVERY_TIME else [pytest.mark.matrix])
        for x in itertools.product(MOVED, FUSED)
    ],
)
def test_states_that_were_moved_away_stay_there(cluster: Cluster, tmp_path: Path, when: str, case: str) -> None:
    moved = MOVED[when]
    path = str(tmp_path / "checkpoint")
    through = cluster.run(write_and_go_on, 2, path, FUSED[case], "", 3, moved[0])
    resumed = cluster.run(restore_and_go_on, 2, path, FUSED[case], "", 2, 3, moved[1])
    assert resumed == through
    expected = "host" if moved[0] else "device"
    assert tiers(zckpt.open(f"{path}-all")) == {part: {expected} for part in ("master", *ADAM, "param")}
    loaded = zckpt.open(f"{path}-all").load()
    truth = through[0]["before"][0]
    assert {key: fingerprint(tensor) for key, tensor in loaded.items()} == {key: truth[key] for key in loaded}


def restore_damaged_then_whole(damaged: str, whole: str, setup: dict[str, Any], swap: str, trained: int) -> Any:
    engine = make_engine(**setup, swap=swap, seed=1)
    train(engine, trained, 100)
    error = None
    try:
        zckpt.restore(engine, damaged)
    except zckpt.ZckptError as caught:
        error = type(caught).__name__
    assert_at_rest(engine)
    zckpt.restore(engine, whole)
    return error, fingerprints_of(engine)


@pytest.mark.nvme
@pytest.mark.parametrize(
    ("optimizer", "trained"),
    [
        pytest.param(PIPELINED, 0, id="pipelined-fresh"),
        pytest.param(NVME, 1, id="plain-trained"),
        pytest.param(NVME, 0, id="plain-fresh", marks=pytest.mark.matrix),
        pytest.param(PIPELINED, 1, id="pipelined-trained", marks=pytest.mark.matrix),
    ],
)
def test_a_failed_restore_reaches_all_and_leaks_no_buffers(
    cluster: Cluster, tmp_path: Path, optimizer: dict[str, Any], trained: int
) -> None:
    path = tmp_path / "checkpoint"
    setup = {**WIDE, "offload_optimizer": optimizer, "offload_param": PARAM_DISK}
    through = cluster.run(write_and_go_on, 2, str(path), setup, str(tmp_path / "swap"), 2)
    (victim,) = (tmp_path / "checkpoint-all").glob("data-*/rank-00001/swap.exp_avg_sq.safetensors")
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.unlink()  # Another checkpoint may share this file, so it is not changed in place.
    victim.write_bytes(raw)
    outcome = cluster.run(
        restore_damaged_then_whole, 2, f"{path}-all", str(path), setup, str(tmp_path / "other"), trained
    )
    assert [error for error, _ in outcome] == ["RankError", "DigestError"]
    assert all(restored == through[0]["before"][0] for _, restored in outcome)


def write_without_a_swap_file(path: str, setup: dict[str, Any], swap: str) -> str:
    engine = make_engine(**setup, swap=swap)
    train(engine, 1)
    if engine.global_rank == 1:
        next(Path(swap).glob("zero_stage_3/optimizer/rank1/exp_avg_sq-*.swp")).unlink()
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.write(engine, path)
    return type(caught.value).__name__


@pytest.mark.nvme
def test_a_swap_file_that_is_gone_fails_the_write_on_every_rank(cluster: Cluster, tmp_path: Path) -> None:
    setup = {**WIDE, "offload_optimizer": NVME}
    errors = cluster.run(write_without_a_swap_file, 2, str(tmp_path / "checkpoint"), setup, str(tmp_path / "swap"))
    assert errors == ["RankError", "StorageError"]
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("seed", range(5))
def test_states_in_files_are_written_like_states_in_memory(tmp_path: Path, seed: int) -> None:
    shapes = {"small": (3, 5), "one": (1,), "large": (3001, 1009)}  # "large" needs more than one write of 8 MiB
    (tmp_path / "swap").mkdir()
    paths = {name: tmp_path / name for name in ("memory", "files")}
    plain = write_state(paths["memory"], 2, shapes, layout="random", seed=seed)
    swapped = write_state(paths["files"], 2, shapes, layout="random", seed=seed, swap=tmp_path / "swap")
    assert all(file.stat().st_size for file in (tmp_path / "swap").iterdir())
    assert same_all(zckpt.open(paths["files"]).load(), plain.full)
    assert swapped.full.keys() == plain.full.keys()
    assert zckpt.validate(paths["files"]).ok


def test_a_swap_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(10))
    file_range = FileRange(str(tmp_path / "short"), 4, 8)
    with pytest.raises(zckpt.StorageError, match="ends too early") as caught:
        write_fragment(
            tmp_path / "checkpoint",
            Fragment("master", "w", "F32", Span(Grid((2,)), 0, 2), Tier.NVME, data=file_range),
        )
    assert (caught.value.file, caught.value.start, caught.value.stop) == (str(tmp_path / "short"), 10, 12)


def write_fragment(path: Path, fragment: Fragment) -> None:
    write_fragments(str(path), [[fragment]], catalog.SaveMetadata(0, 1 << 20, {}, b"\xc0", {}))


def derive_from_weights(path: str, setup: dict[str, Any], swap: str) -> dict[str, str]:
    engine = make_engine(**setup, swap=swap, seed=1)
    zckpt.restore(engine, path, parts=["param"])
    assert_at_rest(engine)
    return fingerprints_of(engine)


@pytest.mark.parametrize("mode", ["none", "cpu", "nvme"])
def test_masters_are_derived_from_weights_where_there_are_no_others(
    cluster: Cluster, tmp_path: Path, mode: str
) -> None:
    path = str(tmp_path / "checkpoint")
    cluster.run(write_and_go_on, 2, path, WIDE, str(tmp_path / "swap"), 1)
    weights = zckpt.open(f"{path}-all").load("param/*")
    frozen = ("param/frozen.weight", "param/frozen.bias")
    expected = {key: fingerprint(value) for key, value in weights.items()}
    expected |= {f"master/{k[6:]}": fingerprint(v.float()) for k, v in weights.items() if k not in frozen}
    for restored in cluster.run(
        derive_from_weights, 2, f"{path}-all", {**WIDE, **MODES[mode]}, str(tmp_path / "other")
    ):
        assert restored == expected


def write_after_backward(setup: dict[str, Any], swap: str, path: str) -> None:
    engine = make_engine(**setup, swap=swap)
    x = torch.ones(4, 1024, dtype=torch.bfloat16)
    train(engine, 1)
    zckpt.write(engine, path)
    engine.backward(engine(x))
    with pytest.raises(zckpt.UnsupportedError, match="gradients that no optimizer step"):
        zckpt.write(engine, f"{path}-dropped")
    zckpt.write(engine, f"{path}-dropped", pending_gradients="drop")
    assert same_all(zckpt.open(f"{path}-dropped").load(), zckpt.open(path).load())
    engine.step()
    expected = fingerprints_of(engine)
    engine.backward(engine(-x))
    zckpt.restore(engine, f"{path}-dropped")
    engine.backward(engine(x))
    engine.step()
    assert fingerprints_of(engine) == expected


@pytest.mark.nvme
@pytest.mark.parametrize("optimizer", [CPU, NVME], ids=["cpu", "nvme"])
def test_gradients_that_no_step_has_used_are_refused(
    cluster: Cluster, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    """A write refuses unused gradients, or drops them if it is told to. A restore drops those that the engine has."""
    setup = {**WIDE, "offload_optimizer": optimizer}
    cluster.run(write_after_backward, 2, setup, str(tmp_path / "swap"), str(tmp_path / "c"))


def measure(path: str, swap: str) -> tuple[int, int, int]:
    from tests.support import models

    models.Wide = Deep  # type: ignore[misc,assignment]
    engine = make_engine(model="wide", offload_optimizer=NVME, sub_group_size=1000000, swap=swap)
    train(engine, 1)
    written = peak_growth(lambda: zckpt.write(engine, path))
    restored = peak_growth(lambda: zckpt.restore(engine, path))
    return written, restored, 12 * sum(p.ds_numel for p in engine.module.parameters())


@pytest.mark.nvme
def test_a_swapped_state_is_never_in_memory_as_a_whole(cluster: Cluster, tmp_path: Path) -> None:
    written, restored, total = cluster.run(measure, 1, str(tmp_path / "checkpoint"), str(tmp_path / "swap"))[0]
    assert total == 384 * 2**20
    assert written < 64 * 2**20
    assert restored < 96 * 2**20
