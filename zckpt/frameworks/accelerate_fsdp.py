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

from zckpt.frameworks.fsdp_models import attach_state, can_save, is_enabled, leave_to, load_model, save_model, take_step
from zckpt.frameworks.trainer_files import FSDP_MODEL, FSDP_OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal

    from zckpt.adapters.pytorch.train_state import TrainState

_ACCELERATE = "Accelerate"
_SHARDED = "SHARDED_STATE_DICT"
"""The only kind of Accelerate's state dicts that zckpt takes over. With the others, Accelerate makes
files that people load with ``torch.load``."""


# These replace functions of Accelerate. All ranks call each of them.


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Makes a TrainState for each FSDP2 model as early as it can, because the TrainState counts the steps."""
    prepared = original(accelerator, *args, **options)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if is_enabled() and plugin is not None and not _why_left(plugin):
        for number in range(min(len(accelerator._models), len(accelerator._optimizers))):
            _state(accelerator, number)
    return prepared


def save_weights(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    _save(original, call, FSDP_MODEL, call["model_index"], only_weights=True)


def save_optimizer(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    _save(original, call, FSDP_OPTIMIZER, call["optimizer_index"], only_weights=False)


def load_weights(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    call = _bound(original, args, options)
    if not _load(call, FSDP_MODEL, call["model_index"], "weights"):
        return original(*args, **options)
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys([], [])


def load_optimizer(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    number = call["optimizer_index"]
    if not _load(call, FSDP_OPTIMIZER, number, "optimizer"):
        original(*args, **options)
        if is_enabled() and not _why_left(call["fsdp_plugin"]):
            take_step(_state(call["accelerator"], number))


def _save(original: Callable[..., None], call: dict[str, Any], prefix: str, number: int, *, only_weights: bool) -> None:
    state = _attached_state(call, number)
    if state is None:
        original(**call)
    else:
        save_model(state, call["output_dir"], f"{prefix}{number}", _ACCELERATE, only_weights=only_weights)


def _load(call: Mapping[str, Any], prefix: str, number: int, what: Literal["weights", "optimizer"]) -> bool:
    """Returns whether there was a checkpoint of zckpt. Accelerate lets its callers pass the directory of the checkpoint
    itself, too."""
    state, run, name = _attached_state(call, number), os.path.normpath(call["input_dir"]), f"{prefix}{number}"
    if os.path.basename(run) == name:
        run = os.path.dirname(run)
    return state is not None and load_model(state, run, name, _ACCELERATE, what) is not None


def _bound(original: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names that Accelerate gives them, also those that have their defaults."""
    bound = inspect.signature(original).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


def _attached_state(call: Mapping[str, Any], number: int) -> TrainState | None:
    """Returns the TrainState that zckpt saves and loads, or None if Accelerate does it itself. ``number``: that of the
    model. If a model has adapters, zckpt saves the frozen weights too, and the checkpoints share them. Collective."""
    accelerator = call["accelerator"]
    if not is_enabled() or not call.get("use_dcp", True):  # Without DCP, Accelerate writes files for other programs.
        return None
    reason = _why_left(call["fsdp_plugin"])
    if not reason:
        state = _state(accelerator, number)
        return state if can_save(state, _ACCELERATE) else None
    if accelerator.process_index == 0:
        leave_to(_ACCELERATE, reason)
    return None


def _why_left(plugin: Any) -> str:
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
    return attach_state(accelerator._models[number], getattr(wrapped, "optimizer", wrapped))
