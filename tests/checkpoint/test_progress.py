"""A progress object gets a beginning, every byte once, and an end, even if the operation fails."""

from __future__ import annotations

import io
import logging
import re
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine, engines_are_adapters
from tests.support.progress import RecordedProgress
from tests.support.states import write_state
from zckpt.storage.local_store import LocalStore
from zckpt.storage.location import Location
from zckpt.system import linux

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


@pytest.mark.parametrize("verify", [True, False])
def test_progress_of_loads(tmp_path: Path, verify: bool) -> None:
    write_state(tmp_path / "c", 2, {"a": (3000, 1009), "b": (5,), "none": (0,)})
    checkpoint = zckpt.open(tmp_path / "c")
    first, second, third = RecordedProgress(), RecordedProgress(), RecordedProgress()
    checkpoint.load("master/*", progress=first, verify=verify)
    assert first.assert_complete("load") == 4 * (3000 * 1009 + 5)
    for _ in checkpoint.iter(progress=second, verify=verify):
        pass
    assert second.assert_complete("load") == 3 * 4 * (3000 * 1009 + 5)
    checkpoint.state_dict(dtype=torch.bfloat16, progress=third, verify=verify)
    assert third.assert_complete("load") == 4 * (3000 * 1009 + 5)


def test_progress_of_validation(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, {"a": (3000, 1009), "b": (5,)})
    progress = RecordedProgress()
    zckpt.validate(tmp_path / "c", progress=progress)
    assert progress.assert_complete("validate") == zckpt.open(tmp_path / "c").nbytes


def write_and_restore(path: str, stage: int) -> list[int]:
    engine = make_engine(stage=stage, model="odd")
    train(engine, 1)
    progresses = [RecordedProgress() for _ in range(3)]
    zckpt.write(engine, f"{path}/one", progress=progresses[0])
    zckpt.write(engine, f"{path}/two", progress=progresses[1], background=True).wait()
    zckpt.restore(engine, path, progress=progresses[2])
    return [
        progress.assert_complete(action)
        for progress, action in zip(progresses, ("write", "write", "restore"), strict=True)
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_progress_of_writes_and_restores(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    totals = cluster.run(write_and_restore, 2, str(tmp_path), stage)
    checkpoint = zckpt.open(tmp_path)
    stored = sum(piece.nbytes for info in checkpoint.values() for piece in info.pieces)
    written = sum(total[0] for total in totals)
    assert stored < written < stored + 50_000  # the trees of state are written too
    assert [total[0] for total in totals] == [total[1] for total in totals]
    assert sum(total[2] for total in totals) >= stored - sum(
        checkpoint[key].nbytes for key in checkpoint if "buffer" in key
    )


def test_a_failure_ends_the_progress(tmp_path: Path) -> None:
    progress = RecordedProgress()
    with (
        engines_are_adapters(),
        mock.patch("os.pwritev", side_effect=OSError(5, "Input/output error")),
        pytest.raises(zckpt.StorageError),
    ):
        zckpt.write(Engine(), tmp_path / "c", progress=progress)
    (action, _), last = progress.calls
    assert (action, last) == ("write", ("end", 0))


@pytest.mark.parametrize(("terminal", "rank", "shown"), [(True, "0", True), (False, "0", False), (True, "1", False)])
def test_the_bar_is_shown_only_on_rank_0_and_on_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, rank: str, shown: bool
) -> None:
    write_state(tmp_path / "c", 1, {"a": (3000, 1009)}, parts=("master",))
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("RANK", rank)
    zckpt.open(tmp_path / "c").load(progress=zckpt.ProgressBar())
    assert ("zckpt load: 100%" in stderr.getvalue()) == shown


def logged_lines(path: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("zckpt").addHandler(handler)
    logging.getLogger("zckpt").setLevel(logging.INFO)
    engine = make_engine(stage=1)
    zckpt.write(engine, f"{path}/one")
    zckpt.write(engine, f"{path}/two", background=True).wait()
    zckpt.restore(engine, path)
    return lines


def test_each_write_and_restore_is_a_line_of_the_log(cluster: Cluster, tmp_path: Path) -> None:
    for lines in cluster.run(logged_lines, 2, str(tmp_path)):
        verbs = [("wrote", "one"), ("wrote", "two"), ("restored", "two")]
        assert len(lines) == len(verbs)
        for line, (verb, name) in zip(lines, verbs, strict=True):
            path = re.escape(str(tmp_path / name))
            assert re.fullmatch(rf"INFO {verb} {path}: \d\.\d{{3}} GiB on this rank in [\d.]+ s, [\d.]+ GiB/s", line)


def test_the_log_says_why_the_slower_way_was_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zckpt")
    (tmp_path / "old").write_bytes(b"data")
    store = LocalStore(Location.of(tmp_path))
    with mock.patch.object(linux, "share_blocks", return_value=False):
        assert store.share("new", Location.of(tmp_path / "old"))
        assert not store.share("new", Location.of(tmp_path / "old"))  # the file exists already
    old, new = tmp_path / "old", tmp_path / "new"
    assert caplog.messages[0] == f"{new}: a hard link, since the file system shares no blocks with {old}"
    assert caplog.messages[-1].startswith(f"{new}: written, not shared with {old}: ")
