"""Saves and loads the FSDP2 models of frameworks, which have no engine whose methods could be replaced. A framework is
taught by replacing the functions with which it saves and loads a model (``accelerate_fsdp``, ``lightning_fsdp``).

These functions write the state of a ``TrainState``, as ``zckpt.write`` does, and not what the framework gives to DCP by
``zckpt.dcp.Writer``. Only the first can be restored into PyTorch alone and into DeepSpeed, and only it has the step by
which checkpoints are ordered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zckpt.adapters.pytorch.train_state import kept_state, train_state_of
from zckpt.checkpoint.background import wait_for
from zckpt.checkpoint.open import open_chosen, open_loader
from zckpt.checkpoint.restore import restore_engine
from zckpt.checkpoint.restoring.plan import Request, Restored
from zckpt.checkpoint.write import write_engine
from zckpt.checkpoint.writing.saves import Saves, saves_of
from zckpt.engines import adapt, group_of
from zckpt.errors import CheckpointNotFoundError, UnfinishedWriteError, UnsupportedError, warn
from zckpt.format import names
from zckpt.frameworks.attached_saves import choose_copy, moments, save
from zckpt.plan.inventory import WEIGHT_PARTS
from zckpt.ranks.collectives import Ranks
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal

    from zckpt.adapters.pytorch.train_state import TrainState
    from zckpt.checkpoint.writing.options import WriteOptions
    from zckpt.storage.contract import Entry

_DCP_METADATA = ".metadata"
"""The file that PyTorch's distributed checkpoint writes last."""
_told: set[str] = set()
"""The warnings that were given already."""


class Options(NamedTuple):
    """What ``attach_all`` was called with."""

    of_writes: WriteOptions
    full_every: int
    settings: str
    on_attach: Callable[[Any], None] | None
    """A function that is called with each new TrainState, or None."""


_options: Options | None = None
"""None if the frameworks save and load these models themselves."""


def enable(options: Options) -> None:
    """Makes zckpt save and load the FSDP2 models of frameworks from now on. A second call changes nothing."""
    global _options  # noqa: PLW0603  the frameworks cannot pass an object through to the functions below
    _options = _options or options


def is_enabled() -> bool:
    """Returns whether zckpt saves and loads the FSDP2 models of frameworks."""
    return _options is not None


def attach_state(model: Any, optimizers: Any) -> TrainState:
    """Returns the TrainState with which zckpt saves and loads a model. It is made when it is first asked for, which
    should be before the first step, because it counts the steps. ``enable`` has to be called before.

    ``model``: as the framework trains it. ``optimizers``: its optimizer, or a sequence of optimizers. None or an empty
    sequence is for a model that is only evaluated.
    """
    state = train_state_of(model, optimizers)
    if saves_of(state) is None:
        assert _options
        Saves(state, _options.full_every, _options.settings, _options.of_writes.copies)
        if state.optimizers and _options.on_attach is not None:
            _options.on_attach(state)
    return state


def engine_of_model(model: Any) -> Any:
    """Returns the object that ``zckpt.write`` takes for a model of a framework: the TrainState of an FSDP2 model, if
    there is one, or else the model itself, which may be an engine of DeepSpeed."""
    kept = kept_state(model) if isinstance(model, torch.nn.Module) else None
    return kept or model


def can_save(state: TrainState, framework: str) -> bool:
    """Returns whether zckpt can save and load all of a model. If not, a warning says why the framework does it.
    Collective."""

    def why_not() -> str:
        try:
            adapt(state).refuse_unsupported(drop_gradients=True, leave_out=True)
        except UnsupportedError as error:
            return str(error)
        return ""

    ranks = Ranks(group_of(state), call=framework)
    reason = ranks.decide(why_not, lambda reasons: next(filter(None, reasons), ""), "look at the model")
    if reason and ranks.rank == 0:
        leave_to(framework, reason)
    return not reason


def leave_to(framework: str, reason: str) -> None:
    """Gives a warning, once, that a framework saves and loads a model itself."""
    if reason not in _told:
        _told.add(reason)
        warn(f"{framework} itself saves and loads this model: {reason}")


def save_model(
    state: TrainState,
    run: str,
    name: str,
    framework: str,
    *,
    only_weights: bool = False,
    client_state: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> None:
    """Writes a checkpoint of a model, whose ``state`` is that of ``attach_state``. Collective.

    ``run``: the directory that the framework has made for this save. ``name``: the name of the checkpoint in it.
    ``framework``: the name of the framework, for error messages. ``only_weights``: whether nothing of the optimizer is
    saved. ``client_state``: what the framework saves beside the model. ``step``: as for ``zckpt.write``.
    """
    saves, path = saves_of(state), str(Location.of(run).child(name))
    ranks = Ranks(group_of(state), call=framework)
    assert saves
    assert _options
    options = replace(_options.of_writes, client_state=client_state, step=step)
    if only_weights:
        write_engine(state, path, replace(options, exclude=moments(state), run=run))
    else:
        save(state, saves, options, run, path, ranks)
    if ranks.first(lambda: bool(_pytorchs(run, name)), "look for other files") and ranks.rank == 0:
        reason = f"{run} has a checkpoint of PyTorch too, which {framework} loads if the script runs without zckpt"
        if reason not in _told:
            _told.add(reason)
            warn(f"{reason}; choose another directory, or remove the older files")


def load_model(
    state: TrainState,
    run: str,
    name: str,
    framework: str,
    what: Literal["all", "weights", "optimizer"] = "all",
    *,
    strict: bool = True,
) -> Restored | None:
    """Restores a model from a checkpoint, and returns what ``zckpt.restore`` returns. Returns None if neither the
    directory nor that of its copies has a checkpoint of zckpt, and if a later save of the framework itself has put
    PyTorch's files beside it. Collective.

    The first four arguments are those of ``save_model``. ``what``: all of the state; only the weights; or all that
    belongs to the optimizer, after a call has restored the weights. ``strict``: as for ``zckpt.restore``.
    """
    saves, ranks = saves_of(state), Ranks(group_of(state), call=framework)
    assert saves
    weights_from, saves.weights_from = saves.weights_from, None
    wait_for(ranks)  # A write in the background may be about to commit the checkpoint.
    found = choose_copy(saves, Location.of(run).absolute(), name, ranks)
    place = str(Location.of(run).child(name)) if found is None else found[0]

    def look() -> tuple[list[str], int] | None:
        if _is_older_than_pytorchs(run, name):
            return None
        try:
            checkpoint = open_loader(place) if isinstance(place, str) else open_chosen(place)
        except UnfinishedWriteError:
            raise
        except CheckpointNotFoundError:
            return None
        return [*checkpoint.parts], checkpoint.manifest.step

    there = ranks.decide(look, lambda found: next(filter(None, found), None), "look for the checkpoint")
    if there is None:
        return None
    parts, step = there
    request = Request(
        strict=strict, settings=saves.settings, own_client_state=True, all_moments=True, leave_out=True
    )  # fmt: skip
    if what == "weights":
        request = replace(request, parts=[part for part in parts if part in WEIGHT_PARTS])
        saves.weights_from = run, step
    else:
        saves.begin_anew()
    if what == "optimizer":
        request = replace(request, state=("counters", "optimizer"))
        if weights_from is None or weights_from[0] != run or weights_from[1] == step:
            others = [part for part in parts if part not in WEIGHT_PARTS]
            request = replace(request, parts=others, has_weights=True)
        elif ranks.rank == 0:  # A save into this directory was cut off between the two checkpoints.
            warn(
                f"the weights in {run} are of step {weights_from[1]}, and the optimizer's state is of step {step}: "
                f"the weights of {name}, which belong to it, are restored too"
            )
    restored, _ = restore_engine(state, place, request)
    if what != "weights":
        saves.end(0, run)
    return restored


def take_step(state: TrainState) -> None:
    """Sets the number of steps to that of the optimizer, after a framework has loaded a checkpoint itself."""
    steps = [
        int(of_parameter["step"])
        for optimizer in state.optimizers
        for of_parameter in optimizer.state.values()
        if "step" in of_parameter
    ]
    if steps:
        state.restored(max(steps))


def _is_older_than_pytorchs(run: str, name: str) -> bool:
    """Returns whether PyTorch has written its own files to the same directory after zckpt, because the framework saved
    without zckpt meanwhile."""
    manifest = open_store(run).entry(f"{name}/{names.MANIFEST}")
    return manifest is not None and any(other.changed_at > manifest.changed_at for other in _pytorchs(run, name))


def _pytorchs(run: str, name: str) -> list[Entry]:
    """Returns the last files of PyTorch's own checkpoints in a directory of a framework."""
    store = open_store(run)
    found = (store.entry(_DCP_METADATA), store.entry(f"{name}/{_DCP_METADATA}"))
    return [entry for entry in found if entry is not None]
