"""Directories that take the place of others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from zckpt.system import linux
from zckpt.tools.exporting.place import put_in_place, take_back

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("exchanges", [pytest.param(True, marks=pytest.mark.linux), False])
def test_a_directory_is_put_in_the_place_of_another_one(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for directory in (new, old):
        directory.mkdir()
        (directory / directory.name).touch()
    missing: list[bool] = []
    rename = os.rename

    def watched(source: str, destination: str) -> None:
        rename(source, destination)
        missing.append(not old.exists())

    monkeypatch.setattr(os, "rename", watched)
    if not exchanges:
        monkeypatch.setattr(linux, "exchange", lambda first, second: False)
    for names in (["new", "old"], ["old", "new"]):
        put_in_place(str(new), str(old))
        assert [os.listdir(old), os.listdir(new)] == [[names[0]], [names[1]]]
    take_back(str(new), str(old))
    assert os.listdir(old) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert any(missing) != exchanges


def test_a_failed_exchange_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "exchange", lambda first, second: False)
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(str(tmp_path / "new"), str(tmp_path / "old"))
    assert os.listdir(tmp_path) == ["old"]
