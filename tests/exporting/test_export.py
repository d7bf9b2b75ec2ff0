"""zckpt.export gives the bytes that save_pretrained gives, and the tensors that zero_to_fp32 gives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import zckpt
from tests.support.hugging_face import content, make_hugging_face, write_both

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

KINDS = ("gpt2", "t5", "mixtral", "qwen2_moe", "llava", "qwen3_vl_moe", "hrm_text")
EVERY_COMMIT = {("gpt2", 1), ("t5", 2), ("mixtral", 3), ("llava", 3)}
CASES = [
    pytest.param(kind, stage, marks=() if (kind, stage) in EVERY_COMMIT else pytest.mark.matrix)
    for kind in KINDS
    for stage in (1, 2, 3)
]


def assert_same_files(found: Path, expected: Path) -> None:
    ours, theirs = content(found), content(expected)
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_a_checkpoint_becomes_what_save_pretrained_writes(
    cluster: Cluster, tmp_path: Path, kind: str, stage: int
) -> None:
    cluster.run(write_both, 2, str(tmp_path), kind, stage)
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "deepspeed"))
    model = make_hugging_face(kind)
    model.load_state_dict(state)
    for number, (dtype, size) in enumerate([("fp32", "5GB"), ("bf16", "40KB")]):
        model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        expected, found = tmp_path / f"expected{number}", tmp_path / f"found{number}"
        model.save_pretrained(expected, max_shard_size=size)
        exported = zckpt.export(
            tmp_path / "zckpt", found, dtype=dtype, config=expected, max_shard_size=size,
            budget=zckpt.Budget(8 << 20, 2),
        )  # fmt: skip
        assert_same_files(found, expected)
        assert exported.files == tuple(sorted(os.listdir(expected)))
        assert exported.nbytes == sum(map(len, content(expected).values()))
        loaded = type(model).from_pretrained(found)
        assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == {
            name: tensor.dtype for name, tensor in model.state_dict().items()
        }
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))

    plain = tmp_path / "model.pt"
    zckpt.export(tmp_path / "zckpt", plain, format="pt", dtype="fp32", budget=zckpt.Budget(8 << 20, 2))
    loaded = torch.load(plain, weights_only=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
