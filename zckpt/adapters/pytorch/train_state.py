"""A model and its optimizer as one object, for training without a framework that has an engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.shards import is_sharded
from zckpt.engines.tensors import is_zero, local_of, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRAIN_STATE = "_zckpt_train_state"
"""The attribute of a model, without its wrappers, that has the ``_Kept`` of the TrainState which was made for it
last."""
SAMPLED_GRADIENTS = 16
"""How many gradients are looked at to find out whether there has been a backward pass since the last step."""


class TrainState:
    """A model, its optimizer and its scheduler, which zckpt writes and restores together. Make one on every rank,
    before the training begins, and keep it:

        state = zckpt.TrainState(model, optimizer, scheduler)
        if resume:
            zckpt.restore(state, "checkpoints")
        ...
        zckpt.write(state, f"checkpoints/step{state.step}")

    The model may be a plain module, or be wrapped by ``DistributedDataParallel``, ``fully_shard`` (FSDP2) or
    ``torch.compile``. Its weights may be a mixture of whole tensors and DTensors.

    Args:
        model: the model.
        optimizer: its optimizer, or several optimizers that each update some of its weights. None is for a model that
            is only evaluated.
        scheduler: the scheduler of the learning rate, or None.
        step: the number of steps that the optimizer has taken before.
    """

    _sharded_states = 0
    """How many objects of this class in this process have had a model that is sharded."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        scheduler: Any = None,
        *,
        step: int = 0,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
        self.model = model
        self.optimizers: tuple[torch.optim.Optimizer, ...] = _optimizers(optimizer)
        for each in self.optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise TypeError(f"optimizer is a {type(each).__name__}, not a torch.optim.Optimizer")
        self.scheduler = scheduler
        self.number = 0
        """If the model is sharded: how many such objects were made before this one and with it. It is the same on every
        rank, because every rank takes part in the sharding of a model."""
        if any(map(is_sharded, model.parameters())):
            TrainState._sharded_states += 1
            self.number = TrainState._sharded_states
        self._step, self._counts = int(step), True
        self._used = self._some_gradients()
        """References to some of the gradients that the last step has used, each with the number of changes that torch
        had counted then. Gradients that are there before this object is made count as used."""
        if self.optimizers:
            self.optimizers[0].register_step_post_hook(_method(self, "_stepped"))
        setattr(unwrapped(model), _TRAIN_STATE, _Kept(self))

    @property
    def step(self) -> int:
        """The number of steps that the optimizer has taken. With several optimizers, those of the first one are
        counted. Assign a number to count the steps yourself from then on."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step, self._counts = int(value), False

    def restored(self, step: int) -> None:
        """Sets the number of steps to that of a checkpoint. Whoever has counted the steps goes on counting them.

        Args:
            step: the number of steps.
        """
        self._step = step
        self._used = []

    def has_gradients(self) -> bool:
        """Returns whether this rank has gradients that no step has used yet. Gradients that were there before this
        object was made count as used."""
        unchanged = [(reference(), version) for reference, version in self._used]
        if unchanged and all(grad is not None and grad._version == version for grad, version in unchanged):
            return False  # The last step has used them, and nobody has cleared them since.
        return any(not is_zero(gradient) for gradient in self._gradients())

    def _stepped(self) -> None:
        if self._counts:
            self._step += 1
        self._used = self._some_gradients()

    def _some_gradients(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        gradients = islice(self._gradients(), SAMPLED_GRADIENTS)
        return [(weakref.ref(gradient), gradient._version) for gradient in gradients]

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Yields what this rank holds of each gradient that a step would use."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        yield local_of(parameter.grad)


class _Kept:
    """What a model has of its TrainState. A copy of the model, such as one for averaged weights, or one in a pickle,
    has nothing of it. Otherwise it would have a copy of the optimizer too."""

    def __init__(self, state: TrainState | None = None) -> None:
        self.state = state

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def train_state_of(model: torch.nn.Module, optimizer: Any, scheduler: Any = None) -> TrainState:
    """Returns the TrainState that was made for these objects before, or else a new one. An optimizer that a framework
    has wrapped, as Accelerate does, counts as the one inside. Raises TypeError."""
    kept = kept_state(model) if isinstance(model, torch.nn.Module) else None
    optimizers = _optimizers(optimizer)
    inside = tuple(getattr(each, "optimizer", each) for each in optimizers)
    if kept is not None and kept.scheduler is scheduler and kept.optimizers in (optimizers, inside):
        return kept
    return TrainState(model, optimizer, scheduler)


def kept_state(model: torch.nn.Module) -> TrainState | None:
    """Returns the TrainState that was made for a model last, or None."""
    kept: _Kept | None = getattr(unwrapped(model), _TRAIN_STATE, None)
    return None if kept is None else kept.state


def _optimizers(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)


def _method(owner: object, name: str) -> Any:
    """Returns a function that calls a method of an object, as long as the object exists."""
    reference = weakref.ref(owner)

    def call(*_: Any) -> None:
        living = reference()
        if living is not None:
            getattr(living, name)()

    return call
