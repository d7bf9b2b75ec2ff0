"""Saves and loads the FSDP2 models of frameworks, which have no engine whose methods could be replaced. A framework is
taught by replacing the functions with which it saves and loads a model (``accelerate_fsdp``, ``lightning_fsdp``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zckpt.api.attached import choose_copy, moments, save
from zckpt.api.open import open as open_checkpoint
from zckpt.api.open import open_chosen
from zckpt.api.restore import Restored, restore_engine
from zckpt.api.write import write_engine
from zckpt.engines import adapt, group_of
from zckpt.engines.pytorch.train_state import kept_state, train_state_of
from zckpt.errors import CheckpointNotFoundError, UnfinishedWriteError, UnsupportedError, warn
from zckpt.format import names
from zckpt.ranks.collectives import Ranks
from zckpt.restoring.plan import Request
from zckpt.state.inventory import RESERVED_PARTS
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store
from zckpt.writing.saves import Saves, saves_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal

    from zckpt.engines.pytorch.train_state import TrainState
    from zckpt.writing.options import WriteOptions

_DCP_METADATA = ".metadata"
"""The file that PyTorch's distributed checkpoint writes last."""
_told: set[str] = set()
"""The warnings that were given already."""


class _Takeover:
    """What ``attach_all`` has been called with."""

    options: WriteOptions | None = None
    """The options of the writes, or None if the frameworks save and load these models themselves."""
    full_every = 1
    settings = "checkpoint"
    on_attach: Callable[[Any], None] | None = None


def take_over(options: WriteOptions, full_every: int, settings: str, on_attach: Callable[[Any], None] | None) -> None:
    """Makes zckpt save and load the FSDP2 models of frameworks from now on. A second call changes nothing.

    Args:
        options: the options of the writes.
        full_every: every how many saves hold the whole state, as for ``zckpt.attach``.
        settings: as for ``zckpt.restore``.
        on_attach: a function that is called with each new TrainState, or None.
    """
    if _Takeover.options is None:
        _Takeover.options, _Takeover.full_every = options, full_every
        _Takeover.settings, _Takeover.on_attach = settings, on_attach


def attached_state(model: Any, optimizers: Any) -> TrainState:
    """Returns the TrainState with which zckpt saves and loads a model. It is made when it is first asked for, which
    should be before the first step, because it counts the steps.

    Args:
        model: the model, as the framework trains it.
        optimizers: its optimizer, or a sequence of optimizers. None or an empty sequence is for a model that is only
            evaluated.
    """
    state = train_state_of(model, optimizers)
    if saves_of(state) is None:
        assert _Takeover.options, "somebody has called take_over"
        Saves(state, _Takeover.full_every, _Takeover.settings, _Takeover.options.copy_to)
        if state.optimizers and _Takeover.on_attach is not None:
            _Takeover.on_attach(state)
    return state


def attached_engine(model: Any) -> Any:
    """Returns the object that ``zckpt.write`` takes for a model of a framework: the TrainState of an FSDP2 model, if
    there is one, or else the model itself, which may be an engine of DeepSpeed."""
    kept = kept_state(model) if isinstance(model, torch.nn.Module) else None
    return kept or model


def is_taken_over() -> bool:
    """Returns whether zckpt saves and loads the FSDP2 models of frameworks."""
    return _Takeover.options is not None


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
    reason = next(filter(None, ranks.share(why_not, "look at the model")), "")
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
    weights: bool = False,
    client_state: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint of a model. Collective.

    Args:
        state: the TrainState of the model.
        run: the directory that the framework has made for this save.
        name: the name of the checkpoint in this directory.
        framework: the name of the framework, for error messages.
        weights: whether only the weights are saved, and nothing of the optimizer.
        client_state: what the framework saves beside the model.
    """
    saves, path = saves_of(state), str(Location.of(run).child(name))
    assert saves, "the state is that of attached_state"
    assert _Takeover.options, "somebody has called take_over"
    options = replace(_Takeover.options, client_state=client_state)
    if weights:
        write_engine(state, path, replace(options, exclude=moments(state), run=run))
    else:
        save(state, saves, options, run, path, Ranks(group_of(state), call=framework))


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

    Args:
        state: the TrainState of the model.
        run: the directory that the framework has made for the save.
        name: the name of the checkpoint in this directory.
        framework: the name of the framework, for error messages.
        what: all of the state; only the weights; or all that belongs to the optimizer, after a call has restored the
            weights.
        strict: as for ``zckpt.restore``.
    """
    saves, ranks = saves_of(state), Ranks(group_of(state), call=framework)
    assert saves, "the state is that of attached_state"
    found = choose_copy(saves, Location.of(run).absolute(), name, ranks)
    place = str(Location.of(run).child(name)) if found is None else found[0]

    def look() -> list[str] | None:
        if _is_older_than_pytorchs(run, name):
            return None
        try:
            return list((open_checkpoint(place) if isinstance(place, str) else open_chosen(place)).parts)
        except UnfinishedWriteError:
            raise
        except CheckpointNotFoundError:
            return None

    parts = next((parts for parts in ranks.share(look, "look for the checkpoint") if parts is not None), None)
    if parts is None:
        return None
    trees = None if what == "all" else () if what == "weights" else ("counters", "optimizer")
    request = Request(
        parts=None if what == "all" else [part for part in parts if (part in RESERVED_PARTS) == (what == "weights")],
        state=trees, strict=strict, settings=saves.settings, own_client_state=True, all_moments=True, leave_out=True,
        has_weights=what == "optimizer",
    )  # fmt: skip
    return restore_engine(state, place, request)[0]


def _is_older_than_pytorchs(run: str, name: str) -> bool:
    """Returns whether PyTorch has written its own files to the same directory after zckpt, because the framework saved
    without zckpt meanwhile."""
    store = open_store(run)
    manifest = store.entry(f"{name}/{names.MANIFEST}")
    others = (store.entry(_DCP_METADATA), store.entry(f"{name}/{_DCP_METADATA}"))
    return manifest is not None and any(
        other is not None and other.changed_at > manifest.changed_at for other in others
    )
