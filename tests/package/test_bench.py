"""The comparisons of ``bench/`` still run, on a tiny state, for which their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
NO_COMPARISONS = {
    "all", "command_line", "commands_at_scale", "common", "coverage", "dcp_layouts", "endings", "fsdp", "index_scale",
    "many_files", "peers", "played_ranks", "ranks_as_processes", "ranks_as_threads", "raw_io", "report",
    "report_page", "sampler", "thousand_ranks", "training",
}  # fmt: skip
ON_A_GPU = ["load_to_gpu", "write_from_gpu"]
NAMES = sorted({file.stem for file in BENCH.glob("*.py")} - NO_COMPARISONS - {*ON_A_GPU})


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_A_GPU)])
def test_a_comparison_runs(name: str, tmp_path: Path) -> None:
    scratch, results = tmp_path / "scratch", tmp_path / "results"
    options = ["--size", "8MiB", "--runs", "1", "--dir", str(scratch), "--results", str(results)]
    command = [sys.executable, str(BENCH / f"{name}.py"), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    if "no control group" in run.stdout:
        pytest.skip(run.stdout.strip())
    result = json.loads((results / f"{name}.json").read_text())
    assert result["size_bytes"] == 8 << 20
    assert result["rows"] or result["by_size"]
    assert all(target["what"] in run.stdout for target in result["targets"])
    assert not any(scratch.iterdir())


def test_make_bench_runs_all_comparisons() -> None:
    """The report is read and not imported, because it needs matplotlib."""
    order = (BENCH / "report.py").read_text().partition("ORDER = (")[2].partition(")")[0]
    assert sorted(part.strip('" \n') for part in order.split(",") if part.strip()) == NAMES
