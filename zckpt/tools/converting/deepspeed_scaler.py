"""The loss scaler of a checkpoint, in the forms in which DeepSpeed saves it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.deepspeed import scaler
from zckpt.tools.exporting.torch_file import Instance

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODULE = "deepspeed.runtime.fp16.loss_scaler"
"""The module of DeepSpeed that has the classes of ZeRO's loss scalers."""
_DYNAMIC = {
    "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000, "min_scale": 1,
    "delayed_shift": 2, "cur_hysteresis": 2, "consecutive_hysteresis": False, "raise_error_at_min_scale": True,
}  # fmt: skip
"""The attributes of ZeRO's dynamic loss scaler, with DeepSpeed's defaults. A scaler without ZeRO has some of them."""


class SavedScaler:
    """The loss scaler of an engine, from its tree, which is None if the loss is not scaled, as in bf16 and fp32."""

    def __init__(self, saved: Mapping[str, Any] | None) -> None:
        self._saved = saved
        self._values = {} if saved is None else scaler.values_in_zero(saved)

    @cached_property
    def _attributes(self) -> dict[str, Any]:
        """The attributes of ZeRO's loss scaler."""
        attributes = {"cur_scale": self._values.get("cur_scale", 1.0), "dynamic": bool(self._values.get("dynamic"))}
        if attributes["dynamic"]:
            attributes |= {name: self._values.get(name, default) for name, default in _DYNAMIC.items()}
            attributes["dtype"] = torch.float16
        return attributes

    @property
    def assumed(self) -> list[str]:
        """The attributes of ZeRO's loss scaler that the checkpoint does not have."""
        return sorted(_DYNAMIC.keys() - self._values.keys()) if self._attributes["dynamic"] else []

    def in_zero(self) -> dict[str, Any]:
        """Returns what ZeRO's wrapper saves of the loss scale."""
        values = self._attributes
        wrapper = (self._saved or {}).get("wrapper", {})
        return {
            "loss_scaler": Instance(_MODULE, "DynamicLossScaler" if values["dynamic"] else "LossScaler", values),
            "dynamic_loss_scale": values["dynamic"],
            "overflow": bool(wrapper.get("overflow", False)),
        }

    def at_stage_0(self) -> dict[str, Any]:
        """Returns what a wrapper of stage 0 saves of the loss scale."""
        values = self._attributes
        tree = {"dynamic_loss_scale": values["dynamic"], "cur_scale": values["cur_scale"]}
        tree["cur_iter"] = self._values.get("cur_iter", 0)
        if values["dynamic"]:
            tree |= {key: values[key] for key in ("last_overflow_iter", "scale_factor", "scale_window")}
        return tree
