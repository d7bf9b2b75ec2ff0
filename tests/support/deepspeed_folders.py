"""Small folders in DeepSpeed's own format, which are made without an engine and which tests damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {
        "stage": 2, "sub_group_size": 1000, "round_robin_gradients": False, "parameter_alignment": False,
        "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    },
    "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "bf16"},
}  # fmt: skip


SHAPES = {"w1": (2, 1, 2), "w2": (2, 2, 1), "w3": (2, 1, 2)}
"""The shapes of the weights of AutoEP's two experts."""


def model_state(ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Returns the state of a model as DeepSpeed saves it at stages 1 and 2."""
    return {
        "module": {"weight": torch.ones(4, 2, dtype=torch.bfloat16), "mean": torch.zeros(2)}, "buffer_names": ["mean"],
        "param_shapes": [{"weight": torch.Size([4, 2])}], "shared_params": {}, "optimizer": None, "lr_scheduler": None,
        "global_steps": 3, "global_samples": 12, "skipped_steps": 0, "dp_world_size": ranks, "mp_world_size": 1,
        "ds_config": {}, "ds_version": "0.19.8", **more,
    }  # fmt: skip


def adam(rank: int = 0, length: int = 8, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Returns the ``state_dict`` of an Adam with one parameter."""
    shape = shape or (length,)
    state = {"step": 3, "exp_avg": torch.full(shape, 1.0 + rank), "exp_avg_sq": torch.full(shape, 2.0)}
    return {"state": {0: state}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]}


def zero_state(rank: int = 0, ranks: int = 1, **more: Any) -> dict[str, Any]:
    length = 8 // ranks
    inner = {
        "base_optimizer_state": adam(rank, length), "zero_stage": 2,
        "partition_count": ranks, "single_partition_of_fp32_groups": [torch.arange(length) + 8.0 * rank],
        "group_paddings": [0], "param_alignment_paddings": [[0]], "loss_scaler": None, "overflow": False, **more,
    }  # fmt: skip
    return {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}


def make_folder(folder: Path, ranks: int = 1, **more: Any) -> Path:
    folder.mkdir()
    torch.save(model_state(ranks, **more), folder / MODEL)
    for rank in range(ranks):
        torch.save(zero_state(rank, ranks), folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def zero_of(masters: list[torch.Tensor], inner: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the state of an optimizer with one flat buffer for two parameters."""
    paddings: dict[str, Any] = {"group_paddings": [0], "param_alignment_paddings": [[0, 0]]}
    return zero_state(single_partition_of_fp32_groups=masters, base_optimizer_state=inner or adam(), **paddings)


def make_divided(folder: Path, info: Any = None, rows: int = 2, **more: Any) -> Path:
    """Makes the folder of a run with two tensor-parallel ranks, which have cut the rows of ``weight`` and not ``bias``.
    ``info``: its universal_checkpoint_info. ``rows``: the number of rows of each rank. ``more``: more entries of the
    model states of rank 1."""
    folder.mkdir()
    numel = 2 * rows
    if info is None:
        info = {"tp_replicated_parameter_patterns": ["bias"]}
    for model in range(2):
        weights = {"weight": torch.full((rows, 2), float(model)), "bias": torch.ones(numel)}
        state: dict[str, Any] = {
            "module": weights, "buffer_names": [], "mp_world_size": 2, "universal_checkpoint_info": info,
            "param_shapes": [{"weight": torch.Size([rows, 2]), "bias": torch.Size([numel])}],
        }  # fmt: skip
        state = model_state(**state | (more if model else {}))
        torch.save(state, folder / f"mp_rank_{model:02d}_model_states.pt")
        masters, inner = [torch.cat([torch.full((numel,), float(model)), torch.ones(numel)])], adam(length=2 * numel)
        torch.save(zero_of(masters, inner), folder / f"zero_pp_rank_0_mp_rank_{model:02d}_optim_states.pt")
    return folder


def make_experts(folder: Path, ranks: int = 2, **more: Any) -> Path:
    """Makes the folder of a run of which each rank has one of two experts, which have only a weight."""
    folder.mkdir()
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts"
    shapes = [{"weight": torch.Size([4, 2])}, {f"{prefix}.0.weight": torch.Size([2])}]
    state: dict[str, Any] = {"num_experts": [2], "param_shapes": shapes, "ds_autoep_layers": None, **more}
    torch.save(model_state(ranks, **state), folder / MODEL)
    for expert in range(2):
        torch.save(
            {f"{prefix}.{expert}.weight": torch.full((2,), 7.0 + expert)}, folder / f"layer_0_expert_{expert}_{MODEL}"
        )
    for rank in range(ranks):
        inner = adam(length=4)
        inner["state"] |= {1: {"step": 3, "exp_avg": torch.full((2,), 5.0 + rank), "exp_avg_sq": torch.ones(2)}}
        inner["param_groups"] += [{**inner["param_groups"][0], "name": "ep_size_2", "moe": True, "params": [1]}]
        zero = zero_state(
            base_optimizer_state=inner, single_partition_of_fp32_groups=[torch.ones(4), torch.full((2,), 7.0 + rank)],
            group_paddings=[0, 0], param_alignment_paddings=[[0], [0]], partition_count=[2, 1],
        )  # fmt: skip
        torch.save(zero, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def make_auto_experts(folder: Path, trained: tuple[str, ...] = ("w1", "w2", "w3"), **settings: Any) -> Path:
    """Makes the folder of a run of one rank with a layer of AutoEP, which has two experts, a shared expert with a gate,
    and a second name for its router. ``trained``: the weights of the experts that are not frozen. ``settings``: those
    of AutoEP."""
    folder.mkdir()
    names = ["router.gate.weight", "shared_experts.up.weight", "shared_experts_gate.weight"]
    module = {f"moe.{name}": torch.full((2, 2), 1.0 + number) for number, name in enumerate(names)}
    shapes = [{name: torch.Size([2, 2]) for name in module}]
    masters = [torch.cat([weight.flatten() for weight in module.values()])]
    module["moe.gate.gate.weight"] = module["moe.router.gate.weight"].clone()
    module["moe.router.e_score_correction_bias"] = torch.zeros(2)
    experts = {name: torch.arange(4.0).view(shape) + 10 * number for number, (name, shape) in enumerate(SHAPES.items())}
    shapes += [{f"moe.experts.{name}": experts[name].shape for name in trained}]
    masters += [torch.cat([experts[name].flatten() for name in trained])]
    layer = {
        "moe_layer_id": 0, "expert_key_prefix": "moe.experts", "ep_rank": 0,
        "expert_placement": {"ranks": [{"rank": 0, "experts": [0, 1]}]},
    }  # fmt: skip
    state: dict[str, Any] = {
        "module": module, "param_shapes": shapes, "buffer_names": ["moe.router.e_score_correction_bias"],
        "num_experts": [2], "ds_autoep_layers": [layer], "ds_config": {"expert_parallel": settings},
    }  # fmt: skip
    torch.save(model_state(**state), folder / MODEL)
    for expert in range(2):
        of_expert = {f"moe.experts.{name}.{expert}": experts[name][expert].clone() for name in experts}
        torch.save(of_expert, folder / f"layer_0_expert_{expert}_{MODEL}")
    inner = adam(length=masters[0].numel())
    inner["state"][1] = {"step": 3, "exp_avg": masters[1] + 100, "exp_avg_sq": torch.ones(len(masters[1]))}
    inner["param_groups"] += [{**inner["param_groups"][0], "name": "ep_size_1", "moe": True, "params": [1]}]
    zero = zero_state(
        base_optimizer_state=inner, single_partition_of_fp32_groups=masters, group_paddings=[0, 0],
        param_alignment_paddings=[[0] * 3, [0] * len(trained)], partition_count=[1, 1],
    )  # fmt: skip
    torch.save(zero, folder / OPTIMIZER)
    return folder


def make_pipeline(folder: Path, **more: Any) -> Path:
    """Makes the folder of a run with two stages, each with one layer and a copy of a shared module."""
    folder.mkdir()
    for stage in range(2):
        names = ["tied_modules.embed.weight", f"{1 + stage}.weight"]
        state = model_state(
            module=None, buffer_names=[f"{1 + stage}.mean"], param_shapes=[{name: torch.Size([4]) for name in names}],
            mp_world_size=2, checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 1}, **more,
        )  # fmt: skip
        torch.save(state, folder / f"mp_rank_{stage:02d}_model_states.pt")
        masters = [torch.cat([torch.ones(4), torch.full((4,), float(stage))])]
        torch.save(zero_of(masters), folder / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt")
        torch.save({"weight": torch.ones(4), "mean": torch.zeros(1)}, folder / f"layer_0{1 + stage}-model_states.pt")
    torch.save({"weight": torch.ones(4)}, folder / "layer_00-model_states.pt")
    return folder


def scaler() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(
        init_scale=512.0, scale_window=3, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )


def kinds() -> dict[str, dict[str, Any]]:
    """Returns the content of each file of a folder of one rank, for each kind of folder."""
    half: dict[str, Any] = {"module": {"weight": torch.ones(4, 2, dtype=torch.float16), "mean": torch.zeros(2)}}
    schedule = {"last_batch_iteration": 3, "base_lrs": [0.1]}
    common: dict[str, Any] = {"ds_config": CONFIG, "lr_scheduler": schedule, "note": {"epoch": 1}}
    flat = {
        "dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 3, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": 3, "optimizer_state_dict": adam(), "fp32_groups_flat": [torch.ones(8)], "clip_grad": 1.0,
    }  # fmt: skip
    frozen: dict[str, Any] = {
        "module": {"weight": torch.empty(0, dtype=torch.float16), "mean": torch.zeros(2)},
        "frozen_param_shapes": {"frozen": torch.Size([3])}, "frozen_param_fragments": {"frozen": torch.ones(3)},
        "shared_params": {"tied": "weight"},
    }  # fmt: skip
    partitioned = {
        "zero_stage": 3, "partition_count": 1, "optimizer_state_dict": adam(), "fp32_flat_groups": [torch.ones(8)],
        "loss_scaler": scaler(), "dynamic_loss_scale": True, "overflow": False,
    }  # fmt: skip
    whole = {"param": torch.ones(4, 2), "cat_dim": 0}
    return {
        "0-fp16": {MODEL: model_state(**half, **common, optimizer=flat)},
        "0-fp32": {
            MODEL: model_state(**common, module={"weight": torch.ones(4, 2)}, optimizer=adam(shape=(4, 2)))
        },
        "2": {MODEL: model_state(**common), f"bf16_{OPTIMIZER}": zero_state()},
        "3-fp16": {
            f"zero_pp_rank_0_{MODEL}": model_state(**{**common, **frozen}),
            OPTIMIZER: {"optimizer_state_dict": partitioned},
        },
        "universal": {
            MODEL: model_state(**common),
            "zero/optimizer_state.pt": {
                "zero_stage": 2, "param_groups": adam()["param_groups"], "loss_scaler": None, "overflow": False,
                "optimizer_state_dict": {"state": {0: {"step": 3}}},
            },
            "zero/weight/fp32.pt": whole, "zero/weight/exp_avg.pt": whole, "zero/weight/exp_avg_sq.pt": whole,
        },
    }  # fmt: skip


class Runs:
    """An object that is pickled as a call of a function, which ``torch.load`` would carry out."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def refused(source: Path, error: type[Exception], match: str | None = None, **options: Any) -> None:
    """Checks that ``zckpt.convert`` refuses ``source`` with this error, and leaves nothing behind."""
    destination = source.parent / "converted"
    with pytest.raises(error, match=match) as raised:
        zckpt.convert(source, destination, **options)
    assert isinstance(raised.value, zckpt.ZckptError)
    assert not destination.exists()
