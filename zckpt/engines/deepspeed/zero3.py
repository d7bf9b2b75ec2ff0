"""ZeRO stage 3: every private attribute of ``DeepSpeedZeroOptimizer_Stage3`` that is read or written, and of
``DeepSpeedZeRoOffload``, which takes its place where there is no optimizer; and nothing else.

P = ranks, N = elements of a parameter. Each parameter is cut on its own into P partitions of ceil(N / P) elements; what
lies behind N in the last ones is padding, never initialised. Master weights and moments of a *sub-group* of parameters
are one flat; the weights in the compute dtype are ``ds_tensor`` of each parameter. Both may lie in files (nvme.py).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from zckpt.engines.deepspeed.flats import Flat, Slot, cut_alone, cut_each, foreign, part_of
from zckpt.engines.deepspeed.group import ranks_of
from zckpt.engines.deepspeed.kind import Kind
from zckpt.engines.deepspeed.nvme import OptimizerFiles, ParameterFiles
from zckpt.engines.deepspeed.zero12 import uses_muon
from zckpt.engines.tensors import holdings
from zckpt.state.inventory import GRADIENT, MASTER, PARAM, FileSpan, Holding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

    from zckpt.engines.deepspeed.group import RankGroup


class Partitioned(Kind):
    """Weights alone, without an optimizer; ``wrapper.Wrapper`` says what each member is for."""

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
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

    def tier(self, part: str) -> str:
        return "device" if self._wrapper.offload_device is None else "host"

    def weight(self, name: str) -> tuple[Slot, torch.Tensor | FileSpan]:
        parameter = self._parameters[name]
        slot = self._slot(name)
        data: torch.Tensor | FileSpan | None = ParameterFiles.of(parameter)
        if data is None:
            data = self._in_memory(name)
        return slot, part_of(data, 0, slot.stop - slot.start, parameter.dtype)

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for name, parameter in self._parameters.items():
            file = ParameterFiles.of(parameter)
            if file is None:
                yield from holdings(PARAM, name, [parameter.ds_tensor, getattr(parameter, "ds_secondary_tensor", None)])
            else:
                yield Holding(PARAM, name, file, parameter.dtype)

    def settle(self) -> None:
        for parameter in self._parameters.values():
            ParameterFiles.settle(parameter)

    def before_restore(self) -> None:
        # Gives up every gathered parameter, so that only partitions hold weights.
        self._wrapper.empty_partition_cache()
        self.settle()

    @contextmanager
    def weight_in_memory(self, name: str) -> Iterator[torch.Tensor]:
        slot = self._slot(name)
        with ParameterFiles.rewrite(self._parameters[name]) as data:
            yield data.narrow(0, 0, slot.stop - slot.start)

    def after_fill(self, weights: Collection[str]) -> None:
        pass

    def after_restore(self) -> None:
        pass  # the next forward pass gathers what was restored

    def _in_memory(self, name: str) -> torch.Tensor:
        """This rank's partition of a weight that lies in no file, padding and all."""
        partition: torch.Tensor = self._parameters[name].ds_tensor
        return partition.detach()

    def _slot(self, name: str) -> Slot:
        return cut_alone(name, self._parameters[name].ds_shape, self._group.rank, self._group.size)


class Zero3(Partitioned):
    """The wrapper around the optimizer; ``wrapper.Wrapper`` says what each member is for."""

    MEMORY: ClassVar = {
        MASTER: ("hp_params_pin_buffers",),
        PARAM: ("param_groups_fp16_flat_cpu_memory", "lp_param_contiguous_pin_buffer"),
        "momentum_buffer": ("muon_momentum_buffer_partitioned_groups_flat",),
        GRADIENT: (
            "averaged_gradients",
            "grad_partitions_flat_buffer",
            "lp_grad_partitions_flat_pin_buffers",
            "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer",  # before DeepSpeed had ipg_buckets
            "_muon_allgather_buffers",
        ),
    }

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        super().__init__(wrapper, parameters, group)
        self._files = OptimizerFiles(wrapper)
        self._moved: frozenset[Any] = frozenset()
        self.flats = self._flats()

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        yield from super().unsupported(wrapper, parameters, group)
        yield from foreign(parameters, (parameter for group in wrapper.fp16_groups for parameter in group))

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        pending = any(gradients is not None for gradients in wrapper.averaged_gradients.values())
        # If the optimizer is offloaded, gradients lie elsewhere; these two tell that a backward pass has run.
        return pending or wrapper.micro_step_id > 0 or getattr(wrapper, "_epilogue_ran_this_backward", False)

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        # Before DeepSpeed 0.19, Muon's momentum moves on while a backward pass reduces the gradients.
        return hasattr(wrapper, "_apply_muon_to_accumulated_grads") or not uses_muon(wrapper.optimizer)

    @property
    def optimizer(self) -> Any:
        return self._wrapper.optimizer

    def tier(self, part: str) -> str:
        wrapper, moved = self._wrapper, {state.name for state in self._offloaded_states}
        if part == PARAM:
            return "host" if wrapper.offload_param or "lp_params" in moved else "device"
        state = "hp_params" if part == MASTER else "optim_states"
        return "host" if wrapper.offload_optimizer or state in moved else "device"

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for bucket in getattr(self._wrapper, "ipg_buckets", {}).values():
            # Empty, as between two backward passes: each gradient has been reduced into its partition.
            yield from holdings(GRADIENT, "ipg_buckets", bucket.buffer, workspace=not bucket.elements)
        for flat in self.flats:
            yield from self._files.gradients(self._numbers[flat])

    def settle(self) -> None:
        self._files.settle()
        super().settle()

    def after_write(self) -> None:
        if not self._weights_moved:  # If they were moved, there is nothing to gather them from.
            self._wrapper.checkpoint_event_prologue()
            self._wrapper.checkpoint_event_epilogue()  # gathers the persistent parameters

    def before_restore(self) -> None:
        self._moved = self._offloaded_states
        if self._moved:
            self._wrapper.reload_states()
        super().before_restore()

    @contextmanager
    def flat_in_memory(self, flat: Flat) -> Iterator[Flat]:
        with self._files.in_memory(self._numbers[flat]):
            yield replace(flat, files={})
            self._derive_weights(flat)

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
        # A step also uses the gradients of parameters that no backward has reached: they lie here still.
        wrapper.grad_partitions_flat_buffer.zero_()
        self._zero_master_gradients()

    @property
    def _weights_moved(self) -> bool:
        return any(state.name == "lp_params" for state in self._offloaded_states)

    @cached_property
    def _numbers(self) -> dict[Flat, int]:
        """The number of the sub-group that each flat is."""
        return {flat: number for number, flat in enumerate(self.flats)}

    def _derive_weights(self, flat: Flat) -> None:
        self._wrapper._reassign_or_swap_out_partitioned_parameters(self._numbers[flat])

    def _in_memory(self, name: str) -> torch.Tensor:
        # While offload_states() has the weights, ``ds_tensor`` of an optimized parameter belongs to another one
        # wherever the optimizer's order is not the module's.
        if not self._weights_moved or name not in self._offsets:
            return super()._in_memory(name)
        buffer: torch.Tensor = self._wrapper.lp_param_buffer
        return buffer.detach().narrow(0, self._offsets[name], self._parameters[name].partition_numel())

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Where the partition of each optimized parameter begins in the buffer of all weights."""
        names = [slot.name for flat in self.flats for slot in flat.slots]
        lengths = (self._parameters[name].partition_numel() for name in names)
        return dict(zip(names, accumulate(lengths, initial=0), strict=False))

    def _flats(self) -> tuple[Flat, ...]:
        wrapper = self._wrapper
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        flats = []
        for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
            shapes = ((names[id(parameter)], parameter.ds_shape) for parameter in wrapper.fp16_groups[index])
            slots = cut_each(shapes, self._group.rank, self._group.size)
            flats.append(Flat(wrapper.sub_group_to_group_id[index], slots, master, self._files.of(index)))
        return tuple(flats)
