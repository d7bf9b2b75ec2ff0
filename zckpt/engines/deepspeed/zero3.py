"""ZeRO stage 3: every private attribute of ``DeepSpeedZeroOptimizer_Stage3`` that is read or written, and nothing else.

P = ranks, N = elements of a parameter. Each parameter is cut on its own into P partitions of ceil(N / P) elements; what
lies behind N in the last ones is padding, never initialised. Master weights and moments of a *sub-group* of parameters
are one flat; the weights in the compute dtype are ``ds_tensor`` of each parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.deepspeed.flats import Flat, Slot, foreign

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Zero3:
    """The wrapper around the optimizer; ``wrapper.Wrapper`` says what each member is for."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._wrapper = wrapper
        self._rank = torch.distributed.get_rank()
        self._parameters: Mapping[str, Any] = parameters
        self.flats = self._flats()

    @staticmethod
    def unsupported(wrapper: Any, parameters: Mapping[str, Any]) -> Iterator[str]:
        everyone = list(range(torch.distributed.get_world_size()))
        groups: dict[int, tuple[Any, str]] = {}
        for name, parameter in parameters.items():
            if getattr(parameter, "ds_tensor", None) is None:
                yield f"a parameter that ZeRO does not partition: {name}"
                return
            groups.setdefault(id(parameter.ds_process_group), (parameter.ds_process_group, name))
        for group, name in groups.values():
            ranks = torch.distributed.get_process_group_ranks(group)
            if ranks != everyone:
                yield f"a partition group other than all ranks in order: {name} lies on ranks {ranks}"
                return
        yield from foreign(parameters, (parameter for group in wrapper.fp16_groups for parameter in group))

    @staticmethod
    def has_gradients(wrapper: Any) -> bool:
        return any(gradients is not None for gradients in wrapper.averaged_gradients.values())

    @property
    def optimizer(self) -> Any:
        return self._wrapper.optimizer

    def weight(self, name: str) -> tuple[Slot, torch.Tensor]:
        parameter = self._parameters[name]
        slot = self._slot(name, 0)
        return slot, parameter.ds_tensor.detach().narrow(0, 0, slot.stop - slot.start)

    def before_restore(self) -> None:
        # Gives up every gathered parameter, so that only partitions hold weights.
        self._wrapper.checkpoint_event_prologue()

    def after_restore(self, weights_from_param: frozenset[str]) -> None:
        wrapper = self._wrapper
        for index, flat in enumerate(self.flats):
            for slot in flat.slots:
                if slot.name in weights_from_param:
                    partition = self._parameters[slot.name].ds_tensor.detach()
                    flat.master.detach().narrow(0, slot.offset, partition.numel()).copy_(partition)
            wrapper._reassign_or_swap_out_partitioned_parameters(index)
        wrapper.averaged_gradients = {}
        wrapper.zero_grad()  # also puts micro_step_id back to 0
        wrapper.overflow = False
        wrapper.checkpoint_event_epilogue()  # gathers the persistent parameters anew

    def _flats(self) -> tuple[Flat, ...]:
        wrapper = self._wrapper
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        flats = []
        for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
            slots, offset = [], 0
            for parameter in wrapper.fp16_groups[index]:
                slots.append(self._slot(names[id(parameter)], offset))
                offset += parameter.partition_numel()
            flats.append(Flat(wrapper.sub_group_to_group_id[index], tuple(slots), master))
        return tuple(flats)

    def _slot(self, name: str, offset: int) -> Slot:
        parameter = self._parameters[name]
        length = parameter.partition_numel()
        start = min(self._rank * length, parameter.ds_numel)
        stop = min(start + length, parameter.ds_numel)
        return Slot(name, tuple(parameter.ds_shape), start, stop, offset)
