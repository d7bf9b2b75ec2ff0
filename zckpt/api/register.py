"""Objects that are saved and restored with an engine, whoever calls for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.engines import adapt
from zckpt.engines.registered import registered

if TYPE_CHECKING:
    from zckpt.engines.registered import Stateful

_METHODS = ("state_dict", "load_state_dict")


def register(engine: object, name: str, stateful: Stateful) -> None:
    """Has the state of an object, such as a data loader's position, saved and restored with the engine, on each rank.

    Each rank registers its own object, under the same ``name``. From now on ``zckpt.write`` and the
    ``save_checkpoint`` of an attached engine keep what its ``state_dict()`` returns: plain values, tensors and arrays,
    as ``rank_state`` of ``zckpt.write`` does, by ``name``. ``zckpt.restore`` and ``load_checkpoint`` give it back to
    ``load_state_dict`` on the same rank, last of all, once the engine is restored on every rank. A restore of chosen
    parts, such as a warm start of the weights, leaves the object alone.

    **An object that does not exist yet at the restore** may be registered later, before the engine's next step, and
    gets its state at once. If the checkpoint has a state that nobody has taken when that step comes, a warning says so.
    **A checkpoint without a state of that name**, for an object that was registered before the restore, is a
    MismatchError on every rank, before anything is changed; with ``strict=False`` it is a warning. To begin anew with
    such an object, register it after the restore. **Another number of ranks** than the writer's: no rank gets a state,
    and a warning says so; ``Checkpoint.client_rank_state`` returns those of all ranks of the writer, to be divided
    anew. **An error of one object** on one rank is an error on every rank, except in a late ``register``.

    The engine keeps the object alive, and nothing keeps the engine alive. To register the same object again changes
    nothing.

    Raises ValueError for a name that another object has, TypeError for an object without these methods and for a name
    that is no string, and UnsupportedError for an engine that zckpt does not know.
    """
    adapt(engine)
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    missing = [method for method in _METHODS if not callable(getattr(stateful, method, None))]
    if missing:
        raise TypeError(
            f"{type(stateful).__name__} has no {' and no '.join(missing)}, so it cannot be registered as {name!r}; "
            "torchdata.stateful_dataloader.StatefulDataLoader is a data loader that has both"
        )
    own = registered(engine)
    if own.objects.setdefault(name, stateful) is not stateful:
        raise ValueError(f"another object is registered as {name!r} with this engine: choose another name")
    if name in own.unclaimed:
        states = dict(own.unclaimed)
        stateful.load_state_dict(states.pop(name))
        own.unclaimed = states
