"""Runs with adapters over a quantized base: a write, restores into other engines, and exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt

if TYPE_CHECKING:
    from pathlib import Path


def write_and_restore(directory: Path, kind: str, stage: int) -> None:
    from tests.support.qlora import logits, make_engine, train  # which needs bitsandbytes

    engine = make_engine(kind, stage)
    train(engine, 2)
    zckpt.write(engine, directory / "c")
    expected = logits(engine)
    for seed, trained in ((1, 0), (2, 1)):
        other = make_engine(kind, stage, seed)
        train(other, trained)
        assert not torch.equal(logits(other), expected)
        zckpt.restore(other, directory / "c")
        assert torch.equal(logits(other), expected)
    assert train(other, 2) == train(engine, 2)
    zckpt.restore(engine, directory / "c")
    assert torch.equal(logits(engine), expected)
    zckpt.export(engine, directory / "live", adapter="default")
    with pytest.raises(zckpt.UnsupportedError, match="the model has adapters"):
        zckpt.export(engine, directory / "whole")
    with pytest.raises(zckpt.UnsupportedError, match=r"merged: .*base_layer\.weight is quantized"):
        zckpt.export(engine, directory / "merged", merge="default")
    save_adapter(engine, directory / "saved")


def save_adapter(engine: Any, directory: Path) -> None:
    import deepspeed

    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(trained):
        if engine.global_rank == 0:
            engine.module.save_pretrained(directory)
    torch.distributed.barrier()
