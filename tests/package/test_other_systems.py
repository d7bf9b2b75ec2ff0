"""Checkpoints are read on systems without the calls that only Linux has. ``elsewhere.py`` simulates such systems."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = [
    "tests/storage/test_symbolic_links.py", "tests/checkpoint/reading/test_load.py::test_load_gives_what_was_written",
    "tests/storage/test_store.py", "tests/transfer/test_fresh_memory.py",
    "tests/tools/test_gc.py::test_leftovers_go_and_nothing_else", "tests/tools/test_repair.py::test_a_manifest",
    # Slow, because each rename waits until a reader has closed the file, or because processes wait for each other.
    "-knot commit_shows and not first_instant and not many_claims and not touched_while and not comes_first",
]  # fmt: skip
OTHERWISE = "--deselect=tests/checkpoint/reading/test_load.py::test_it_all_works_without_deepspeed"
"""This test starts a process of its own, in which nothing is simulated."""


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize(
    ("tests", "count_min"),
    [(CORE, 90), pytest.param(["@tests/elsewhere.txt"], 500, marks=pytest.mark.matrix)],
    ids=["core", "all"],
)
def test_checkpoints_are_read_without_linux(tmp_path: Path, system: str, tests: list[str], count_min: int) -> None:
    options = ["-qpno:cacheprovider", "-ptests.support.elsewhere", f"--basetemp={tmp_path}/t", OTHERWISE]
    environment = os.environ | {"ZCKPT_TEST_SYSTEM": system}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= count_min, "too few tests ran"


@pytest.mark.parametrize("listed", sorted(ROOT.glob("tests/*.txt")), ids=lambda path: path.name)
def test_the_lists_name_tests_that_exist(listed: Path) -> None:
    for line in listed.read_text().splitlines():
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()
