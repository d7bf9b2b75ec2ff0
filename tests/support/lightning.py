"""Lets Lightning run on the CPU, because its DeepSpeedStrategy refuses every accelerator but CUDA."""

from __future__ import annotations

import torch


def let_lightning_use_cpus() -> None:
    """Leaves out the check that the accelerator is CUDA, and numbers the devices as CUDA does."""
    from lightning.pytorch import strategies

    class OnCpus(strategies.DeepSpeedStrategy):
        def setup_environment(self) -> None:
            self.parallel_devices = [torch.device("cpu", number) for number in range(2)]
            strategies.DDPStrategy.setup_environment(self)

    strategies.DeepSpeedStrategy = OnCpus  # type: ignore[misc]
