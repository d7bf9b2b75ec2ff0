"""Where an engine keeps its state in memory: the base class of the classes that read and restore it, one for each kind
of place. Such places are a wrapper that DeepSpeed has put around the optimizer, or the optimizer itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from zckpt.adapters.flats import moments, part_of_state
from zckpt.engines.tensors import holdings
from zckpt.plan.inventory import GRADIENT, MASTER, PARAM, Holding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zckpt.adapters.flats import FlatBuffer, ParameterRange
    from zckpt.adapters.local_tensors import LocalTensors
    from zckpt.format.names import Tier
    from zckpt.plan.inventory import FileRange


class Kind:
    """Reads and restores the state in one kind of place. If ``unsupported`` yields a reason for an engine, the
    behaviour of all other methods is undefined for it.

    A restore calls ``before_restore``, ``after_masters``, ``flat_in_memory`` and ``weight_in_memory``, and
    ``after_fill``. Once these have returned on every rank, it calls ``after_restore``.
    """

    flats: tuple[FlatBuffer, ...] = ()
    """All flat buffers of this rank, in the same order on every rank."""
    MEMORY: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each part, the names of those attributes of the wrapper that are tensors or collections of tensors.
    Attributes whose storages also belong to master weights, to their optimizer state or to parameters are left out.
    Some versions of DeepSpeed do not have all of these attributes."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> None:
        """Changes nothing. ``wrapper``: the object that has the state. ``parameters`` and ``local_tensors``: those of
        the module, by name."""
        self._wrapper, self._parameters, self._local_tensors = wrapper, parameters, local_tensors

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        """Yields the reasons why this layout of the parameters is not supported, with names of parameters. Changes
        nothing."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, wrapper: Any, parameters: Mapping[str, Any]) -> Mapping[int, Sequence[int]]:
        """Returns the shape of the local tensor of each parameter whose own shape may be another one, by the id of the
        parameter."""
        return {}

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        """Returns whether there are gradients that no optimizer step has used yet."""
        return False

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        """Returns whether master weights and moments change only in a step of the optimizer, and not in backward
        passes."""
        return True

    @property
    def optimizer(self) -> Any:
        """The optimizer whose state has the master weights of the flat buffers as its keys. It is None if the engine
        has no optimizer. Then there are no flat buffers either."""
        return None

    def tier(self, part: str) -> Tier:
        """Returns the tier on which the tensors of ``part`` are, except for those in swap files."""
        raise NotImplementedError

    def weight(self, name: str) -> tuple[ParameterRange, torch.Tensor | FileRange]:
        """Returns what this rank holds of a parameter, in the dtype that the model computes with: the range of the
        elements, and the elements themselves. They are contiguous and share the memory of the parameter, or they are a
        range of its swap file."""
        raise NotImplementedError

    def stored_name(self, name: str) -> str:
        """Returns the name in a checkpoint of the tensor of which a parameter is all or a part."""
        return self._local_tensors[name].stored_as or name

    def writes_empty(self, name: str) -> bool:
        """Returns whether this rank writes the empty fragment of a parameter without elements."""
        local = self._local_tensors[name]
        return local.owners.rank == 0 and local.writes_partition

    def read_share(self, name: str) -> tuple[ParameterRange, torch.Tensor | FileRange]:
        """Returns what this rank reads of a parameter in a restore, as ``weight`` does. This is less than ``weight``
        returns if other ranks read the rest, and ``after_restore`` exchanges what was read."""
        return self.weight(name)

    def moment_dtype(self, flat: FlatBuffer) -> torch.dtype:
        """Returns the dtype in which the optimizer makes the moments of a flat buffer."""
        # DeepSpeed's optimizers for the CPU may keep fp32 moments of 16-bit master weights.
        return torch.float32 if getattr(self.optimizer, "fp32_optimizer_states", False) else flat.master.dtype

    def memory(self) -> Iterator[Holding]:
        """Returns what ``EngineAdapter.memory`` returns, but without the buffers of the module."""
        states = self.optimizer.state if self.flats else {}
        for flat in self.flats:
            name = flat.ranges[0].name if flat.ranges else ""
            state = states.get(flat.master, {})
            fragments = {MASTER, GRADIENT, *moments(flat, state)}
            for key, value in ((MASTER, flat.master), *state.items(), (GRADIENT, flat.master.grad)):
                if key in flat.files:
                    yield Holding(part_of_state(key), name, flat.files[key], flat.master.dtype)
                elif value is not None:
                    part = part_of_state(key)
                    yield from holdings(part, name, value, in_tree=part not in fragments)
        for name, parameter in self._parameters.items():
            yield from holdings(PARAM, name, parameter)
            for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
                if gradient is not None:
                    yield from holdings(GRADIENT, name, gradient)
        for part, attributes in self.MEMORY.items():
            for attribute in attributes:
                yield from holdings(part, attribute, getattr(self._wrapper, attribute, None))

    def wait_for_swaps(self) -> None:
        """Waits until everything that is being read from files or written to files has been read or written."""

    @staticmethod
    def after_write(wrapper: Any) -> None:
        """Leaves exactly those weights gathered that the framework's own save leaves gathered. Collective."""

    def before_restore(self) -> None:
        """Brings back what the framework has moved away, and gives up copies that the restore would make outdated. Not
        collective."""

    def after_masters(self) -> None:
        """Derives everything that depends only on those master weights of this rank that are in memory, and drops
        gradients. It is called in a thread of its own once these master weights are filled, while moments are being
        filled. Not collective."""

    def flat_in_memory(self, flat: FlatBuffer) -> AbstractContextManager[FlatBuffer]:
        """Returns a context in which a flat buffer that is in swap files is brought into memory, where the caller fills
        it. At the end, everything that depends on it is derived, and it is written back. If the context ends by an
        error, it is not written back."""
        return nullcontext(flat)

    def weight_in_memory(self, name: str) -> AbstractContextManager[torch.Tensor]:
        """Returns a context whose value is memory for this rank's part of a weight that is in a swap file. The caller
        fills the memory. At the end it is written to the file, unless the context ends by an error."""
        raise NotImplementedError

    def after_fill(self, weights: Collection[str]) -> None:
        """Derives everything else that depends on this rank's master weights and moments, and allocates the memory that
        ``after_restore`` needs. ``weights``: the names in the checkpoint of those parameters without master weights
        that were restored. They are the same on every rank. Not collective."""

    def after_restore(self) -> None:
        """Derives everything that depends on the master weights, moments and weights of other ranks, unless the next
        forward pass does so. Collective. Before the last exchange between the ranks, nothing in it can fail on one rank
        alone."""

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
