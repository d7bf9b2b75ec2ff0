"""The base class of the classes that read and restore DeepSpeed's optimizer wrappers, one for each kind of wrapper. It
has what all of them share, which is also most of what an engine without an optimizer needs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from zckpt.engines.deepspeed.flats import moments, part_of_state
from zckpt.engines.tensors import holdings
from zckpt.state.inventory import GRADIENT, MASTER, PARAM, Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from zckpt.engines.deepspeed.flats import FlatBuffer
    from zckpt.engines.deepspeed.group import RankGroup


class Kind:
    """What the classes for all kinds of wrapper share. ``wrapper.Wrapper`` documents the members."""

    flats: tuple[FlatBuffer, ...] = ()
    MEMORY: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each part, the names of those attributes of the wrapper that are tensors or collections of tensors.
    Attributes whose storages also belong to master weights, to their optimizer state or to parameters are left out.
    Some versions of DeepSpeed do not have all of these attributes."""

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
            state = self.optimizer.state.get(flat.master, {})
            fragments = {MASTER, GRADIENT, *moments(flat, state)}
            for key, value in {MASTER: flat.master, **state, GRADIENT: flat.master.grad}.items():
                file = flat.files.get(key)
                part = part_of_state(key)
                if file is None:
                    yield from holdings(part, name, value, in_tree=part not in fragments)
                else:
                    yield Holding(part, name, file, flat.master.dtype)
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

    def after_masters(self) -> None:
        pass

    def flat_in_memory(self, flat: FlatBuffer) -> AbstractContextManager[FlatBuffer]:
        return nullcontext(flat)

    @property
    def _offloaded_states(self) -> frozenset[Any]:
        """The states that DeepSpeed's offload_states() has moved to host memory, as members of its
        ``OffloadStateTypeEnum``."""
        return frozenset(getattr(self._wrapper, "offloaded_states", ()))

    def _zero_master_gradients(self) -> None:
        """Sets the gradients of the master weights to zero. If the optimizer is offloaded, DeepSpeed uses these tensors
        as buffers for the gradients of the next step, so they must keep existing."""
        for flat in self.flats:
            if flat.master.grad is not None:
                flat.master.grad.zero_()
