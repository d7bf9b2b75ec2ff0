"""The corpus that fuzzing starts from, with the inputs that it has found, passes every target without atheris."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from unittest import mock

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.insert(0, str(FUZZ))

import targets  # noqa: E402
from zckpt.format import data_file, tree  # noqa: E402

CORPUS = sorted(path for path in (FUZZ / "corpus").rglob("*") if path.is_file())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_target_accepts_each_input_of_its_corpus(path: Path) -> None:
    targets.TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_a_corpus() -> None:
    assert {path.parent.name for path in CORPUS} == targets.TARGETS.keys() == targets.LENGTH_MAX.keys()


def test_random_changes_to_whole_checkpoints_pass_their_target() -> None:
    choice = random.Random(0)
    for _ in range(40):
        targets.checkpoint(choice.randbytes(choice.randrange(1, 24)))


def test_the_targets_find_defects() -> None:
    """The defects are a header that is read wrongly, a tree that only one reader accepts, and a rule that validation
    does not check.
    """
    wrong = data_file.HeaderEntry("v", "F32", (2,), 0, 8)
    with mock.patch.object(data_file, "_entry", return_value=wrong), pytest.raises(AssertionError):
        targets.header((FUZZ / "corpus" / "header" / "master").read_bytes())
    with mock.patch.object(tree, "TREE_DEPTH_MAX", 99), pytest.raises(ValueError, match="T002"):
        targets.tree(b"\x91" * 80 + b"\0")
    broken = FUZZ.parent / "tests" / "broken" / "S007-block"
    targets.check_checkpoint(broken)
    blind = mock.Mock(ok=True)
    with mock.patch("zckpt.validate", return_value=blind), pytest.raises(AssertionError, match="S007"):
        targets.check_checkpoint(broken)
