"""What the kinds of wrapper have in common; it is all that most of them need where there is no optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from zckpt.engines.deepspeed.flats import part_of_state
from zckpt.engines.tensors import holdings
from zckpt.state.inventory import GRADIENT, MASTER, PARAM, Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from zckpt.engines.deepspeed.flats import Flat
    from zckpt.engines.deepspeed.group import RankGroup


class Kind:
    """``wrapper.Wrapper`` says what each member is for."""

    flats: tuple[Flat, ...] = ()
    MEMORY: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The wrapper's attributes with tensors, or collections of them, by part. Those whose storages the masters, their
    state and the parameters have too are left out. Not every version of DeepSpeed has each attribute."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        self._wrapper = wrapper
        self._parameters: Mapping[str, Any] = parameters
        self._group = group

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        return False

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        return True

    @property
    def optimizer(self) -> Any:
        return None

    def memory(self) -> Iterator[Holding]:
        for flat in self.flats:
            name = next(iter(flat.names), "")
            state = {MASTER: flat.master, **self.optimizer.state.get(flat.master, {}), GRADIENT: flat.master.grad}
            for key, value in state.items():
                file = flat.files.get(key)
                part = part_of_state(key)
                yield from (
                    holdings(part, name, value) if file is None else [Holding(part, name, file, flat.master.dtype)]
                )
        for name, parameter in self._parameters.items():
            yield from holdings(PARAM, name, parameter)
            yield from holdings(GRADIENT, name, [parameter.grad, getattr(parameter, "grad_accum", None)])
        for part, attributes in self.MEMORY.items():
            for attribute in attributes:
                yield from holdings(part, attribute, getattr(self._wrapper, attribute, None))

    def settle(self) -> None:
        pass

    def after_write(self) -> None:
        pass

    def flat_in_memory(self, flat: Flat) -> AbstractContextManager[Flat]:
        return nullcontext(flat)

    @property
    def _offloaded_states(self) -> frozenset[Any]:
        """What offload_states() has moved, as members of DeepSpeed's OffloadStateTypeEnum."""
        return frozenset(getattr(self._wrapper, "offloaded_states", ()))

    def _zero_master_gradients(self) -> None:
        """Zeroes the gradients of the masters. With an offloaded optimizer, they are the buffer for those of the next
        step."""
        for flat in self.flats:
            if flat.master.grad is not None:
                flat.master.grad.zero_()
