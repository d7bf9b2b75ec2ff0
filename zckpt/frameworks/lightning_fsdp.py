"""Saves and loads the FSDP2 models of Lightning's ModelParallelStrategy with zckpt instead of PyTorch's distributed
checkpoints.

Each save of Lightning is a directory, in which zckpt makes the checkpoint ``checkpoint``, as with DeepSpeedStrategy.
What Lightning saves beside the model, such as its loops and callbacks, is the client_state of this checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.engines import group_of
from zckpt.frameworks.fsdp_models import attach_state, can_save, is_enabled, leave_to, load_model, save_model, take_step
from zckpt.ranks.collectives import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.adapters.pytorch.train_state import TrainState

_CHECKPOINT = "checkpoint"
_LIGHTNING = "Lightning"
_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"
"""The entries of Lightning's checkpoints that have the weights, and the states of the optimizers."""
_SAVED_BY_ZCKPT, _DUMPING = "_zckpt_state", "_zckpt_dumping"
"""The attribute of a strategy that has, during a save, the TrainState that zckpt saves, and the one that exists while
Lightning collects what it saves."""


# This replaces a method of Lightning's ``_CheckpointConnector``. All ranks call it.


def dump_checkpoint(original: Callable[..., dict[str, Any]], connector: Any, *args: Any, **options: Any) -> Any:
    """Decides at the beginning of a save whether zckpt saves the model."""
    strategy = connector.trainer.strategy
    state = _attached_state(strategy) if hasattr(strategy, "_save_distributed_checkpoint") else None
    if state is None:
        return original(connector, *args, **options)
    vars(strategy).update({_SAVED_BY_ZCKPT: state, _DUMPING: True})
    try:
        return original(connector, *args, **options)
    finally:
        del vars(strategy)[_DUMPING]


# These replace methods of ModelParallelStrategy, and have their names. All ranks call each of them.


def setup(original: Callable[..., None], strategy: Any, trainer: Any) -> None:
    """Makes a TrainState before the first step, because the TrainState counts the steps."""
    original(strategy, trainer)
    _attached_state(strategy)


def lightning_module_state_dict(original: Callable[..., dict[str, Any]], strategy: Any) -> dict[str, Any]:
    """Returns nothing if zckpt saves the model. Lightning would copy all weights into host memory."""
    return {} if _DUMPING in vars(strategy) else original(strategy)


def optimizer_state(original: Callable[..., dict[str, Any]], strategy: Any, optimizer: Any) -> dict[str, Any]:
    """Returns nothing if zckpt saves the model. PyTorch's function, which Lightning calls, makes an optimizer step if
    there has been none."""
    return {} if _DUMPING in vars(strategy) else original(strategy, optimizer)


def save_checkpoint(
    original: Callable[..., None], strategy: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
) -> None:
    state = vars(strategy).pop(_SAVED_BY_ZCKPT, None)
    if state is None or storage_options is not None:  # Lightning refuses such options.
        original(strategy, checkpoint, filepath, storage_options=storage_options)
        return
    ranks = Ranks(group_of(state), call=_LIGHTNING)
    path = ranks.first(lambda: os.fspath(filepath), "agree on a path")
    # Lightning replaces a file of this name, too.
    ranks.together(lambda: Path(path).unlink() if ranks.rank == 0 and os.path.isfile(path) else None, "begin the save")
    only_weights = bool(state.optimizers) and _OPTIMIZERS not in checkpoint
    # These two entries are empty, unless a hook of the user has put something into them.
    empty = {key for key in (_WEIGHTS, _OPTIMIZERS) if not any(checkpoint.get(key, ()))}
    client_state = {key: value for key, value in checkpoint.items() if key not in empty}
    step = checkpoint.get("global_step")
    save_model(state, path, _CHECKPOINT, _LIGHTNING, only_weights=only_weights, client_state=client_state, step=step)


def load_checkpoint(
    original: Callable[..., dict[str, Any]], strategy: Any, checkpoint_path: Any, *args: Any, **options: Any
) -> dict[str, Any]:
    state = _attached_state(strategy)
    if state is not None:
        path = Ranks(group_of(state), call=_LIGHTNING).first(lambda: os.fspath(checkpoint_path), "agree on a path")
        module = strategy.lightning_module
        what: Any = "all" if module.trainer.state.fn == "fit" else "weights"
        restored = load_model(state, path, _CHECKPOINT, _LIGHTNING, what, strict=module.strict_loading)
        if restored is not None:
            return dict(restored)
    loaded = original(strategy, checkpoint_path, *args, **options)
    if state is not None:
        take_step(state)
    return loaded


def _attached_state(strategy: Any) -> TrainState | None:
    """Returns the TrainState that zckpt saves and loads, or None if Lightning does it itself. Collective."""
    if not is_enabled():
        return None
    if not strategy._save_distributed_checkpoint:
        if strategy.global_rank == 0:
            leave_to(_LIGHTNING, "it has save_distributed_checkpoint=False, so it saves to a single file")
        return None
    state = attach_state(strategy.model, strategy.optimizers)
    return state if can_save(state, _LIGHTNING) else None


# This replaces the method ``setup`` of FSDPStrategy.


def warn_of_fsdp1(original: Callable[..., None], strategy: Any, *args: Any, **options: Any) -> None:
    original(strategy, *args, **options)
    if is_enabled() and strategy.global_rank == 0:
        leave_to(_LIGHTNING, "its FSDPStrategy uses FSDP1; zckpt supports FSDP2, which ModelParallelStrategy uses")
