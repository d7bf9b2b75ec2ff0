"""The run that saved a folder in DeepSpeed's own format: its configuration, its optimizer, and its settings."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.deepspeed import scaler
from zckpt.errors import FormatError, UnsupportedError
from zckpt.tools.converting.deepspeed_division import ranks_of, stages_of
from zckpt.tools.converting.deepspeed_folder import Coordinates, DeepSpeedFolder, of_type

if TYPE_CHECKING:
    from collections.abc import Mapping

_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""The names of the ZeRO stages in DeepSpeed's ``ZeroStageEnum``, in the order of their numbers."""


class Run:
    """What a folder tells of its run, beside what each rank has."""

    def __init__(self, folder: DeepSpeedFolder) -> None:
        self._folder = folder
        self.model = folder.model(Coordinates(0, 0))
        """The model states of rank 0. Below stage 3 they are those of all ranks of data parallelism."""
        config = self.model.get("ds_config")
        self.config: Mapping[str, Any] = config if isinstance(config, dict) else {}

    def counters(self) -> dict[str, int]:
        """Returns the counters of the engine, as they are in its state."""
        keys = ("global_steps", "global_samples", "skipped_steps")
        return {**{key: of_type(self.model, key, int) for key in keys}, "micro_steps": 0}

    def scheduler(self) -> dict[str, Any] | None:
        """Returns the tree of the scheduler, as it is in the state of an engine, or None if there is no scheduler."""
        saved = self.model.get("lr_scheduler")
        settings = self.config.get("scheduler")
        scheduler_class = settings.get("type") if isinstance(settings, dict) else None
        return None if saved is None else {"class": scheduler_class, "state": saved}

    def scaler_tree(self, weights: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what ``scaler.capture`` returns for a live loss scaler."""
        if not any(weight.dtype == torch.float16 for weight in weights.values()):
            return None
        if self.zero is None and not self._folder.universal:
            saved = of_type(self.model, "optimizer", dict)
            plain_values = {
                key: value for key, value in saved.items() if isinstance(value, scaler.PLAIN) and key != "clip_grad"
            }
            dynamic = "dynamic" if plain_values.get("dynamic_loss_scale") else "static"
            return {"class": f"LossScaleConfig({dynamic})", "values": plain_values, "wrapper": {}}
        saved = self.universal if self._folder.universal else self.zero or {}
        saved_scaler = saved.get("loss_scaler")
        attributes = vars(saved_scaler) if saved_scaler else {}
        values = {key: value for key, value in attributes.items() if isinstance(value, scaler.PLAIN)}
        wrapper = {"overflow": bool(saved.get("overflow"))}
        return {"class": type(saved_scaler).__name__, "values": values, "wrapper": wrapper}

    @cached_property
    def zero(self) -> Mapping[str, Any] | None:
        """The content of the file of optimizer states of rank 0, or None if there are no such files."""
        return self._folder.zero(Coordinates(0, 0)) if self._folder.has_optimizer_files else None

    @cached_property
    def universal(self) -> Mapping[str, Any]:
        """The state of the optimizer that a Universal Checkpoint has in one file for all parameters."""
        state = self._folder.universal_file("optimizer_state.pt")
        if not isinstance(state, dict):
            raise FormatError(
                "its file zero/optimizer_state.pt is missing, or is not one of DeepSpeed's", file=self._folder.path,
                hint="run DeepSpeed's ds_to_universal.py again, or convert the checkpoint that it was made from",
            )  # fmt: skip
        return state

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage of the run that saved the folder."""
        if self._folder.partitions_weights:
            return 3
        saved = self.universal if self._folder.universal else self.zero
        return 0 if saved is None else _stage_number(saved.get("zero_stage"))

    def groups(self, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the param groups of the optimizer. ``saved``: what was saved of the optimizer of a rank."""
        if self._folder.universal:
            inner: Any = saved
        elif self.stage == 0:
            inner = saved.get("optimizer_state_dict", saved)
        else:
            inner = saved.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        return list(of_type(inner, "param_groups", list))

    def optimizer_class(self, groups: list[dict[str, Any]]) -> tuple[str | None, str | None]:
        """Returns the class of the optimizer, which DeepSpeed chooses by its configuration, and the class of the
        optimizer inside Muon. The first one is None if it is not known, as for an optimizer that the training script
        has made itself. The second one is None if there is no optimizer inside."""
        settings = self.config.get("optimizer")
        if not isinstance(settings, dict) or not isinstance(settings.get("type"), str):
            return None, None
        options = settings.get("params") or {}
        on_cpu, configured = self.offloads("optimizer"), settings["type"].lower()
        adam = "DeepSpeedCPUAdam" if on_cpu else "FusedAdam"
        if configured in ("adam", "adamw"):
            if options.get("torch_adam"):
                return ("AdamW" if configured == "adamw" or options.get("adam_w_mode", True) else "Adam"), None
            return (adam if all("bias_correction" in group for group in groups) else None), None
        if configured == "muon":
            return "MuonWithAuxAdam", adam if any(not group.get("use_muon") for group in groups) else None
        classes = {
            "adagrad": "DeepSpeedCPUAdagrad" if on_cpu else "Adagrad", "lamb": "FusedLamb",
            "lion": "DeepSpeedCPULion" if on_cpu else "FusedLion",
        }  # fmt: skip
        return classes.get(configured, settings["type"]), None

    def offloads(self, what: str) -> bool:
        """Returns whether the run had offloaded ``what``, which is "optimizer" or "param", to host memory or NVMe."""
        zero = self.config.get("zero_optimization")
        settings = zero.get(f"offload_{what}") if isinstance(zero, dict) else None
        return isinstance(settings, dict) and settings.get("device") in ("cpu", "nvme")

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedError if the run used a feature of DeepSpeed that zckpt does not support."""
        model = self.model
        has_cut_experts = "num_experts" in model and ranks_of(model)[1] > stages_of(model)
        without_zero = model.get("param_shapes") is None
        features = [
            "deepspeed.moe and tensor parallelism" if has_cut_experts and not model.get("ds_autoep_layers") else "",
            "experts and tensor parallelism without ZeRO" if has_cut_experts and without_zero else "",
            "random_ltd" if model.get("random_ltd") is not None else "",
            "curriculum learning (data_sampler)" if model.get("data_sampler") is not None else "",
        ]
        if any(features):
            raise UnsupportedError(
                f"it was written by a run with {', '.join(filter(None, features))}, which zckpt does not support"
            )


def _stage_number(value: Any) -> int:
    """Returns the number of a ZeRO stage, which is that number or a member of DeepSpeed's ``ZeroStageEnum``, which has
    been saved by its number or by its name. Returns 1 if ``value`` is something else, because only the
    ``BF16_Optimizer``, whose stage is 1, does not save its stage."""
    saved = next(iter(getattr(value, "args", ())), value)
    if type(saved) is str and saved in _STAGES:
        return _STAGES.index(saved)
    return saved if type(saved) is int else 1
