"""The loss scale of fp16 training as a plain tree, whichever of DeepSpeed's optimizer wrappers keeps it, and back.

    {"class": "DynamicLossScaler", "values": {"cur_scale": 65536.0, "cur_iter": 12, ...},
     "wrapper": {"overflow": False, "custom_loss_scaler": False, "external_loss_scale": None}}

ZeRO and the wrappers without ZeRO have classes of their own for it. What means the same in both is translated. Whether
the scale is dynamic is a decision of the engine's configuration: neither is a static one restored from a dynamic one,
nor the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zckpt.errors import FormatError

WRAPPER = ("overflow", "custom_loss_scaler", "external_loss_scale")
"""What the wrappers keep beside the scaler, if they have it."""
PLAIN = (bool, int, float, type(None))
_IN_ZERO = {"dynamic_loss_scale": "dynamic", "min_loss_scale": "min_scale"}
"""For attributes of the scaler without ZeRO: the name of the same one in ZeRO's scaler, if that is another name."""


def capture(wrapper: Any) -> dict[str, Any] | None:
    """The tree of a live optimizer wrapper; None unless its precision is fp16."""
    scaler = _scaler(wrapper)
    if scaler is None:
        return None
    beside = {name: getattr(wrapper, name) for name in WRAPPER if hasattr(wrapper, name)}
    return {"class": _kind(scaler), "values": _plain(vars(scaler)), "wrapper": _plain(beside)}


def restore(saved: object, wrapper: Any) -> None:
    """Sets the scaler as it was. If ``saved`` is None, or one of them is dynamic and the other static, nothing is
    changed. Hysteresis, which only ZeRO has, begins anew if it was not saved."""
    scaler = _scaler(wrapper)
    if saved is None or scaler is None:
        return
    values, here = values_in_zero(saved), {_IN_ZERO.get(name, name): name for name in vars(scaler)}
    if bool(values.get("dynamic")) != bool(vars(scaler)[here["dynamic"]]):
        return
    if "delayed_shift" in here:
        values.setdefault("cur_hysteresis", scaler.delayed_shift)
    _set(scaler, {here[name]: value for name, value in values.items() if name in here})
    _set(wrapper, _mapping(_mapping(saved).get("wrapper")))


def values_in_zero(saved: object) -> dict[str, Any]:
    """The saved attributes of the scaler, by the names that they have in ZeRO's scaler."""
    return {_IN_ZERO.get(name, name): value for name, value in _mapping(_mapping(saved).get("values")).items()}


def check(saved: object) -> None:
    """Raises FormatError unless ``capture`` could have made ``saved``."""
    if saved is not None:
        _mapping(_mapping(saved).get("values"))
        _mapping(_mapping(saved).get("wrapper"))


def _set(target: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        # Only what is a plain value here too: a name alone must not reach into anything else.
        if name in vars(target) and isinstance(vars(target)[name], PLAIN) and isinstance(value, PLAIN):
            setattr(target, name, value)


def _scaler(wrapper: Any) -> Any:
    """The ``loss_scale_config`` of the wrappers without ZeRO, or ZeRO's ``loss_scaler``; None where nothing is scaled:
    in bf16 and fp32 there is a scaler too, of the class of a static one, that must stay at 1."""
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
