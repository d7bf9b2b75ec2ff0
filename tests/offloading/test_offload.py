"""Tests of zckpt.offload and zckpt.reload on one rank, without a framework."""

from __future__ import annotations

import os
import resource
import signal
import threading
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.memory import memory, peak_growth
from tests.support.offloaded_engine import ALL, assert_as_before, damage, trained
from tests.support.reference_engine import tensors_of
from zckpt.offloading import away as away_module
from zckpt.offloading import files, scratch
from zckpt.offloading.away import away_of
from zckpt.ranks.collectives import Ranks
from zckpt.testing import ReferenceEngine
from zckpt.transfer import write as write_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.offload]


@pytest.mark.parametrize("parts", [None, ["master"], ["exp_avg", "param"], "optim_states", ["hp_params", "lp_params"]])
def test_all_tensors_and_views_are_as_before(tmp_path: Path, parts: Any) -> None:
    engine = trained()
    before, views = tensors_of(engine), [tensors["wide"][5:9] for tensors in list(engine.tensors.values())[:4]]
    values = [view.clone() for view in views]
    out = zckpt.offload(engine, tmp_path, parts=parts)
    assert out.nbytes == sum(tensor.nbytes for part in out.parts for tensor in engine.tensors[part].values())
    assert os.listdir(tmp_path) == []
    zckpt.reload(engine)
    assert all(map(torch.equal, views, values))
    assert_as_before(engine, before)


def test_an_offload_frees_the_memory(tmp_path: Path) -> None:
    engine = ReferenceEngine({"wide": (4000, 4000)})
    zckpt.offload(engine, tmp_path)
    zckpt.reload(engine)
    full = memory("VmRSS")
    out = zckpt.offload(engine, tmp_path)
    assert full - memory("VmRSS") > 0.9 * out.nbytes, "the smallest part has more than a tenth"
    zckpt.reload(engine)


def test_a_call_that_needs_offloaded_states_is_refused_with_a_hint(tmp_path: Path) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path, parts=["exp_avg"])
    engine.backward()  # backward needs no moments
    with pytest.raises(zckpt.OffloadedError, match=r"step uses exp_avg.*\n.*zckpt\.reload\(engine\)"):
        engine.step()
    zckpt.offload(engine, tmp_path, parts=["param", "exp_avg"])
    for call in (engine.backward, engine.step):
        with pytest.raises(zckpt.OffloadedError, match=f"{call.__name__} uses param"):
            call()
    zckpt.reload(engine, ["param"])
    engine.backward()
    zckpt.reload(engine)
    engine.gradients = {}
    before |= {key: value for key, value in tensors_of(engine).items() if key.startswith("buffer/")}
    assert_as_before(engine, before)


def test_with_auto_a_call_brings_back_what_it_needs(tmp_path: Path) -> None:
    engine, plain = trained(), trained()
    zckpt.offload(engine, tmp_path, auto=True)
    engine.backward()
    out = away_of(engine)
    assert out is not None
    assert out.parts == {"master", "exp_avg", "exp_avg_sq"}
    engine.step()
    plain.train(1)
    assert_as_before(engine, tensors_of(plain))


def test_a_call_that_brings_states_back_is_named_to_ranks_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Named(Ranks):
        def __init__(self, *arguments: Any, call: str, **options: Any) -> None:
            calls.append(call)
            super().__init__(*arguments, call=call, **options)

    engine = trained()
    zckpt.offload(engine, tmp_path, auto=True)
    monkeypatch.setattr("zckpt.offloading.offload.Ranks", Named)
    engine.backward()
    assert calls == ["backward (with auto=True of zckpt.offload)"]


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("again", [None, ["master"], []])
def test_an_offload_that_moves_nothing_decides_auto_too(tmp_path: Path, auto: bool, again: list[str] | None) -> None:
    engine = trained()
    zckpt.offload(engine, tmp_path, auto=not auto)
    assert zckpt.offload(engine, tmp_path, parts=again, auto=auto).parts == ()
    if not auto:
        with pytest.raises(zckpt.OffloadedError, match="step uses"):
            engine.step()
        zckpt.reload(engine)
    engine.train(1)
    assert away_of(engine) is None


def test_calls_without_anything_to_move(tmp_path: Path) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.reload(engine)
    assert zckpt.offload(engine, tmp_path, parts=["gradient"]).parts == ()
    assert zckpt.offload(engine, tmp_path, parts=["lp_grads", "contiguous_grad_buffer"]).nbytes == 0
    first = zckpt.offload(engine, tmp_path, parts=["master"])
    assert zckpt.offload(engine, tmp_path, parts=["master"]).parts == ()
    assert zckpt.offload(engine, tmp_path).parts == ("param", "exp_avg", "exp_avg_sq")
    zckpt.reload(engine, ["gradient"])
    zckpt.reload(engine, first.parts)
    zckpt.reload(engine, first.parts)
    zckpt.reload(engine)
    assert_as_before(engine, before)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    engine = trained()
    for call in (lambda: zckpt.offload(engine, tmp_path, parts=["exp_arg"]), lambda: zckpt.reload(engine, "exp_arg")):
        with pytest.raises(ValueError, match=r"exp_arg .*: param, gradient, master, exp"):
            call()
    with pytest.raises(ValueError, match="no part buffer"):
        zckpt.offload(engine, tmp_path, parts=["buffer"])


def test_parts_may_be_members_of_an_enum(tmp_path: Path) -> None:
    """DeepSpeed's ``engine.offload_states`` takes members of such an enum."""

    class Name(Enum):
        MASTER = "hp_params"
        MOMENTS = "optim_states"

    engine = trained()
    parts: list[Any] = [*Name]
    assert zckpt.offload(engine, tmp_path, parts=parts).parts == ("master", "exp_avg", "exp_avg_sq")
    zckpt.reload(engine, parts[:1])
    out = away_of(engine)
    assert out is not None
    assert out.parts == {"exp_avg", "exp_avg_sq"}


def test_parts_may_be_a_generator(tmp_path: Path) -> None:
    engine = trained()
    parts: Any = (part for part in ("master", "param"))
    assert zckpt.offload(engine, tmp_path, parts=parts).parts == ("param", "master")
    back: Any = (part for part in ("master",))
    zckpt.reload(engine, back)
    out = away_of(engine)
    assert out is not None
    assert out.parts == {"param"}


def test_another_system_than_linux_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    with pytest.raises(zckpt.UnsupportedError, match=r"zckpt\.offload needs Linux"):
        zckpt.offload(trained(), tmp_path)


def test_where_shows_offloaded_states(tmp_path: Path) -> None:
    engine = trained()
    before = zckpt.where(engine)
    with zckpt.offloaded(engine, tmp_path, parts=["master", "param"]) as out:
        entries = [entry for entry in zckpt.where(engine).entries if entry.tier == "offloaded"]
        assert {entry.part: entry.path for entry in entries} == dict.fromkeys(out.parts, str(tmp_path))
        assert sum(entry.nbytes for entry in entries) == out.nbytes
    assert zckpt.where(engine).entries == before.entries


def test_an_offload_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = trained(), trained()
    going_on = threading.Event()
    stock = scratch.ScratchStore.create

    def create(self: Any, *args: Any, **options: Any) -> Any:
        going_on.wait()
        return stock(self, *args, **options)

    monkeypatch.setattr(scratch.ScratchStore, "create", create)
    out = zckpt.offload(engine, tmp_path, background=True, auto=True)
    assert out.parts == ALL
    with pytest.raises(TimeoutError, match=r"still under way"):
        out.wait(0)
    assert repr(out).endswith(" bytes, under way>")
    threading.Timer(0.2, going_on.set).start()
    engine.train(1)  # waits for the offload, and brings the state back
    plain.train(1)
    out.wait()
    assert repr(out).endswith(" bytes, done>")
    assert_as_before(engine, tensors_of(plain))


@pytest.mark.parametrize("part", ["param", pytest.param("exp_avg", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("how", ["in place", "behind torch's back", "there and back"])
@pytest.mark.parametrize("when", ["while it is read", "once it is on the disk"])
def test_what_other_code_changes_during_an_offload_in_the_background_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, how: str, when: str
) -> None:
    engine, expected = trained(), trained()
    run_writes, take = write_module.run_writes, write_module._take
    changes: list[int] = []
    changing = threading.Lock()  # Two threads that negate one tensor at the same time negate some elements once.

    def change(tensor: torch.Tensor) -> None:
        changes.append(1)
        if how == "there and back":
            tensor.neg_()
        elif how == "in place":
            with torch.no_grad():
                tensor[0] = 7
        else:
            tensor.data.view(torch.uint8).numpy()[:100] = 7

    def take_and_change(*arguments: Any) -> Any:
        taken = take(*arguments)
        with changing:
            if when == "while it is read" and len(changes) < 2:
                change(engine.tensors[part]["wide"])
        return taken

    def write_and_change(*arguments: Any, **options: Any) -> Any:
        table = run_writes(*arguments, **options)
        if when == "once it is on the disk":
            change(engine.tensors[part]["wide"])
        return table

    monkeypatch.setattr(write_module, "_take", take_and_change)
    monkeypatch.setattr(files, "run_writes", write_and_change)
    out = zckpt.offload(engine, tmp_path, background=True)
    nbytes = out.nbytes
    out.wait()
    for _ in range(len(changes)):
        change(expected.tensors[part]["wide"])
    engine_away = away_of(engine)
    assert engine_away is not None
    moved = {moved_part for moved in engine_away.moved for moved_part in moved.parts}
    still_there = sum(tensor.nbytes for tensor in engine.tensors[part].values())
    if part not in moved:
        assert f"{part} has been changed while zckpt.offload wrote it to disk, and stays in memory" in caplog.text
        assert out.nbytes == nbytes - still_there
    else:  # The change was undone, or it came before the bytes were read.
        assert when == "while it is read"
        assert out.nbytes == nbytes
    with pytest.raises(zckpt.OffloadedError):  # On another rank, it may be on the disk.
        engine.train(1)
    zckpt.reload(engine)
    assert_as_before(engine, tensors_of(expected))


def test_nothing_can_change_while_it_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    before, compare = tensors_of(engine), write_module.unchanged_files

    def change_and_compare(*arguments: Any) -> Any:
        for tensor in (engine.tensors["param"]["wide"], engine.tensors["param"]["wide"].data):
            with pytest.raises(RuntimeError, match="data pointer"):
                tensor[0] = 7
        return compare(*arguments)

    monkeypatch.setattr(files, "unchanged_files", change_and_compare)
    out = zckpt.offload(engine, tmp_path, background=True)
    out.wait()
    zckpt.reload(engine)
    assert_as_before(engine, before)


def test_a_comparison_that_fails_leaves_the_engine_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = trained()
    before = tensors_of(engine)

    def fail(*_: Any) -> None:
        raise zckpt.DeviceError("the device is gone")

    monkeypatch.setattr(files, "unchanged_files", fail)
    with pytest.raises(zckpt.DeviceError, match="the device is gone"):
        zckpt.offload(engine, tmp_path, background=True).wait()
    assert "the device is gone" in capfd.readouterr().err
    zckpt.wait()
    assert_as_before(engine, before)


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Returns a function that limits the size of every file to so many bytes. A write beyond this fails because the
    file is too large."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("directory", "error", "says"),
    [("", ValueError, "the path is empty"), ("s3://bucket/scratch", zckpt.UnsupportedError, "without a scheme")],
    ids=["empty", "scheme"],
)
def test_an_empty_path_and_a_url_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, error: type[Exception], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = trained()
    before = tensors_of(engine)
    with pytest.raises(error, match=says):
        zckpt.offload(engine, directory)
    assert not os.listdir(tmp_path)
    assert_as_before(engine, before)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_engine_as_it_was(
    tmp_path: Path, full_disk: Callable[[int], None], background: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = trained()
    before = tensors_of(engine)
    with zckpt.offloaded(engine, tmp_path) as out:
        pass
    full_disk(1 << 20)
    with pytest.raises(zckpt.NoSpaceError, match=rf"{out.nbytes:,} bytes .*[0-9,]+ are free"):
        zckpt.offload(engine, tmp_path, background=background).wait()
    full_disk(resource.RLIM_INFINITY)
    assert "the offload to" in capfd.readouterr().err or not background
    zckpt.wait()
    assert_as_before(engine, before)
    with zckpt.offloaded(engine, tmp_path):
        pass


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_offload_leaves_earlier_offloads_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path, parts=["param"])

    def fail(*_: Any) -> None:
        raise zckpt.StorageError("cannot write: broken", file="x")

    with monkeypatch.context() as patched:
        patched.setattr(scratch._ScratchWriter, "write", fail)
        with pytest.raises(zckpt.StorageError, match=f"broken.*{tmp_path}"):
            zckpt.offload(engine, tmp_path, background=background).wait()
    engine_away = away_of(engine)
    assert engine_away is not None
    assert engine_away.parts == {"param"}
    zckpt.reload(engine)
    assert_as_before(engine, before)


@pytest.mark.parametrize("background", [False, True])
def test_an_offload_that_cannot_begin_leaves_no_thread_and_no_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    engine = trained()
    before = tensors_of(engine)

    def fail(self: Any, engine: Any, uses: Any) -> None:
        engine._zckpt_away = self
        self._undo, self.parts, self.lost, self._engine = lambda: None, frozenset(), {}, engine
        raise RuntimeError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(away_module.MovedStorages, "__init__", fail)
        with pytest.raises(RuntimeError, match="no more"):
            zckpt.offload(engine, tmp_path, background=background)
    assert_as_before(engine, before)


def test_the_context_brings_the_state_back_after_an_error(tmp_path: Path) -> None:
    engine = trained()
    before = tensors_of(engine)

    def use() -> None:
        with zckpt.offloaded(engine, tmp_path, parts=["master"]) as out:
            assert out.parts == ("master",)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        use()
    assert_as_before(engine, before)


def test_an_error_in_the_context_is_not_replaced_by_one_of_the_offload(
    tmp_path: Path, full_disk: Callable[[int], None]
) -> None:
    engine = trained()
    before = tensors_of(engine)
    full_disk(1 << 20)

    def use() -> None:
        with zckpt.offloaded(engine, tmp_path, background=True):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        use()
    assert "cannot allocate" in caught.value.__notes__[0]
    full_disk(resource.RLIM_INFINITY)
    zckpt.wait()
    assert_as_before(engine, before)


def test_damage_is_named_and_the_engine_waits_for_a_restore(tmp_path: Path) -> None:
    engine = trained()
    zckpt.write(engine, tmp_path / "ck")
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)
    damage(engine, "exp_avg", "wide", 4 * 500_000)
    with pytest.raises(zckpt.DigestError, match=r"(?s)bytes \[.*key exp_avg/wide\).*zckpt\.restore"):
        zckpt.reload(engine)
    still_away = away_of(engine)
    assert still_away is not None
    assert still_away.parts == {"exp_avg"}
    for call in (engine.step, engine.backward, lambda: zckpt.write(engine, tmp_path / "other")):
        with pytest.raises(zckpt.OffloadedError, match="exp_avg/wide"):
            call()
    with pytest.raises(zckpt.OffloadedError, match="exp_avg/wide"):
        zckpt.offload(engine, tmp_path, parts=["param"])
    with pytest.raises(zckpt.MismatchError, match="exp_avg/wide: lost"):
        zckpt.restore(engine, tmp_path / "ck", parts=["master"])
    with pytest.raises(zckpt.OffloadedError, match="exp_avg/wide"):
        engine.step()
    zckpt.restore(engine, tmp_path / "ck")
    assert_as_before(engine, before)


def test_reload_takes_no_more_memory_than_what_comes_back(tmp_path: Path) -> None:
    engine = ReferenceEngine({"wide": (4000, 4000)})
    with zckpt.offloaded(engine, tmp_path):  # the first offload makes its buffers, and keeps them
        pass
    out = zckpt.offload(engine, tmp_path)
    assert peak_growth(lambda: zckpt.reload(engine)) < 1.5 * out.nbytes
    zckpt.offload(engine, tmp_path)
    damage(engine, "exp_avg_sq", "wide", 4 * 16_000_000 - 1)  # reload reads this byte last
    errors: list[zckpt.DigestError] = []

    def failing_reload() -> None:
        with pytest.raises(zckpt.DigestError) as raised:
            zckpt.reload(engine)
        errors.append(raised.value)

    assert peak_growth(failing_reload) < 1.5 * out.nbytes


def test_a_reload_works_once_the_damage_is_gone(tmp_path: Path) -> None:
    engine = trained()
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)
    damage(engine, "master", "odd")
    with pytest.raises(zckpt.DigestError, match="key master/odd"):
        zckpt.reload(engine, ["master", "param"])
    damage(engine, "master", "odd")
    zckpt.reload(engine)
    assert_as_before(engine, before)


def test_without_verification_damage_is_not_noticed(tmp_path: Path) -> None:
    engine = trained()
    zckpt.offload(engine, tmp_path)
    damage(engine, "master", "odd")
    zckpt.reload(engine, verify=False)
    assert away_of(engine) is None


@pytest.mark.parametrize("how", ["closed", "another file", "cut off"])
def test_a_lost_file_is_named(tmp_path: Path, how: str) -> None:
    engine = trained()
    zckpt.write(engine, tmp_path / "ck")
    before = tensors_of(engine)
    zckpt.offload(engine, tmp_path)
    out = away_of(engine)
    assert out is not None
    saved = next(storage.saved for storage in out.moved if storage.parts == ("exp_avg_sq",))
    assert saved is not None
    fd = int(saved.file.path.rpartition("/")[2])
    other = os.open(tmp_path / "ck" / "manifest.msgpack", os.O_RDONLY)
    if how == "cut off":
        os.truncate(saved.file.path, 5000)
    else:
        os.close(fd)
        if how == "another file":
            os.dup2(other, fd)
    error = zckpt.SizeError if how == "cut off" else zckpt.MissingFileError
    with pytest.raises(error, match=f"{tmp_path}.*key exp_avg_sq/"):
        zckpt.reload(engine)
    assert out.parts == {"exp_avg_sq"}
    zckpt.restore(engine, tmp_path / "ck")
    assert_as_before(engine, before)
    os.close(other)
    if how == "another file":
        os.close(fd)


def test_a_lost_state_is_named_by_its_own_key(tmp_path: Path) -> None:
    engine = ReferenceEngine({"one": (1,), "wide": (1024, 1025)}, seed=0)
    engine.train(2)
    zckpt.offload(engine, tmp_path, parts=["exp_avg_sq"])
    out = away_of(engine)
    assert out is not None
    assert [storage.name for storage in out.moved] == ["one", "wide"]
    assert out.moved[0].saved is not None
    os.close(int(out.moved[0].saved.file.path.rpartition("/")[2]))
    with pytest.raises(zckpt.MissingFileError) as caught:
        zckpt.reload(engine)
    assert caught.value.key == "exp_avg_sq/one"


def test_a_write_reads_offloaded_states_from_the_scratch_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = trained(), trained()
    zckpt.write(plain, tmp_path / "plain" / "c")
    zckpt.offload(engine, tmp_path, parts=["master", "exp_avg", "param"])
    monkeypatch.setattr(away_module, "read_back", None)
    for name, options in (
        ("fore", {}),
        ("back", {"background": True}),
        ("lazy", {"background": True, "snapshot": "lazy"}),
    ):
        zckpt.write(engine, tmp_path / name, **options)
    zckpt.wait()
    monkeypatch.undo()
    expected = zckpt.open(tmp_path / "plain" / "c").load()
    for name in ("fore", "back", "lazy"):
        tensors = zckpt.open(tmp_path / name).load()
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
        assert zckpt.validate(tmp_path / name).ok
    zckpt.reload(engine)
    engine.train(1)  # the lazy write has watched for this step
    plain.train(1)
    assert_as_before(engine, tensors_of(plain))


def test_a_restore_first_brings_the_state_back(tmp_path: Path) -> None:
    engine, other = trained(3, seed=1), trained()
    zckpt.write(other, tmp_path / "ck")
    zckpt.offload(engine, tmp_path)
    zckpt.restore(engine, tmp_path / "ck", rng=True)
    assert_as_before(engine, tensors_of(other))
