"""The examples with frameworks: killed at any point, they go on with the sample and the loss that come next."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.interrupted import EPOCH, Ends, assert_goes_on_as_if_never_stopped, interruptions, run_example

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

EXAMPLES = {
    "trainer_run.py": "transformers",
    "accelerate_run.py": "accelerate",
    "peft_run.py": "peft",
    "lightning_run.py": "lightning",
}
"""Each with the package that it shows."""
ALONE = "peft_run.py"
"""Calls zckpt itself. The others need `zckpt run`."""


def run_one(example: str, run: str, ends: Ends | None) -> None:
    if example == "lightning_run.py":
        let_lightning_use_cpus()
    run_example(example, run, ends, attach=example != ALONE)


def let_lightning_use_cpus() -> None:
    """Leaves out the check that the accelerator is CUDA's, and numbers the devices, as CUDA's are."""
    from lightning.pytorch import strategies

    class OnCpus(strategies.DeepSpeedStrategy):
        def setup_environment(self) -> None:
            self.parallel_devices = [torch.device("cpu", number) for number in range(2)]
            strategies.DDPStrategy.setup_environment(self)

    strategies.DeepSpeedStrategy = OnCpus


def assert_survives(cluster: Cluster, directory: Path, example: str, steps: tuple[int, ...], seed: int) -> None:
    """Ends a run behind each of the steps, and compares all that it has logged with a run that nobody ends."""
    if not find_spec(EXAMPLES[example]):
        pytest.skip(f"needs {EXAMPLES[example]}")
    through, run = directory / "through", directory / "run"
    cluster.run(run_one, 2, example, str(through), None, init=False)
    for ends in interruptions(steps, seed):
        # Lightning hangs where a single rank gets a SIGTERM: then the end of the timeout kills the run
        outcomes = cluster.outcomes(run_one, 2, example, str(run), ends, init=False, timeout=40, grace=2)
        assert outcomes[ends[0]].failed, "it was stopped"
    cluster.run(run_one, 2, example, str(run), None, init=False)
    assert_goes_on_as_if_never_stopped(run, through, len(steps))
    if example == ALONE:
        expected, found = (one / "adapter" / "adapter_model.safetensors" for one in (through, run))
        assert expected.read_bytes() == found.read_bytes(), "the adapters, bit for bit"


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_that_is_killed_goes_on(cluster: Cluster, tmp_path: Path, example: str) -> None:
    assert_survives(cluster, tmp_path, example, (8,), 0)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_that_is_killed_three_times_in_an_epoch_goes_on(
    cluster: Cluster, tmp_path: Path, example: str, seed: int
) -> None:
    assert_survives(cluster, tmp_path, example, (4, 8, EPOCH - 2), seed)
