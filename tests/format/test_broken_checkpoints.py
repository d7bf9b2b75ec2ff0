"""There is a broken checkpoint for every rule and bound. Reader, validator and independent reader find the broken
rule."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from tests.support.independent_reader import Reader
from zckpt.format.rules import RULES

if TYPE_CHECKING:
    from types import ModuleType

BROKEN = Path(__file__).parents[1] / "broken"
SPEC = Path(__file__).parents[2] / "spec" / "format.md"


def load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_broken", BROKEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make: Any = load_make()
CLAUSES = dict(re.findall(r"^\*\*([A-Z]\d{3})\*\* ((?:.+\n)+)", SPEC.read_text(), re.MULTILINE))
LOADED = {
    rule for rule, text in CLAUSES.items() if re.search(r"[Cc]hecked:\s[^.]*(open|load)|like\sT001|N001 is", text)
}


def read(path: Path) -> None:
    """Reads all tensors and all state trees of a checkpoint."""
    checkpoint = zckpt.open(path)
    checkpoint.load()
    assert checkpoint.state is not None
    for rank in range(checkpoint.world_size):
        checkpoint.rank_state(rank)


def read_independently(path: Path) -> None:
    reader = Reader(path)
    reader.tree()
    for rank in range(reader.world_size):
        reader.tree(rank)


def rule_of(name: str) -> str:
    return name.partition("-")[0]


def test_every_rule_has_a_clause_an_error_and_a_fixture() -> None:
    assert CLAUSES.keys() == RULES.keys() == {*map(rule_of, make.CASES)}
    assert all(issubclass(error, zckpt.FormatError) for error in RULES.values())
    assert RULES.keys() - LOADED == make.VALIDATED
    assert json.loads((SPEC.parent / "fixtures.json").read_text()) == make.listed()


def files(path: Path) -> dict[str, bytes | str]:
    return {
        str(file.relative_to(path)): os.readlink(file) if file.is_symlink() else file.read_bytes()
        for file in path.rglob("*")
        if file.is_symlink() or file.is_file()
    }


def test_the_fixtures_are_those_that_are_made(tmp_path: Path) -> None:
    committed = {name for name, case in (make.CASES | make.SOUND_CASES).items() if not case.large}
    assert {path.name for path in BROKEN.iterdir() if path.is_dir()} - {"sound", "__pycache__"} == committed
    for name in committed:
        make.make(name, tmp_path / name)
        assert files(tmp_path / name) == files(BROKEN / name), name


@pytest.mark.parametrize("name", ["sound", *make.SOUND_CASES])
def test_a_sound_checkpoint_is_read(name: str, place: Path) -> None:
    assert zckpt.validate(place).ok
    read(place)
    read_independently(place)


@pytest.fixture
def place(name: str, tmp_path: Path) -> Path:
    case = (make.CASES | make.SOUND_CASES).get(name)
    if case is None or not case.large:
        return BROKEN / name
    make.make(name, tmp_path / name)
    return tmp_path / name


SLOW = {"M005-names", "M005-aliases", "M005-containers", "T004-containers"}
NAMES = [pytest.param(name, marks=pytest.mark.matrix) if name in SLOW else name for name in make.CASES]


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_checkpoint_is_refused(name: str, place: Path) -> None:
    case, rule = make.CASES[name], rule_of(name)
    report = zckpt.validate(place)
    assert {finding.rule for finding in report.findings} == {rule}, str(report)
    if rule in LOADED and not case.loads:
        with pytest.raises(zckpt.ZckptError) as caught:
            read(place)
        assert (type(caught.value), caught.value.rule) == (RULES[rule], rule)
        assert len(str(caught.value)) < 4000
    else:
        read(place)
    # The independent reader compares whole entries, so it may find S007 instead of S004.
    with pytest.raises(ValueError, match="S004|S007" if rule == "S004" else rule):
        read_independently(place)
    shutil.rmtree(place) if case.large else None
