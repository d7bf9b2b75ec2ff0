"""The examples with frameworks can be killed at any point. They go on with the next sample, and with the same loss as a
run that was not killed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.support.interrupted import EPOCH, Ends, assert_goes_on_as_if_never_stopped, interruptions, run_example
from tests.support.lightning import let_lightning_use_cpus

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

EXAMPLES = {
    "trainer_run.py": "transformers",
    "accelerate_run.py": "accelerate",
    "peft_run.py": "peft",
    "lightning_run.py": "lightning",
    "lightning_fsdp_run.py": "lightning",
}
"""The examples, each with the package that it shows."""
EVERY_COMMIT = ("trainer_run.py", "peft_run.py")
ALONE = "peft_run.py"
"""The example that calls zckpt itself. The others need `zckpt run`."""


def run_one(example: str, run: str, ends: Ends | None) -> None:
    if example == "lightning_run.py":
        let_lightning_use_cpus()
    options = ["--background"] if example == "trainer_run.py" else []
    run_example(example, run, ends, None if example == ALONE else options)


def assert_survives(cluster: Cluster, directory: Path, example: str, steps: tuple[int, ...], seed: int) -> None:
    """Kills a run after each of the steps, and compares what it has logged with the log of a run that nobody kills."""
    if not find_spec(EXAMPLES[example]):
        pytest.skip(f"needs {EXAMPLES[example]}")
    through, run = directory / "through", directory / "run"
    cluster.run(run_one, 2, example, str(through), None, init=False)
    for ends in interruptions(steps, seed):
        # Lightning hangs if only one rank gets a SIGTERM. The timeout then kills the run.
        outcomes = cluster.outcomes(run_one, 2, example, str(run), ends, init=False, timeout=40, grace=2)
        assert outcomes[ends[0]].failed, "it was stopped"
    cluster.run(run_one, 2, example, str(run), None, init=False)
    assert_goes_on_as_if_never_stopped(run, through, len(steps))
    if example == ALONE:
        expected, actual = (run_directory / "adapter" / "adapter_model.safetensors" for run_directory in (through, run))
        assert expected.read_bytes() == actual.read_bytes(), "the adapters, bit for bit"


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=() if name in EVERY_COMMIT else pytest.mark.matrix) for name in EXAMPLES]
)
def test_an_example_that_is_killed_goes_on(cluster: Cluster, tmp_path: Path, example: str) -> None:
    assert_survives(cluster, tmp_path, example, (8,), 0)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_that_is_killed_three_times_in_an_epoch_goes_on(
    cluster: Cluster, tmp_path: Path, example: str, seed: int
) -> None:
    assert_survives(cluster, tmp_path, example, (4, 8, EPOCH - 2), seed)
