"""Saves and loads the FSDP2 models of Accelerate with zckpt instead of PyTorch's distributed checkpoints. Trainer saves
its models by the same functions.

Accelerate saves the weights and the optimizer one after the other, each into a directory of its own. With zckpt, the
first directory has a checkpoint of the weights, and the second one has a checkpoint of everything, from which training
can go on. It shares the files of the weights with the first one.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.api.open import open as open_checkpoint
from zckpt.api.restore import restore_engine
from zckpt.api.write import write_engine
from zckpt.engines import adapt, group_of
from zckpt.engines.pytorch.train_state import kept_state, train_state_of
from zckpt.errors import CheckpointNotFoundError, UnsupportedError, warn
from zckpt.ranks.collectives import Ranks
from zckpt.restoring.plan import Request
from zckpt.state.inventory import RESERVED_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.engines.pytorch.train_state import TrainState
    from zckpt.writing.options import WriteOptions

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
"""The names that Accelerate gives to the directories, followed by the number of the model."""
_SHARDED = "SHARDED_STATE_DICT"
"""The only kind of Accelerate's state dicts that zckpt takes over. The others are files that people load by torch."""
_told: set[str] = set()
"""The reasons of which a warning has told already."""


class _Takeover:
    """What ``attach_all`` has been called with."""

    options: WriteOptions | None = None
    """The options of the writes, or None if FSDP2 models are left to Accelerate."""
    settings = "checkpoint"
    on_attach: Callable[[Any], None] | None = None


def take_over(options: WriteOptions, settings: str, on_attach: Callable[[Any], None] | None) -> None:
    """Makes zckpt save and load the FSDP2 models of Accelerate from now on. A second call changes nothing. ``options``:
    those of the writes. ``settings``: as for ``zckpt.restore``. ``on_attach``: a function that is called with each new
    TrainState, or None."""
    if _Takeover.options is None:
        _Takeover.options, _Takeover.settings, _Takeover.on_attach = options, settings, on_attach


# These replace functions of Accelerate. All ranks call each of them.


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Makes a TrainState for each FSDP2 model as early as it can, because the TrainState counts the steps."""
    prepared = original(accelerator, *args, **options)
    if _Takeover.options is not None and getattr(accelerator, "is_fsdp2", False):
        for number in range(min(len(accelerator._models), len(accelerator._optimizers))):
            _state(accelerator, number)
    return prepared


def save_model(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    state = _taken_over(call, call["model_index"])
    if state is None:
        original(*args, **options)
        return
    moments = tuple(part for part in adapt(state).parts if part not in RESERVED_PARTS)
    _write(state, call["output_dir"], f"{_MODEL}_{call['model_index']}", moments)


def save_optimizer(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    state = _taken_over(call, call["optimizer_index"])
    if state is None:
        original(*args, **options)
        return
    _write(state, call["output_dir"], f"{_OPTIMIZER}_{call['optimizer_index']}")


def load_model(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    call = _bound(original, args, options)
    state = _taken_over(call, call["model_index"])
    if state is None or not _load(state, call["input_dir"], f"{_MODEL}_{call['model_index']}", weights=True):
        return original(*args, **options)
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys([], [])


def load_optimizer(original: Callable[..., None], *args: Any, **options: Any) -> None:
    call = _bound(original, args, options)
    state = _taken_over(call, call["optimizer_index"])
    if state is None or not _load(state, call["input_dir"], f"{_OPTIMIZER}_{call['optimizer_index']}", weights=False):
        original(*args, **options)


def _bound(original: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names that Accelerate gives them, also those that have their defaults."""
    bound = inspect.signature(original).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


def _taken_over(call: Mapping[str, Any], number: int) -> TrainState | None:
    """Returns the TrainState that zckpt saves and loads, or None if Accelerate does it itself. If a model has adapters,
    zckpt saves the frozen weights too, and the checkpoints share them. Collective."""
    plugin = call["fsdp_plugin"]
    sharded = plugin.fsdp_version == 2 and plugin.state_dict_type.name == _SHARDED
    if _Takeover.options is None or not sharded or not call.get("use_dcp", True):
        return None
    state = _state(call["accelerator"], number)
    ranks = Ranks(group_of(state), call="accelerate")
    reason = next(filter(None, ranks.share(lambda: _why_not(state), "look at the model")), "")
    if not reason:
        return state
    if ranks.rank == 0 and reason not in _told:
        _told.add(reason)
        warn(f"Accelerate itself saves and loads this model: {reason}")
    return None


def _why_not(state: TrainState) -> str:
    try:
        adapt(state).refuse_unsupported(drop_gradients=True, leave_out=True)
    except UnsupportedError as error:
        return str(error)
    return ""


def _state(accelerator: Any, number: int) -> TrainState:
    """Returns the TrainState of a model of Accelerate, which is made when it is first asked for."""
    model, optimizers = accelerator._models[number], accelerator._optimizers
    wrapped = optimizers[number] if number < len(optimizers) else None
    optimizer = getattr(wrapped, "optimizer", wrapped)
    kept = kept_state(model)
    state = train_state_of(model, optimizer)
    if state is not kept and optimizer is not None and _Takeover.on_attach is not None:
        _Takeover.on_attach(state)
    return state


def _load(state: TrainState, input_dir: str, name: str, *, weights: bool) -> bool:
    """Restores the weights, or else all that belongs to the optimizer. Returns whether there is a checkpoint of zckpt.
    Accelerate lets its callers name the directory of the checkpoint itself, too. Collective."""
    named = os.path.basename(os.path.normpath(input_dir)) == name
    path = input_dir if named else os.path.join(input_dir, name)

    def look() -> list[str] | None:
        try:
            return list(open_checkpoint(path).parts)
        except CheckpointNotFoundError:
            return None

    parts = Ranks(group_of(state), call="accelerate").first(look, "look for the checkpoint")
    if parts is None:
        return False
    chosen = tuple(part for part in parts if (part in RESERVED_PARTS) == weights)
    trees = () if weights else ("counters", "optimizer")
    restore_engine(state, path, Request(parts=chosen, state=trees, settings=_Takeover.settings))
    return True


def _write(state: TrainState, output_dir: str, name: str, exclude: tuple[str, ...] = ()) -> None:
    assert _Takeover.options is not None, "somebody has called take_over"
    options = replace(_Takeover.options, exclude=exclude, run=output_dir)
    write_engine(state, os.path.join(output_dir, name), options)
