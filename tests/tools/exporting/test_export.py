"""zckpt.export writes the bytes that save_pretrained writes, and the tensors that DeepSpeed's zero_to_fp32 finds."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import zckpt
from tests.support.hugging_face import content, make_hugging_face, write_both, write_model
from zckpt.cli import main

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


def assert_same_files(actual: Path, expected: Path) -> None:
    ours, theirs = content(actual), content(expected)
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_a_checkpoint_becomes_what_save_pretrained_writes(
    cluster: Cluster, tmp_path: Path, kind: str, stage: int
) -> None:
    cluster.run(write_both, 2, str(tmp_path), kind, stage)
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "deepspeed"))
    if stage == 1:  # DeepSpeed saves frozen weights for zero_to_fp32 only from stage 2 on; HRM-Text has one
        saved = torch.load(tmp_path / "deepspeed" / "global_step1" / "mp_rank_00_model_states.pt", weights_only=False)
        state = {name: tensor.float() for name, tensor in saved["module"].items()} | state
    model = make_hugging_face(kind)
    model.load_state_dict(state)
    for number, (dtype, size) in enumerate([("fp32", "5GB"), ("bf16", "40KB")]):
        model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        expected, actual = tmp_path / f"expected{number}", tmp_path / f"found{number}"
        model.save_pretrained(expected, max_shard_size=size)
        exported = zckpt.export(
            tmp_path / "zckpt", actual, dtype=dtype, config=expected, max_shard_size=size,
            budget=zckpt.Budget(8 << 20, 2),
        )  # fmt: skip
        assert_same_files(actual, expected)
        assert exported.files == tuple(sorted(os.listdir(expected)))
        assert exported.nbytes == sum(map(len, content(expected).values()))
        loaded = type(model).from_pretrained(actual)
        assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == {
            name: tensor.dtype for name, tensor in model.state_dict().items()
        }
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))

    plain = tmp_path / "model.pt"
    zckpt.export(tmp_path / "zckpt", plain, format="pt", dtype="fp32", budget=zckpt.Budget(8 << 20, 2))
    loaded = torch.load(plain, weights_only=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def export_on_all(checkpoint: str, out: str, config: str) -> list[str]:
    exported = zckpt.export(checkpoint, out, config=config, dtype="bf16", max_shard_size="60KB")
    return list(exported.files)


def test_ranks_share_the_files(cluster: Cluster, tmp_path: Path) -> None:
    model = make_hugging_face("mixtral")
    write_model(tmp_path / "zckpt", model)
    expected, actual = tmp_path / "expected", tmp_path / "found"
    model.to(torch.bfloat16).save_pretrained(expected, max_shard_size="60KB")
    names = cluster.run(export_on_all, 3, str(tmp_path / "zckpt"), str(actual), str(expected))
    assert names == [sorted(os.listdir(expected))] * 3
    assert_same_files(actual, expected)


def test_a_failure_of_one_rank_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    model = make_hugging_face("mixtral")
    write_model(tmp_path / "zckpt", model)
    model.save_pretrained(tmp_path / "config")
    (file,) = (tmp_path / "zckpt").glob("data-*/rank-00002/master.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-10] + b"\x5a" + whole[-9:])
    outcomes = cluster.outcomes(
        export_on_all, 2, str(tmp_path / "zckpt"), str(tmp_path / "found"), str(tmp_path / "config")
    )
    assert all(outcome.failed for outcome in outcomes)
    assert any("DigestError" in str(outcome.error) for outcome in outcomes)
    assert sorted(os.listdir(tmp_path)) == ["config", "latest", "zckpt"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_hugging_face("gpt2")
    write_model(tmp_path / "zckpt", model)
    model.save_pretrained(tmp_path / "expected")
    arguments = ["export", str(tmp_path / "zckpt"), str(tmp_path / "found"), "--config", str(tmp_path / "expected")]
    assert main([*arguments, "--dtype", "fp32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == sorted(os.listdir(tmp_path / "expected"))
    assert_same_files(tmp_path / "found", tmp_path / "expected")
    assert main(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--max-shard-size", "60KB"]) == 0
    assert "model-00001-of-" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "zckpt"), str(tmp_path / "m.pt"), "--format", "pt", "--dtype", "bf16"]) == 0
    assert {tensor.dtype for tensor in torch.load(tmp_path / "m.pt", weights_only=True).values()} == {torch.bfloat16}
    for wrong in (["--dtype", "bf17"], ["--max-shard-size", "5 gigs"]):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, "--overwrite", *wrong])
