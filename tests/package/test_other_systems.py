"""What works on every system, tested without Linux's own calls; ``elsewhere.py`` simulates that they are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = [
    "tests/storage/test_symbolic_links.py", "tests/reading/test_load.py::test_load_gives_what_was_written",
    "tests/storage/test_store.py",
    "tests/api/test_gc.py::test_leftovers_go_and_nothing_else", "tests/api/test_repair.py::test_a_manifest",
    "-knot commit_shows and not first_instant",  # slow there: each rename waits for a reader to close the file
]  # fmt: skip
OTHERWISE = "--deselect=tests/reading/test_load.py::test_it_all_works_without_deepspeed"
"""It starts a process of its own, in which nothing is simulated."""


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize(
    ("tests", "count_min"),
    [(CORE, 90), pytest.param(["@tests/elsewhere.txt"], 500, marks=pytest.mark.matrix)],
    ids=["core", "all"],
)
def test_checkpoints_are_read_without_linux(tmp_path: Path, system: str, tests: list[str], count_min: int) -> None:
    options = ["-qpno:cacheprovider", "-ptests.support.elsewhere", f"--basetemp={tmp_path}/t", OTHERWISE]
    environment = os.environ | {"ZCKPT_TEST_SYSTEM": system}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) >= count_min, "tests that do not run find nothing"
