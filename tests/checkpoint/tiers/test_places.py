"""``zckpt.restore`` and ``zckpt.open`` take several places: they choose the newest whole checkpoint, and read each file
from the nearest place that has it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.faults import BROKEN, Fault, faulty
from tests.support.memory_store import MemoryReader, in_memory
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAR = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with in_memory():
        yield


@pytest.fixture(name="near")
def _near(tmp_path: Path) -> Path:
    return tmp_path / "near"


def written(
    near: Path, *steps: int, copied: tuple[int, ...] = (), engine: ReferenceEngine | None = None
) -> ReferenceEngine:
    """Writes a checkpoint after each of these steps. Some of them are copied."""
    engine = engine or ReferenceEngine()
    for step in steps:
        engine.train(step - engine.steps)
        zckpt.write(engine, near / f"step{step}", copy_to=FAR if step in copied else None)
        zckpt.wait()
    return engine


def assert_goes_on(engine: ReferenceEngine, places: list[Path | str], steps: int = 2) -> None:
    """Checks that a restored engine and ``engine`` are the same, bit for bit, after some steps."""
    restored = ReferenceEngine(seed=1)
    zckpt.restore(restored, places, rng=True)
    assert restored.steps == engine.steps
    for either in (engine, restored):
        either.train(steps)
    for part, tensors in engine.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, restored.tensors[part][name]), f"{part}/{name}"


def afar() -> Any:
    """Returns a context whose value counts, in ``call_args_list``, the reads of data from the memory store."""
    return mock.patch.object(MemoryReader, "read_into", autospec=True, side_effect=MemoryReader.read_into)


def test_what_is_whole_nearby_is_read_there(near: Path) -> None:
    engine = written(near, 3, copied=(3,))
    with afar() as reads:
        assert_goes_on(engine, [near, FAR])
    reads.assert_not_called()


def test_only_files_that_are_missing_nearby_come_from_afar(near: Path) -> None:
    engine = written(near, 3, copied=(3,))
    (gone,) = near.glob("step3/data-*/*/master.safetensors")
    (short,) = near.glob("step3/data-*/*/exp_avg.safetensors")
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    with afar() as reads:
        assert_goes_on(engine, [near, FAR])
    assert {call.args[1].rpartition("/")[2] for call in reads.call_args_list} == {gone.name, short.name}
    with afar() as reads:
        checkpoint = zckpt.open([near, FAR])
        assert checkpoint.path == str(near / "step3")
        nbytes = sum(tensor.nbytes for tensor in checkpoint.load().values())
    far_bytes = sum(len(view) for call in reads.call_args_list for view in call.args[2])
    assert far_bytes == sum(info.nbytes for info in checkpoint.values() if info.part in ("master", "exp_avg"))
    assert checkpoint.io.data_bytes == nbytes > far_bytes


@pytest.mark.parametrize("lost", ["index.msgpack", "rank-00000/digests.bin", "*", ""])
def test_it_does_not_matter_which_files_are_missing_nearby(near: Path, lost: str) -> None:
    engine = written(near, 3, copied=(3,))
    for path in near.glob(f"step3/data-*/{lost}" if lost else "step3/manifest.msgpack"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert_goes_on(engine, [near, FAR])


def test_the_other_place_suffices_if_one_is_gone(near: Path) -> None:
    engine = written(near, 3, copied=(3,))
    shutil.rmtree(near)
    assert_goes_on(engine, [near, FAR])
    written(near, 6, engine=engine)
    assert_goes_on(engine, [near, "memory://bucket/nothing"])


def test_two_places_that_have_half_of_the_files_each_make_a_whole_checkpoint(tmp_path: Path, near: Path) -> None:
    engine = written(near, 3)
    half = tmp_path / "half"
    shutil.copytree(near / "step3", half)
    (half / "manifest.msgpack").unlink()  # An own disk of a machine may lack it.
    for number, path in enumerate(sorted(near.glob("step3/data-*/rank-00000/*"))):
        (path if number % 2 else half / path.relative_to(near / "step3")).unlink()
    assert_goes_on(engine, [half, near / "step3"])


def test_the_newest_one_that_is_whole_is_chosen(near: Path) -> None:
    engine = written(near, 1, 2, copied=(2,))
    assert zckpt.open([near, FAR]).step == 2
    written(near, 3, engine=engine)
    assert zckpt.open([near, FAR]).path == str(near / "step3")
    next(near.glob("step3/data-*/*/master.safetensors")).unlink()
    with pytest.warns(UserWarning, match="/step2 is taken.*F001"):
        assert zckpt.open([near, FAR]).path == str(near / "step2"), "what both places have is read nearby"
    shutil.rmtree(near / "step2")
    orders: list[list[Path | str]] = [[near, FAR], [FAR, near]]
    for places in orders:
        with pytest.warns(UserWarning, match="/step2 is taken.*F001"):
            assert zckpt.open(places).path == f"{FAR}/step2"


def test_if_no_latest_names_a_whole_one_an_older_one_of_the_run_is_chosen(near: Path) -> None:
    engine = written(near, 1, 2, 3)
    other = ReferenceEngine(seed=7)
    other.train(9)
    with pytest.warns(UserWarning, match="two engines"):
        zckpt.write(other, near / "other", latest=False)
    zckpt.write(engine, near / "weights", parts=["master"], latest=False)
    next(near.glob("step3/data-*/*/master.safetensors")).unlink()
    with pytest.warns(UserWarning, match="step2 is taken"):
        assert zckpt.open([near, FAR]).path == str(near / "step2")
    next(near.glob("step2/data-*/*/master.safetensors")).unlink()
    with pytest.warns(UserWarning, match="step1 is taken"):
        assert zckpt.open([near]).path == str(near / "step1")
    next(near.glob("step1/data-*/*/master.safetensors")).unlink()
    with pytest.raises(zckpt.MissingFileError, match=r"master\.safetensors"):
        zckpt.open([near, FAR])


def test_a_checkpoint_of_another_save_at_the_same_path_is_not_mixed_in(near: Path) -> None:
    written(near, 2, copied=(2,))
    shutil.rmtree(near)
    engine = ReferenceEngine(seed=3)
    engine.train(2)
    zckpt.write(engine, near / "step2")
    assert_goes_on(engine, [near, FAR])
    next(near.glob("step2/data-*/*/master.safetensors")).unlink()
    with pytest.warns(UserWarning, match="step2 is taken"):
        assert zckpt.open([near, FAR]).path == f"{FAR}/step2"


def test_a_place_that_cannot_be_reached_is_left_out_with_a_warning(near: Path, tmp_path: Path) -> None:
    engine = written(near, 1)
    shutil.copytree(near, tmp_path / "far")
    with (
        faulty(Fault(BROKEN, names=("entry",), path=str(tmp_path / "far"), lasting=True)),
        pytest.warns(UserWarning, match="step1 is taken.*Input/output error .*far"),
    ):
        assert_goes_on(engine, [near, tmp_path / "far"])


def test_a_place_that_cannot_be_reached_does_not_count_as_empty(near: Path, tmp_path: Path) -> None:
    written(near, 1)
    near.rename(tmp_path / "far")
    fault = Fault(BROKEN, names=("entry",), path=str(tmp_path / "far"))
    with faulty(fault), pytest.raises(zckpt.StorageError, match="Input/output error"):
        zckpt.restore(ReferenceEngine(), [near, tmp_path / "far"])


def test_errors_are_those_of_the_nearest_place(near: Path) -> None:
    with pytest.raises(zckpt.CheckpointNotFoundError, match=str(near)):
        zckpt.open([near, FAR])
    with pytest.raises(ValueError, match="there is no path"):
        zckpt.restore(ReferenceEngine(), [])
