"""The core writes, restores and reads without the folders that only use it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import zckpt

BESIDE_THE_CORE = (
    "object_stores", "tools", "frameworks", "offloading", "cli", "testing", "dcp.py", "torchtitan.py", "__main__.py",
)  # fmt: skip
SCRIPT = """
import sys
from pathlib import Path
import torch
import zckpt

assert Path(zckpt.__file__).is_relative_to(sys.argv[1])
run = Path(sys.argv[1]) / "run"
model = torch.nn.Linear(3, 5)
state = zckpt.TrainState(model, torch.optim.AdamW(model.parameters()))
for step in range(1, 4):
    model(torch.randn(2, 3)).sum().backward()
    state.optimizers[0].step()
    zckpt.write(state, run / f"step{step}", step=step, keep_last=2, background=step == 2)
    zckpt.wait()
assert not (run / "step1").exists()
weight = model.weight.detach().clone()
with torch.no_grad():
    model.weight.zero_()
zckpt.restore(state, run / "step3")
assert torch.equal(model.weight, weight)
assert torch.equal(zckpt.open(run / "step3").load("master/weight")["master/weight"], weight)
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
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, env=environment, cwd=tmp_path)
