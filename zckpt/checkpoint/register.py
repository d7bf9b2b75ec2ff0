"""Registers objects that are saved and restored together with an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.engines import adapt, engine_of
from zckpt.engines.registered import registered

if TYPE_CHECKING:
    from zckpt.engines.registered import Stateful

_METHODS = ("state_dict", "load_state_dict")


def register(engine: object, name: str, stateful: Stateful) -> None:
    """Makes every save and restore of the engine include the state of an object, such as a data loader.

    Each rank registers its own object under the same name. From now on ``zckpt.write`` and the ``save_checkpoint`` of
    an attached engine save what the object's ``state_dict()`` returns on each rank. ``zckpt.restore`` and
    ``load_checkpoint`` pass it to ``load_state_dict`` on the same rank, after the engine is restored on every rank. A
    restore of some parts, such as a warm start of the weights, leaves the object alone.

    An object that does not exist at the restore may be registered later, before the engine's next step. It then gets
    its state at once. If the checkpoint has a state that no object has taken by this step, a warning says so.

    If an object is registered before the restore, and the checkpoint has no state of its name, the restore raises
    MismatchError on every rank and changes nothing. With ``strict=False`` it gives a warning instead. If such an object
    is to begin anew, register it after the restore. If the number of ranks differs from that of the writer, no rank
    gets a state, and a warning says so. ``Checkpoint.client_rank_state`` returns the states of all ranks of the writer,
    so that they can be divided anew. If ``state_dict()`` or ``load_state_dict`` fails on one rank, every rank raises an
    error. Only a ``load_state_dict`` during a late ``register`` fails on its rank alone.

    The engine keeps the object alive, and nothing keeps the engine alive. Registering the same object a second time
    changes nothing.

    Args:
        engine: the engine that ``deepspeed.initialize`` has returned, a ``zckpt.TrainState``, or a tuple as for
            ``zckpt.write``.
        name: the name of the state. It has to be the same on all ranks.
        stateful: an object with the methods ``state_dict()``, which returns plain values, tensors and arrays, and
            ``load_state_dict(state)``, such as torchdata's ``StatefulDataLoader``.

    Raises:
        ValueError: another object is registered under this name.
        TypeError: the object does not have both methods, or the name is not a string.
        UnsupportedError: zckpt does not support engines of this kind.
    """
    engine = engine_of(engine)
    adapt(engine)
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    missing = [method for method in _METHODS if not callable(getattr(stateful, method, None))]
    if missing:
        raise TypeError(
            f"{type(stateful).__name__} has no {' and no '.join(missing)}, so it cannot be registered as {name!r}; "
            "torchdata.stateful_dataloader.StatefulDataLoader is a data loader that has both"
        )
    of_engine = registered(engine)
    if of_engine.objects.setdefault(name, stateful) is not stateful:
        raise ValueError(f"another object is registered as {name!r} with this engine: choose another name")
    if name in of_engine.unclaimed:
        states = dict(of_engine.unclaimed)
        stateful.load_state_dict(states.pop(name))
        of_engine.unclaimed = states
