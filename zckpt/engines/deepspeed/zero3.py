"""ZeRO stage 3: every private attribute of ``DeepSpeedZeroOptimizer_Stage3`` that is read or written, and nothing else.

P = ranks, N = elements of a parameter. Each parameter is cut on its own into P partitions of ceil(N / P) elements; what
lies behind N in the last ones is padding, never initialised. Master weights and moments of a *sub-group* of parameters
are one flat; the weights in the compute dtype are ``ds_tensor`` of each parameter. Both may lie in files (nvme.py).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.engines.deepspeed.flats import Flat, Slot, foreign, part_of
from zckpt.engines.deepspeed.group import ranks_of
from zckpt.engines.deepspeed.nvme import OptimizerFiles, ParameterFiles
from zckpt.state.inventory import MASTER, PARAM, FileSpan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

    from zckpt.engines.deepspeed.group import RankGroup


class Zero3:
    """The wrapper around the optimizer; ``wrapper.Wrapper`` says what each member is for."""

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        self._wrapper = wrapper
        self._rank = group.rank
        self._parameters: Mapping[str, Any] = parameters
        self._files = OptimizerFiles(wrapper)
        self._moved: frozenset[Any] = frozenset()
        self.flats = self._flats()

    @staticmethod
    def unsupported(wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        groups: dict[int, tuple[Any, str]] = {}
        for name, parameter in parameters.items():
            if getattr(parameter, "ds_tensor", None) is None:
                yield f"a parameter that ZeRO does not partition: {name}"
                return
            groups.setdefault(id(parameter.ds_process_group), (parameter.ds_process_group, name))
        for handle, name in groups.values():
            ranks = ranks_of(handle)
            if ranks != group.ranks:
                yield f"a partition group other than the engine's ranks in order: {name} lies on ranks {list(ranks)}"
                return
        yield from foreign(parameters, (parameter for group in wrapper.fp16_groups for parameter in group))

    @staticmethod
    def has_gradients(wrapper: Any) -> bool:
        pending = any(gradients is not None for gradients in wrapper.averaged_gradients.values())
        # Where the optimizer is offloaded, gradients lie elsewhere; these say that there has been a backward.
        return pending or wrapper.micro_step_id > 0 or getattr(wrapper, "_epilogue_ran_this_backward", False)

    @property
    def optimizer(self) -> Any:
        return self._wrapper.optimizer

    def tier(self, part: str) -> str:
        wrapper, moved = self._wrapper, {state.name for state in self._offloaded_states}
        if part == PARAM:
            return "host" if wrapper.offload_param or "lp_params" in moved else "device"
        state = "hp_params" if part == MASTER else "optim_states"
        return "host" if wrapper.offload_optimizer or state in moved else "device"

    def weight(self, name: str) -> tuple[Slot, torch.Tensor | FileSpan]:
        parameter = self._parameters[name]
        slot = self._slot(name, 0)
        data: torch.Tensor | FileSpan | None = ParameterFiles.of(parameter)
        if data is None:
            data = self._moved_weight(name)
        if data is None:
            data = parameter.ds_tensor.detach()
        return slot, part_of(data, 0, slot.stop - slot.start, parameter.dtype)

    def settle(self) -> None:
        self._files.settle()
        for parameter in self._parameters.values():
            ParameterFiles.settle(parameter)

    def before_restore(self) -> None:
        # Gives up every gathered parameter, so that only partitions hold weights.
        self._moved = self._offloaded_states
        if self._moved:
            self._wrapper.reload_states()
        self._wrapper.checkpoint_event_prologue()
        self.settle()

    @contextmanager
    def flat_in_memory(self, flat: Flat) -> Iterator[Flat]:
        with self._files.in_memory(self.flats.index(flat)):
            yield replace(flat, files={})
            self._derive_weights(flat)

    @contextmanager
    def weight_in_memory(self, name: str) -> Iterator[torch.Tensor]:
        slot = self._slot(name, 0)
        with ParameterFiles.rewrite(self._parameters[name]) as data:
            yield data.narrow(0, 0, slot.stop - slot.start)

    def after_fill(self, weights: Collection[str]) -> None:
        wrapper = self._wrapper
        for flat in self.flats:
            if not flat.files:
                self._derive_weights(flat)
        self._drop_gradients()
        wrapper.overflow = False

    def after_restore(self) -> None:
        wrapper = self._wrapper
        wrapper.checkpoint_event_epilogue()  # gathers the persistent parameters anew
        if self._moved:
            pinned = hasattr(wrapper, "hp_params_pin_buffers") or hasattr(wrapper, "lp_param_contiguous_pin_buffer")
            wrapper.offload_states(include=self._moved, pin_memory=pinned)

    def _drop_gradients(self) -> None:
        wrapper = self._wrapper
        wrapper.zero_grad()  # also puts micro_step_id back to 0
        wrapper.averaged_gradients = {}
        wrapper._offload_boundary_param_ids = set()
        wrapper.grad_partitions_flat_buffer.zero_()
        for flat in self.flats:
            if flat.master.grad is not None:  # with offload, the buffer for the next step's
                flat.master.grad.zero_()

    @property
    def _offloaded_states(self) -> frozenset[Any]:
        """What offload_states() has moved, as members of DeepSpeed's OffloadStateTypeEnum."""
        return frozenset(getattr(self._wrapper, "offloaded_states", ()))

    def _derive_weights(self, flat: Flat) -> None:
        self._wrapper._reassign_or_swap_out_partitioned_parameters(self.flats.index(flat))

    def _moved_weight(self, name: str) -> torch.Tensor | None:
        """The partition of an optimized parameter while offload_states() has its weight: in between, ``ds_tensor``
        belongs to another parameter wherever the optimizer's order is not the module's."""
        if not any(state.name == "lp_params" for state in self._offloaded_states):
            return None
        offset = 0
        for flat in self.flats:
            for slot in flat.slots:
                length = self._parameters[slot.name].partition_numel()
                if slot.name == name:
                    buffer: torch.Tensor = self._wrapper.lp_param_buffer
                    return buffer.detach().narrow(0, offset, length)
                offset += length
        return None

    def _flats(self) -> tuple[Flat, ...]:
        wrapper = self._wrapper
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        flats = []
        for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
            slots, offset = [], 0
            for parameter in wrapper.fp16_groups[index]:
                slots.append(self._slot(names[id(parameter)], offset))
                offset += parameter.partition_numel()
            group = wrapper.sub_group_to_group_id[index]
            flats.append(Flat(group, tuple(slots), master, self._files.of(index)))
        return tuple(flats)

    def _slot(self, name: str, offset: int) -> Slot:
        parameter = self._parameters[name]
        length = parameter.partition_numel()
        start = min(self._rank * length, parameter.ds_numel)
        stop = min(start + length, parameter.ds_numel)
        return Slot(name, tuple(parameter.ds_shape), start, stop, offset)
