"""What the adapter says of an engine's memory: nothing that the engine holds is forgotten."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.models import batch, make_engine, train
from tests.support.offload import CPU, NVME, PARAM_DISK, PIPELINED, WIDE
from zckpt.engines import adapt
from zckpt.state.inventory import GRADIENT, FileSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepspeed import DeepSpeedEngine

    from tests.support.cluster import Cluster

NOTICED_BYTES = 2048
"""Smaller storages, such as those of losses, norms and counters, are not looked for."""
SMALL_BUCKETS = {"reduce_bucket_size": 20000}
FP32_GRADIENTS = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
CASES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-unfused": {"stage": 0, "optimizer": "sgd"},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1, "model": "odd"},
    "1-bf16-optimizer": {"stage": 1, **FP32_GRADIENTS},
    "2": {"stage": 2, "model": "odd", "groups": True},
    "2-cpu": {"stage": 2, "offload_optimizer": CPU},
    "2-fp32-gradients": {"stage": 2, **FP32_GRADIENTS},
    "2-muon": {"stage": 2, "optimizer": "muon", "config": {"gradient_accumulation_steps": 2}},
    "2-factored": {"stage": 2, "optimizer": "factored"},
    "3": {"model": "odd", "stage3_param_persistence_threshold": 5000},
    "3-moved": {},
    "3-muon": {"optimizer": "muon", "reduce_scatter": False},
    "3-cpu+cpu": {"offload_optimizer": CPU, "offload_param": CPU},
    "3-nvme+disk": {**WIDE, "offload_optimizer": NVME, "offload_param": PARAM_DISK},
    "3-nvme-pipelined": {**WIDE, "offload_optimizer": PIPELINED},
    "3-without-optimizer": {"optimizer": "none"},
}
EVERY_TIME = {"1-bf16-optimizer", "2-cpu", "3", "3-nvme+disk"}


def storages() -> dict[int, tuple[int, Any]]:
    """Bytes and a tensor of each storage of the process, by its address."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    dense = [one for one in tensors if not one.is_meta and one.layout == torch.strided]
    return {one.untyped_storage().data_ptr(): (one.untyped_storage().nbytes(), one) for one in dense}


def swap_buffers(engine: DeepSpeedEngine) -> Iterator[torch.Tensor]:
    """The memory through which DeepSpeed swaps whatever it needs next."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from swapper.swap_buffer_manager.all_buffers
    for parameter in engine.module.parameters():
        if getattr(parameter, "nvme_swapper", None) is not None:
            yield from (parameter.nvme_swapper.buffers, parameter.nvme_swapper.partitioned_swap_buffer)


def look_for_forgotten_memory(setup: dict[str, Any], swap: str, moves: tuple[dict[str, Any], ...]) -> None:
    before = storages().keys()
    engine = make_engine(**setup, **SMALL_BUCKETS, swap=swap)

    def look(when: str) -> None:
        memory = list(adapt(engine).memory())
        known = {one.data.untyped_storage().data_ptr() for one in memory if isinstance(one.data, torch.Tensor)}
        known |= {one.untyped_storage().data_ptr() for one in swap_buffers(engine)}
        forgotten: list[str] = []
        for _ in range(50):  # A collective that is done keeps its buffers for a moment.
            forgotten = [
                f"{nbytes} bytes: {tensor.dtype} {list(tensor.shape)}"
                for place, (nbytes, tensor) in storages().items()
                if place not in before and place not in known and nbytes >= NOTICED_BYTES
            ]
            if not forgotten:
                break
            time.sleep(0.1)
        assert not forgotten, f"{when}: {forgotten}"
        files = {one.data.path for one in memory if isinstance(one.data, FileSpan) and one.part != GRADIENT}
        assert all(Path(path).stat().st_size for path in files)
        assert bool(files) == ("nvme" in str(setup))

    look("new")
    if setup.get("optimizer") == "none":
        return
    train(engine, 2)
    look("between two steps")
    for move in moves:
        engine.offload_states(**move)
        look(f"offload_states({move})")
        engine.reload_states()
        look(f"reload_states() after offload_states({move})")
    for step in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(**batch(engine, step)))
    look("between backward and step")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in EVERY_TIME else pytest.mark.matrix) for c in CASES])
def test_no_storage_is_forgotten(cluster: Cluster, tmp_path: Path, case: str) -> None:
    # DeepSpeed 0.19.8 moves no states of stage 3 where a parameter is frozen: it fails.
    moves = ({"pin_memory": False}, {"pin_memory": True}) if case in ("1", "2", "3-moved") else ()
    cluster.run(look_for_forgotten_memory, 2, CASES[case], str(tmp_path), moves)
