"""Folders of divided runs that are damaged, incomplete or made to do harm are refused, and errors name file and key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.deepspeed_folders import (
    MODEL,
    adam,
    make_auto_experts,
    make_divided,
    make_experts,
    make_pipeline,
    model_state,
    refused,
    zero_of,
    zero_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

PREFIX = "moe.deepspeed_moe.experts.deepspeed_experts"
REPLICATED = {"tp_replicated_parameter_patterns": ["bias"]}


def cut_map(**more: Any) -> dict[str, Any]:
    """Returns AutoTP's description of a weight of which each of two ranks has two rows."""
    ranks = {
        rank: {
            "shard_shape": [2, 2],
            "pieces": [{"shape": [2, 2], "source": [4 * rank, [2, 1]], "dest": [0, [2, 1]], "locations": [rank]}],
        }
        for rank in range(2)
    }
    return {"logical_shape": [4, 2], "ranks": ranks, **more}


def autotp(**more: Any) -> dict[str, Any]:
    return {"affine_map": {"params": {"^weight$": cut_map(**more), "^bias$": cut_map()}}, **REPLICATED}


def test_sound_folders_are_converted(tmp_path: Path) -> None:
    makers: list[Callable[[Path], Path]] = [make_divided, make_experts, make_pipeline]
    for number, make in enumerate(makers):
        converted = zckpt.convert(make(tmp_path / f"source-{number}"), tmp_path / f"converted-{number}")
        assert zckpt.validate(converted.path, level="deep").ok
    assert zckpt.open(tmp_path / "converted-0").load()["master/weight"].tolist() == [[0, 0]] * 2 + [[1, 1]] * 2
    assert zckpt.open(tmp_path / "converted-1").load()[f"exp_avg/{PREFIX}.1.weight"].tolist() == [6, 6]
    assert sorted(zckpt.open(tmp_path / "converted-2")) == sorted(
        [f"{part}/{name}" for part in ("master", "exp_avg", "exp_avg_sq")
         for name in ("tied_modules.embed.weight", "1.weight", "2.weight")] + ["buffer/1.mean", "buffer/2.mean"]
    )  # fmt: skip
    assert zckpt.convert(make_divided(tmp_path / "autotp", autotp()), tmp_path / "converted").path


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_divided, "mp_rank_01_model_states.pt"), (make_divided, "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        (make_experts, f"layer_0_expert_1_{MODEL}"), (make_experts, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        (make_pipeline, "layer_02-model_states.pt"), (make_pipeline, "mp_rank_01_model_states.pt"),
    ],
)  # fmt: skip
def test_a_missing_file(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    (make(tmp_path / "source") / name).unlink()
    refused(tmp_path / "source", zckpt.MissingFileError, f"missing.*{name}")


def test_a_file_of_another_run(tmp_path: Path) -> None:
    source = make_divided(tmp_path / "source")
    torch.save(model_state(mp_world_size=2), source / "mp_rank_02_model_states.pt")
    refused(source, zckpt.FormatError, "two checkpoints")


@pytest.mark.parametrize(
    ("info", "error", "match"),
    [
        ({}, zckpt.StateError, "no such error"),
        ("none", zckpt.UnsupportedError, "has no universal_checkpoint_info"),
        ({"tp_replicated_parameter_patterns": ["weight", "bias"]}, zckpt.StateError, "has other values.*master/weight"),
        ({**REPLICATED, "parameter_with_row_parallelism_patterns": [r"w\w+t"]}, None, ""),
        ({**REPLICATED, "parameter_with_2_sub_params_cat_dim_0": ["(w|b)+"]}, zckpt.UnsupportedError, "the pattern"),
        ({**REPLICATED, "parameter_with_2_sub_params_cat_dim_0": [".*.*.*x"]}, zckpt.UnsupportedError, "the pattern"),
        ({"tp_replicated_parameter_patterns": [f"{n}" for n in range(99)]}, zckpt.UnsupportedError, "64 patterns"),
        ({"tp_replicated_parameter_patterns": ["["]}, zckpt.FormatError, "key"),
        (
            {**REPLICATED, "parameter_with_sub_params": [
                {"patterns": ["weight"], "shape": [(3, 1), -1], "partition_dim": 0}]},
            zckpt.FormatError, r"cannot be cut evenly.*key weight",
        ),
        (
            {**REPLICATED, "sub_param_shard_widths": {"weight": [[2, 1], [1, 1]]}, "parameter_with_sub_params": [
                {"patterns": ["weight"], "shape": [(3, 2), -1], "partition_dim": 0}]},
            zckpt.FormatError, r"should be \[\[3, 1\], \[2, 1\]\].*key weight",
        ),
        (
            {**REPLICATED, "parameter_with_sub_params": [
                {"patterns": ["weight"], "shape": [10**15, -1], "partition_dim": 0}]},
            zckpt.FormatError, "key weight",
        ),
        (autotp(logical_shape=[5, 2]), zckpt.FormatError, "key weight"),
        (autotp(logical_shape=[10**15, 4, 2]), zckpt.FormatError, "key weight"),
        (autotp(ranks={}), zckpt.FormatError, "its map is one of 0 ranks.*key weight"),
        ({**autotp(), "autotp_unsupported_parameter_patterns": {"^weight$": "heads"}}, zckpt.UnsupportedError, "heads"),
        ({"affine_map": {"version": 2}}, zckpt.UnsupportedError, "version 2"),
        ({"affine_map": {"params": {"^bias$": cut_map()}}}, zckpt.UnsupportedError, "not tell how.*key weight"),
    ],
)  # fmt: skip
def test_how_a_tensor_is_cut(tmp_path: Path, info: Any, error: Any, match: str) -> None:
    source = make_divided(tmp_path / "source", info)
    if error is None:
        zckpt.convert(source, tmp_path / "converted")
    elif info == {}:  # As in DeepSpeed's own converter, what is not named is cut in dimension 0.
        zckpt.convert(source, tmp_path / "converted")
        assert zckpt.open(tmp_path / "converted")["master/bias"].shape == (8,)
    else:
        refused(source, error, f"(?s){match}")


def test_a_map_that_was_scaled(tmp_path: Path) -> None:
    info = autotp()
    info["affine_map"]["params"]["^weight$"]["ranks"][0]["pieces"][0]["scale"] = 0.5
    refused(make_divided(tmp_path / "source", info), zckpt.UnsupportedError, "(?s)scaled.*key weight")


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"module": {"weight": torch.ones(2, 2), "bias": torch.ones(3)}}, zckpt.FormatError, "another shape.*key bias"),
        ({"module": {"bias": torch.ones(4)}, "param_shapes": [{"bias": torch.Size([4])}]}, zckpt.FormatError, "weight"),
        ({"global_steps": 4}, zckpt.FormatError, "different steps: 4 and 3"),
    ],
)
def test_tensor_parallel_ranks_that_do_not_fit(tmp_path: Path, more: Any, error: Any, match: str) -> None:
    refused(make_divided(tmp_path / "source", **more), error, f"(?s){match}")


def test_replicas_whose_moments_differ(tmp_path: Path) -> None:
    """Their weights are equal. The error names the moment and both ranks."""
    source = make_divided(tmp_path / "source")
    inner = adam()
    inner["state"][0]["exp_avg_sq"][7] = 3
    masters = [torch.cat([torch.ones(4), torch.ones(4)])]
    torch.save(zero_of(masters, inner), source / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    refused(source, zckpt.StateError, "(?s)model-parallel rank 1 has other values than .* rank 0.*key exp_avg_sq/bias")


def test_copies_of_a_shared_module_that_differ(tmp_path: Path) -> None:
    source = make_pipeline(tmp_path / "source")
    torch.save(zero_of([torch.zeros(8)]), source / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    refused(source, zckpt.StateError, "(?s)has other values.*key master/tied_modules.embed.weight")


def test_a_pipeline_without_zero(tmp_path: Path) -> None:
    source = make_pipeline(tmp_path / "source")
    for stage in range(2):
        state = model_state(module=None, mp_world_size=2, param_shapes=None, optimizer=adam())
        torch.save(state, source / f"mp_rank_{stage:02d}_model_states.pt")
        (source / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt").unlink()
    refused(source, zckpt.UnsupportedError, "(?s)does not tell which parameters each stage has.*zckpt.attach")


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"num_experts": [3]}, zckpt.FormatError, "3 experts cannot be divided over 2 ranks"),
        ({"num_experts": [4]}, zckpt.MissingFileError, "layer_0_expert_2"),
        ({"num_experts": "four"}, zckpt.FormatError, "num_experts"),
        ({"mp_world_size": 0}, zckpt.FormatError, "0 ranks"),
    ],
)
def test_experts_that_do_not_fit(tmp_path: Path, more: Any, error: Any, match: str) -> None:
    refused(make_experts(tmp_path / "source", **more), error, match)


@pytest.mark.parametrize(
    ("settings", "experts", "shared"),
    [
        ({}, ["gate_up_proj", "down_proj"], "shared_expert"),
        ({"preset_model": "qwen3_moe", "expert_w2": "out"}, ["gate_up_proj", "out"], "shared_expert"),
        ({"expert_w1": "g", "expert_w3": "u", "shared_experts_pattern": "s"}, ["g", "u", "down_proj"], "s"),
    ],
)
def test_tensors_of_autoep_have_the_names_that_they_had_before(
    tmp_path: Path, settings: Any, experts: list[str], shared: str
) -> None:
    source = make_auto_experts(tmp_path / "source", **settings)
    checkpoint = zckpt.open(zckpt.convert(source, tmp_path / "converted").path)
    names = [
        *(f"experts.{name}" for name in experts),
        "gate.weight",
        f"{shared}.up.weight",
        "shared_expert_gate.weight",
    ]
    expected = {f"{part}/moe.{name}" for part in ("master", "exp_avg", "exp_avg_sq") for name in names}
    assert set(checkpoint) == {*expected, "buffer/moe.gate.e_score_correction_bias"}
    assert not checkpoint.aliases
    if "gate_up_proj" in experts:
        values = [[[0, 1], [20, 21]], [[2, 3], [22, 23]]]
        assert checkpoint.load()["master/moe.experts.gate_up_proj"].tolist() == values
        assert (checkpoint.load()["exp_avg/moe.experts.gate_up_proj"] - 100).tolist() == values


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"preset_model": "grok"}, "the preset_model 'grok'"),
        ({"shared_experts_gate_pattern": "g"}, "without shared_experts_pattern"),
        ({"trained": ("w1", "w2")}, "gate_up_proj, of which only one half is trained"),
    ],
)
def test_tensors_of_autoep_that_cannot_be_told_apart(tmp_path: Path, more: Any, match: str) -> None:
    refused(make_auto_experts(tmp_path / "source", **more), zckpt.UnsupportedError, match)


def test_the_file_of_another_expert(tmp_path: Path) -> None:
    source = make_experts(tmp_path / "source")
    torch.save({f"{PREFIX}.0.weight": torch.ones(2)}, source / f"layer_0_expert_1_{MODEL}")
    refused(source, zckpt.FormatError, "(?s)else than tensors of this expert.*layer_0_expert_1.*key .*0.weight")


def test_experts_of_another_rank(tmp_path: Path) -> None:
    """The files of the ranks were exchanged. This would give each expert the moments of the other one."""
    source = make_experts(tmp_path / "source")
    files = [source / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    refused(source, zckpt.FormatError, "(?s)not those of this expert.*key .*experts.0.weight")


def test_experts_of_an_unknown_number_of_ranks(tmp_path: Path) -> None:
    source = make_experts(tmp_path / "source")
    zero = zero_state(base_optimizer_state=adam(length=4), single_partition_of_fp32_groups=[torch.ones(4)])
    torch.save(zero, source / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(source, zckpt.UnsupportedError, "over how many ranks its experts are divided")


def convert_sound_and_bad(folder: str) -> None:
    zckpt.convert(f"{folder}/sound", f"{folder}/converted")
    with pytest.raises(zckpt.StateError, match="has other values"):
        zckpt.convert(f"{folder}/bad", f"{folder}/nothing")


@pytest.mark.matrix
def test_several_processes_compare_the_replicas(cluster: Cluster, tmp_path: Path) -> None:
    """Each process reads other ranks of the folder, and all of them raise the error."""
    make_divided(tmp_path / "sound")
    make_divided(tmp_path / "bad", {"tp_replicated_parameter_patterns": ["weight", "bias"]})
    cluster.run(convert_sound_and_bad, 2, str(tmp_path))
    alone = zckpt.convert(tmp_path / "sound", tmp_path / "alone")
    assert str(zckpt.open(tmp_path / "converted").load()) == str(zckpt.open(alone.path).load())
    assert not (tmp_path / "nothing").exists()
