"""The next export removes what a killed export has left, and nothing of an export that is under way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.forks import stopped_at
from tests.support.states import write_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def export_folder(checkpoint: Path, out: Path) -> object:
    return zckpt.export(checkpoint, out)


def export_torch_file(checkpoint: Path, out: Path) -> object:
    return zckpt.export(checkpoint, out, format="pt")


@pytest.mark.linux
@pytest.mark.parametrize("write", [export_folder, export_torch_file])
def test_what_a_killed_export_has_left_is_removed(tmp_path: Path, write: Callable[[Path, Path], object]) -> None:
    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    write_state(checkpoint, 2, {"w": (40, 50)}, parts=("master", "exp_avg", "exp_avg_sq"))
    run.mkdir()

    def temporaries() -> list[str]:
        return [name for name in os.listdir(run) if name.endswith(".tmp")]

    def stop_before_the_end(wait: Callable[[], None]) -> None:
        def hold(operation: Callable[[], object], file: str) -> object:
            wait()
            return operation()

        with faulty(Fault(hold, names=("sync_names",))):
            write(checkpoint, run / "a")

    with stopped_at(stop_before_the_end):
        (temporary,) = temporaries()
        assert temporary.startswith("a.")
        write(checkpoint, run / "b")
        zckpt.gc(run)
        assert temporaries() == [temporary], "its process is alive"
    assert temporaries() == [temporary], "its process was killed"
    stored = [file for file in (run / temporary, *(run / temporary).rglob("*")) if file.is_file()]
    (removed,) = zckpt.gc(run, dry_run=True).removed
    assert removed.nbytes == sum(file.stat().st_size for file in stored) > 0
    write(checkpoint, run / "c")
    assert temporaries() == []
