"""The tests of reading where there are none of Linux's own calls; that is simulated, see ``elsewhere.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = [f"tests/test_{name}.py" for name in ("links", "load", "runs", "store")]
OTHERWISE = "--deselect=tests/test_load.py::test_it_all_works_without_deepspeed"
"""It starts a process of its own, in which nothing is simulated."""


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("tests", [CORE, pytest.param(["@tests/elsewhere.txt"], marks=pytest.mark.matrix)], ids=len)
def test_checkpoints_are_read_without_linux(tmp_path: Path, system: str, tests: list[str]) -> None:
    options = ["-qpno:cacheprovider", "-ptests.elsewhere", f"--basetemp={tmp_path}/t", OTHERWISE]
    environment = os.environ | {"ZCKPT_TEST_SYSTEM": system}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > 150, "tests that do not run find nothing"
