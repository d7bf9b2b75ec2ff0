"""The core writes, restores and reads without the folders that only use it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import zckpt

BESIDE_THE_CORE = (
    "adapters", "object_stores", "tools", "frameworks", "offloading", "cli", "testing", "dcp.py", "torchtitan.py",
    "__main__.py",
)  # fmt: skip
ENGINE = ("__init__.py", "engine.py", "adapter.py")
"""The modules of ``zckpt.testing`` that stay: an engine of a few tensors, which has its own adapter."""
SCRIPT = """
import sys
from pathlib import Path
import torch
import zckpt
from zckpt.testing import ReferenceEngine

assert Path(zckpt.__file__).is_relative_to(sys.argv[1])
run = Path(sys.argv[1]) / "run"
engine = ReferenceEngine()
for step in range(1, 4):
    engine.train(steps=1)
    zckpt.write(engine, run / f"step{step}", keep_last=2, background=step == 2)
    zckpt.wait()
assert not (run / "step1").exists()
weights = zckpt.open(run / "step3").load("master/*")
other = ReferenceEngine(seed=1)
zckpt.restore(other, run / "step3")
zckpt.write(other, run / "again", reuse=None)
restored = zckpt.open(run / "again").load("master/*")
assert weights and all(torch.equal(weights[key], restored[key]) for key in weights)
weight = torch.randn(5, 3)
zckpt.write_state_dict({"a": weight}, run / "other")
target = {"a": torch.zeros(5, 3)}
zckpt.open(run / "other").load_into(target)
assert torch.equal(target["a"], weight)
"""


def test_the_core_works_without_what_stands_beside_it(tmp_path: Path) -> None:
    package = Path(zckpt.__file__).parent
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "zckpt", ignore=left_out)
    for name in BESIDE_THE_CORE:
        path = tmp_path / "zckpt" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "zckpt" / "testing").mkdir()
    for name in ENGINE:
        shutil.copy(package / "testing" / name, tmp_path / "zckpt" / "testing")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, env=environment, cwd=tmp_path)
