"""Saves and loads the FSDP2 models of Accelerate with zckpt instead of PyTorch's distributed checkpoints. Trainer saves
its models by the same functions.

Accelerate saves the weights and the optimizer one after the other, each into a directory of its own. With zckpt, the
first directory has a checkpoint of the weights, and the second one has a checkpoint of everything, from which training
can go on. It shares the files of the weights with the first one.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from zckpt.api.fsdp_models import attached_state, can_save, is_taken_over, leave_to, load_model, save_model
from zckpt.listing.trainer import FSDP_MODEL, FSDP_OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.engines.pytorch.train_state import TrainState

_ACCELERATE = "accelerate"
_SHARDED = "SHARDED_STATE_DICT"
"""The only kind of Accelerate's state dicts that zckpt takes over. The others are files that people load by torch."""


# These replace functions of Accelerate. All ranks call each of them.


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Makes a TrainState for each FSDP2 model as early as it can, because the TrainState counts the steps."""
    prepared = original(accelerator, *args, **options)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if is_taken_over() and plugin is not None and not _left(plugin):
        for number in range(min(len(accelerator._models), len(accelerator._optimizers))):
            _state(accelerator, number)
    return prepared


def save_weights(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    state = _taken_over(call, call["model_index"])
    if state is None:
        original(*args, **options)
    else:
        save_model(state, call["output_dir"], f"{FSDP_MODEL}{call['model_index']}", _ACCELERATE, weights=True)


def save_optimizer(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    state = _taken_over(call, call["optimizer_index"])
    if state is None:
        original(*args, **options)
    else:
        save_model(state, call["output_dir"], f"{FSDP_OPTIMIZER}{call['optimizer_index']}", _ACCELERATE)


def load_weights(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    call = _bound(original, args, options)
    state = _taken_over(call, call["model_index"])
    if state is None:
        return original(*args, **options)
    run, name = _run(call["input_dir"], f"{FSDP_MODEL}{call['model_index']}")
    if load_model(state, run, name, _ACCELERATE, "weights") is None:
        return original(*args, **options)
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys([], [])


def load_optimizer(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    state = _taken_over(call, call["optimizer_index"])
    if state is not None:
        run, name = _run(call["input_dir"], f"{FSDP_OPTIMIZER}{call['optimizer_index']}")
    if state is None or load_model(state, run, name, _ACCELERATE, "optimizer") is None:
        original(*args, **options)


def _run(input_dir: str, name: str) -> tuple[str, str]:
    """Returns the directory that was made for a save, and the name of the checkpoint in it. Accelerate lets its callers
    pass the directory of the checkpoint itself, too."""
    path = os.path.normpath(input_dir)
    return (os.path.dirname(path) if os.path.basename(path) == name else path), name


def _bound(original: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names that Accelerate gives them, also those that have their defaults."""
    bound = inspect.signature(original).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


def _taken_over(call: Mapping[str, Any], number: int) -> TrainState | None:
    """Returns the TrainState that zckpt saves and loads, or None if Accelerate does it itself. If a model has adapters,
    zckpt saves the frozen weights too, and the checkpoints share them. Collective."""
    accelerator = call["accelerator"]
    if not is_taken_over() or not call.get("use_dcp", True):
        return None
    reason = _left(call["fsdp_plugin"])
    if not reason:
        state = _state(accelerator, number)
        return state if can_save(state, "Accelerate") else None
    if accelerator.process_index == 0:
        leave_to("Accelerate", reason)
    return None


def _left(plugin: Any) -> str:
    """Returns why zckpt leaves all models of these settings to Accelerate, or an empty text."""
    if plugin.fsdp_version != 2:
        return "zckpt supports FSDP2, which fsdp_version=2 chooses"
    if plugin.state_dict_type.name != _SHARDED:
        return f"zckpt takes the place of {_SHARDED} only"
    return ""


def _state(accelerator: Any, number: int) -> TrainState:
    """Returns the TrainState of a model of Accelerate."""
    optimizers = accelerator._optimizers
    wrapped = optimizers[number] if number < len(optimizers) else None
    return attached_state(accelerator._models[number], getattr(wrapped, "optimizer", wrapped))
