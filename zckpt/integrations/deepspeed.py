"""DeepSpeed's own save_checkpoint and load_checkpoint, with zckpt behind them."""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING, Any

import zckpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WEIGHTS = ("master", "param", "buffer")
_METHODS = ("save_checkpoint", "load_checkpoint")


def attach(engine: Any, *, background: bool = False) -> Any:
    """Has ``save_checkpoint`` and ``load_checkpoint`` of a DeepSpeed engine use zckpt; returns the engine.

    Arguments, return values, tags, ``latest`` and ``<dir>/<tag>/`` mean what they mean in DeepSpeed, but that:
    ``load_checkpoint`` also works in an engine that has trained or saved, at another world size, stage and offload; the
    path it returns is the checkpoint's directory; a failure raises on every rank; and ``custom_load_fn`` is refused for
    a zckpt checkpoint. A folder in DeepSpeed's own format is loaded by DeepSpeed. Random number generators are left
    alone. ``background``: saves go on while training does; the next save or load and the end of the process wait for
    them and show their errors. Doing it twice changes nothing; ``detach`` undoes it.
    """
    if "load_checkpoint" not in vars(engine):
        stock: Callable[..., Any] = engine.load_checkpoint
        engine.save_checkpoint = functools.partial(_save_checkpoint, engine, background)
        engine.load_checkpoint = functools.partial(_load_checkpoint, engine, stock)
    return engine


def detach(engine: Any) -> Any:
    """Gives an engine its own ``save_checkpoint`` and ``load_checkpoint`` back; returns it."""
    for method in _METHODS:
        vars(engine).pop(method, None)
    return engine


def _save_checkpoint(
    engine: Any,
    background: bool,
    save_dir: str | os.PathLike[str],
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty path, got {save_dir!r}")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    write = functools.partial(zckpt.write, background=True) if background else zckpt.write
    write(
        engine,
        os.path.join(save_dir, tag),
        exclude=("param",) if exclude_frozen_parameters else (),
        client_state=client_state,
        overwrite=True,
        latest=save_latest,
    )
    return True


def _load_checkpoint(
    engine: Any,
    stock: Callable[..., Any],
    load_dir: str | os.PathLike[str],
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    zckpt.wait()  # it may be what `latest` is about to name
    if tag is None:
        latest = os.path.join(load_dir, "latest")
        if not os.path.isfile(latest):
            warnings.warn(f"there is no {latest}: pass a tag to load a checkpoint that it does not name", stacklevel=2)
            return None, None
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
    path = os.path.join(load_dir, str(tag))
    if os.path.isdir(path) and not os.path.lexists(os.path.join(path, "manifest.msgpack")):
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return stock(load_dir, str(tag), *options, custom_load_fn)  # type: ignore[no-any-return]
    if custom_load_fn is not None:
        raise zckpt.UnsupportedError(
            "custom_load_fn: the weights go straight into the engine's own memory",
            hint="load them with zckpt.open(path).state_dict() and put them where they belong",
        )
    weights_only = load_module_only or not load_optimizer_states
    trees = [] if load_module_only else ["counters", "scaler"]
    if load_optimizer_states and not load_module_only:
        trees.append("optimizer")
    if load_lr_scheduler_states and not load_module_only and engine.lr_scheduler is not None:
        trees.append("scheduler")
    parts = [part for part in zckpt.open(path).parts if part in _WEIGHTS] if weights_only else None
    client_state = zckpt.restore(engine, path, parts=parts, strict=load_module_strict, state=trees)
    return path, client_state
