"""A fault of a store in a write or a read is a clear error, commits nothing, and loses no older checkpoint."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support import faults
from tests.support.faults import Fault, faulty, short
from tests.support.interrupts import threads_left
from tests.support.plain_engine import Engine, everything, is_whole
from tests.support.states import same_all, write_state
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.engines.history import History

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

pytestmark = pytest.mark.usefixtures("engines_are_adapters")

MIB = 1 << 20
SMALL = zckpt.Budget(nbytes=8 * MIB)
REFUSALS: dict[str, tuple[Callable[..., Any], type[zckpt.ZckptError]]] = {
    "no space": (faults.NO_SPACE, zckpt.NoSpaceError),
    "quota": (faults.NO_QUOTA, zckpt.NoSpaceError),
    "I/O error": (faults.BROKEN, zckpt.StorageError),
    "read-only": (faults.READ_ONLY, zckpt.StorageError),
    "forbidden": (faults.FORBIDDEN, zckpt.StorageError),
}


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    """Checks that no thread and no file descriptor is left over, without the help of the garbage collector."""
    gc.collect()  # so that objects of earlier tests are not counted
    before = descriptors_and_threads()
    gc.disable()
    yield
    gc.enable()
    assert threads_left() == []  # a thread whose work is done may take a moment to end
    after = descriptors_and_threads()
    # Fewer than before are allowed, because a thread of an earlier test may end meanwhile.
    assert all(count <= earlier for count, earlier in zip(after, before, strict=True)), (after, before)


def descriptors_and_threads() -> tuple[int, int]:
    """Returns the number of open file descriptors and the number of threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


CASES = [("I/O error", True, False), ("no space", False, True)]
MORE = [case for case in itertools.product(REFUSALS, (False, True), (False, True)) if case not in CASES]


@pytest.mark.parametrize(
    ("refusal", "overwrite", "background"), [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)]
)
def test_any_refused_operation_is_an_error_and_leaves_a_whole_checkpoint(
    in_memory: Path, refusal: str, overwrite: bool, background: bool
) -> None:
    """The first operation is refused, then the second, and so on, until a write succeeds."""
    act, kind = REFUSALS[refusal]
    old, new = Engine(step=5), Engine(seed=1, step=6)
    operations, number = None, 0
    while operations is None or number <= len(operations.done):
        run = in_memory / str(number)
        first = run / ("c" if overwrite else "old")
        zckpt.write(old, first)
        before = everything(run)
        error = None
        with faulty(Fault(act, at=number)) as operations:
            try:
                write(new, run / "c", overwrite, background)
            except zckpt.ZckptError as caught:
                error = caught
        committed = everything(run).get("c/manifest.msgpack") not in (None, before.get("c/manifest.msgpack"))
        if error is not None:
            name, file = operations.done[number]
            assert type(error) is kind, (name, error)
            assert error.file == file
            assert committed or everything(run) == before, (name, file)
        assert committed or error is not None
        assert is_whole(run / "c", new) if committed else is_whole(first, old)
        zckpt.write(new, run / "c", overwrite=True)
        assert is_whole(run / "c", new)
        assert len(list((run / "c").iterdir())) == 2
        number += 1
    assert error is None


def write(engine: Engine, path: Path, overwrite: bool, background: bool) -> None:
    if background:
        zckpt.write(engine, path, overwrite=overwrite, budget=SMALL, background=True).wait()
    else:
        zckpt.write(engine, path, overwrite=overwrite, budget=SMALL)


LEFT = ("c/data-0123456789abcdef/rank-00000/digests.bin", "c/manifest.msgpack.01234567.tmp", "latest.89abcdef.tmp")
KEPT = ("c/data-0123/x", "c/manifest.msgpack.tmp", "c/mine.01234567.tmp", "latest.tmp", "data-0123456789abcdef/x")


@pytest.mark.parametrize("manifest", ["whole", "damaged", "none"])
def test_files_of_dead_writers_are_removed_before_anything_is_written(tmp_path: Path, manifest: str) -> None:
    """They take space. If the old manifest is damaged, data directories are removed only after the commit, because it
    is not known which of them the manifest names.
    """
    zckpt.write(Engine(), tmp_path / "c")
    if manifest != "whole":
        (tmp_path / "c" / "manifest.msgpack").write_bytes(b"damaged")
    if manifest == "none":
        (tmp_path / "c" / "manifest.msgpack").unlink()
    for name in (*LEFT, *KEPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / LEFT[-1], (0, 0))  # as if its writer had died a while ago, because a run has no lock
    seen: list[str] = []

    def look(operation: Callable[[], Any], file: str) -> Any:
        seen.extend(name for name in LEFT if (tmp_path / name).exists())
        return operation()

    with faulty(Fault(look, names=("create",))):
        zckpt.write(Engine(seed=1, step=6), tmp_path / "c", overwrite=True)
    assert seen == ([LEFT[0]] if manifest == "damaged" else [])
    assert not any((tmp_path / name).exists() for name in LEFT)
    assert all((tmp_path / name).exists() for name in KEPT)
    assert len(list((tmp_path / "c").glob("data-*"))) == 2
    assert is_whole(tmp_path / "c", Engine(seed=1, step=6))


@pytest.mark.parametrize("act", ["remove", "replace"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_load_refuses_a_file_that_is_removed_or_replaced_before_it_is_opened(
    tmp_path: Path, act: str, at: int
) -> None:
    """A file that is open already is read to its end, so the load succeeds."""
    written = write_state(tmp_path / "c", 1)
    names = ("size", "read", "read_direct", "read_portions")
    for number, file in enumerate(("exp_avg.safetensors", "digests.bin", "index.bin")):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "c", copy)
        checkpoint = zckpt.open(copy)
        refused = pytest.raises(zckpt.FormatError, match=file)
        with faulty(Fault(getattr(faults, act), at, names, file)) as operations:
            checkpoint = zckpt.open(copy)
            with refused if at == 0 else nullcontext():
                assert same_all(checkpoint.load(), written.full)
        assert operations.matching > at or file in ("digests.bin", "index.bin"), "only these are read by one operation"
        loader_of(checkpoint).reader.close()


def test_a_data_file_that_is_removed_during_a_write_prevents_the_commit(tmp_path: Path) -> None:
    with faulty(Fault(faults.remove, 0, ("sync",), "master.safetensors")), pytest.raises(zckpt.FormatError) as caught:
        write_state(tmp_path / "c", 1)
    assert caught.value.rule == "F001"
    assert zckpt.MissingFileError is type(caught.value)
    assert "manifest.msgpack" not in os.listdir(tmp_path / "c")


@pytest.mark.parametrize("nbytes", [100, 4096, 70_001])
@pytest.mark.parametrize("direct", [False, True])
def test_the_operating_system_may_do_less_than_it_was_asked_for(tmp_path: Path, nbytes: int, direct: bool) -> None:
    engine = Engine(300_000)
    with short(nbytes):
        zckpt.write(engine, tmp_path / "c", budget=zckpt.Budget(direct=direct))
        checkpoint = zckpt.open(tmp_path / "c", budget=zckpt.Budget(direct=direct))
        assert same_all(checkpoint.load(), dict.fromkeys(("master/w", "exp_avg/w"), engine.weight))
        loader_of(checkpoint).reader.close()
    assert is_whole(tmp_path / "c", engine)


def test_a_write_in_the_background_that_has_ended_keeps_no_state(tmp_path: Path) -> None:
    engine = Engine()
    weight = weakref.ref(engine.weight)
    pending = zckpt.write(engine, tmp_path / "c", background=True)
    pending.wait()
    del engine
    assert weight() is None
    assert pending.done


def test_a_failed_load_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither files nor memory, although the garbage collector is off here."""
    monkeypatch.setattr(Engine, "_zckpt_history", History())  # No later test may reuse the damaged file.
    zckpt.write(Engine(300_000), tmp_path / "c")
    master = next(tmp_path.rglob("*master*"))
    with master.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    out = {"master/w": torch.empty(75_000)}
    weight = weakref.ref(out["master/w"])
    with pytest.raises(zckpt.DigestError):
        zckpt.open(tmp_path / "c").load(out=out)
    del out
    assert weight() is None
