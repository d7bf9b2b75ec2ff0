"""Turns the loss scale of fp16 training into a plain tree, and back. The tree is the same for all of DeepSpeed's
optimizer wrappers.

    {"class": "DynamicLossScaler", "values": {"cur_scale": 65536.0, "cur_iter": 12, ...},
     "wrapper": {"overflow": False, "custom_loss_scaler": False, "external_loss_scale": None}}

ZeRO's wrappers and the wrappers without ZeRO have different classes for the scaler. Attributes that mean the same in
both are translated. The engine's configuration decides whether the scale is dynamic, so a static scale is not restored
from a dynamic one, nor a dynamic scale from a static one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zckpt.errors import FormatError

WRAPPER = ("overflow", "custom_loss_scaler", "external_loss_scale")
"""The attributes about the loss scale that some wrappers have themselves, and not their scaler."""
PLAIN = (bool, int, float, type(None))
"""The types of the attributes that are saved and restored."""
_IN_ZERO = {"dynamic_loss_scale": "dynamic", "min_loss_scale": "min_scale"}
"""The attributes that have different names in the two kinds of scaler. Each key is the name in the scaler without ZeRO,
and its value is the name in ZeRO's scaler."""


def capture(wrapper: Any) -> dict[str, Any] | None:
    """Returns the tree of a live optimizer wrapper, or None unless its precision is fp16."""
    scaler = _scaler(wrapper)
    if scaler is None:
        return None
    wrapper_values = {name: getattr(wrapper, name) for name in WRAPPER if hasattr(wrapper, name)}
    return {"class": _kind(scaler), "values": _plain(vars(scaler)), "wrapper": _plain(wrapper_values)}


def restore(saved: object, wrapper: Any) -> None:
    """Sets the scaler to the saved values. Changes nothing if ``saved`` is None, or if only one of the two scalers is
    dynamic. The hysteresis, which only ZeRO's scaler has, starts again if it was not saved."""
    scaler = _scaler(wrapper)
    if saved is None or scaler is None:
        return
    values, live_names = values_in_zero(saved), {_IN_ZERO.get(name, name): name for name in vars(scaler)}
    if bool(values.get("dynamic")) != bool(vars(scaler)[live_names["dynamic"]]):
        return
    if "delayed_shift" in live_names:
        values.setdefault("cur_hysteresis", scaler.delayed_shift)
    _set(scaler, {live_names[name]: value for name, value in values.items() if name in live_names})
    _set(wrapper, _mapping(_mapping(saved).get("wrapper")))


def values_in_zero(saved: object) -> dict[str, Any]:
    """Returns the saved attributes of the scaler, with the names that they have in ZeRO's scaler."""
    return {_IN_ZERO.get(name, name): value for name, value in _mapping(_mapping(saved).get("values")).items()}


def check(saved: object) -> None:
    """Raises FormatError unless ``capture`` could have made ``saved``."""
    if saved is not None:
        _mapping(_mapping(saved).get("values"))
        _mapping(_mapping(saved).get("wrapper"))


def _set(target: Any, values: Mapping[str, Any]) -> None:
    """Sets those of the values for which ``target`` has an attribute that is plain too."""
    for name, value in values.items():
        # A checkpoint from a stranger must not replace an attribute that is not a plain value, such as a method.
        if name in vars(target) and isinstance(vars(target)[name], PLAIN) and isinstance(value, PLAIN):
            setattr(target, name, value)


def _scaler(wrapper: Any) -> Any:
    """Returns the ``loss_scale_config`` of a wrapper without ZeRO, or the ``loss_scaler`` of a ZeRO wrapper. Returns
    None if the loss is not scaled. In bf16 and fp32, a ZeRO wrapper has a static scaler too, whose scale must stay
    1."""
    config = getattr(wrapper, "loss_scale_config", None)
    if config is not None:
        return config if config.use_grad_scaling else None
    return getattr(wrapper, "loss_scaler", None) if getattr(wrapper, "dtype", None) == torch.float16 else None


def _kind(scaler: Any) -> str:
    if hasattr(scaler, "dynamic_loss_scale"):
        return f"{type(scaler).__name__}({'dynamic' if scaler.dynamic_loss_scale else 'static'})"
    return type(scaler).__name__


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise FormatError("state: scaler is not a loss scaler's state")
    return value
