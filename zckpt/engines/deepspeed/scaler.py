"""The loss scale of fp16 training as a plain tree, whichever of DeepSpeed's optimizer wrappers keeps it, and back.

    {"class": "DynamicLossScaler", "values": {"cur_scale": 65536.0, "cur_iter": 12, ...},
     "wrapper": {"overflow": False, "custom_loss_scaler": False, "external_loss_scale": None}}

A scaler of another class (static instead of dynamic) is a decision of the engine's configuration and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zckpt.errors import FormatError

WRAPPER = ("overflow", "custom_loss_scaler", "external_loss_scale")
"""What the wrappers keep beside the scaler, if they have it."""
PLAIN = (bool, int, float, type(None))


def capture(wrapper: Any) -> dict[str, Any] | None:
    """The tree of a live optimizer wrapper; None unless its precision is fp16."""
    scaler = _scaler(wrapper)
    if scaler is None:
        return None
    beside = {name: getattr(wrapper, name) for name in WRAPPER if hasattr(wrapper, name)}
    return {"class": _kind(scaler), "values": _plain(vars(scaler)), "wrapper": _plain(beside)}


def restore(saved: object, wrapper: Any) -> None:
    """Sets the scaler as it was. ``saved`` None, or of another class of scaler: leaves it alone."""
    scaler = _scaler(wrapper)
    if saved is None or scaler is None:
        return
    tree = _mapping(saved)
    if tree.get("class") != _kind(scaler):
        return
    for target, values in ((scaler, _mapping(tree.get("values"))), (wrapper, _mapping(tree.get("wrapper")))):
        for name, value in values.items():
            # Only what is a plain value here too: a name alone must not reach into anything else.
            if name in vars(target) and isinstance(vars(target)[name], PLAIN) and isinstance(value, PLAIN):
                setattr(target, name, value)


def check(saved: object) -> None:
    """Raises FormatError unless ``capture`` could have made ``saved``."""
    if saved is not None:
        _mapping(_mapping(saved).get("values"))
        _mapping(_mapping(saved).get("wrapper"))


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
