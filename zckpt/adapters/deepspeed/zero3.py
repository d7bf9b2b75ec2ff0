"""ZeRO stage 3. This file and nvme.py have all code that uses private attributes of DeepSpeed's
``DeepSpeedZeroOptimizer_Stage3``, and of ``DeepSpeedZeRoOffload``, which an engine without an optimizer has instead.

In the following, P is the number of owners (see ``LocalTensor``) and N the number of elements of a local tensor. Each
local tensor is cut on its own into P partitions of ceil(N / P) elements. Beyond element N, the last partitions have
padding, which is never initialised. The master weights and moments of a *sub-group* of parameters are one flat buffer.
The weights in the dtype that the model computes with are the ``ds_tensor`` of each parameter. Both may be in swap files
(see nvme.py).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from zckpt.adapters.deepspeed.nvme import OptimizerFiles, ParameterFiles
from zckpt.adapters.deepspeed.twin_flow import TwinOptimizer
from zckpt.adapters.deepspeed.zero12 import uses_muon
from zckpt.adapters.flats import FlatBuffer, ParameterRange, cut_alone, elements_of, foreign
from zckpt.adapters.kind import Kind
from zckpt.adapters.local_tensors import owner_mismatch
from zckpt.engines.tensors import holdings
from zckpt.format.names import Tier
from zckpt.plan.inventory import GRADIENT, MASTER, PARAM, FileRange, Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from zckpt.adapters.local_tensors import LocalTensors


class Partitioned(Kind):
    """Reads and restores DeepSpeed's ``DeepSpeedZeRoOffload``, which partitions weights and has no optimizer.
    ``Kind`` documents the members."""

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        for name, parameter in parameters.items():
            if getattr(parameter, "ds_tensor", None) is None:
                yield f"a parameter that ZeRO does not partition: {name}"
                return
        owners = ((name, parameter.ds_process_group) for name, parameter in parameters.items())
        yield from owner_mismatch(owners, local_tensors)

    @classmethod
    def shapes(cls, wrapper: Any, parameters: Mapping[str, Any]) -> Mapping[int, Sequence[int]]:
        return {id(parameter): parameter.ds_shape for parameter in parameters.values() if hasattr(parameter, "ds_id")}

    def tier(self, part: str) -> Tier:
        return Tier.DEVICE if self._wrapper.offload_device is None else Tier.HOST

    def weight(self, name: str) -> tuple[ParameterRange, torch.Tensor | FileRange]:
        parameter = self._parameters[name]
        parameter_range = self._parameter_range(name)
        data: torch.Tensor | FileRange | None = ParameterFiles.of(parameter)
        if data is None:
            data = self._in_memory(name)
        return parameter_range, elements_of(data, 0, parameter_range.span.numel, parameter.dtype)

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for name, parameter in self._parameters.items():
            file = ParameterFiles.of(parameter)
            if file is None:
                yield from holdings(PARAM, name, [parameter.ds_tensor, getattr(parameter, "ds_secondary_tensor", None)])
            else:
                yield Holding(PARAM, name, file, parameter.dtype)

    def wait_for_swaps(self) -> None:
        for parameter in self._parameters.values():
            ParameterFiles.wait_for_swaps(parameter)

    def before_restore(self) -> None:
        # After this, no parameter is gathered any more, so only the partitions hold weights.
        self._wrapper.empty_partition_cache()
        for parameter in self._parameters.values():
            # With zero_hpz_partition_size, a forward pass gathers from this copy as long as there is one. DeepSpeed's
            # invalidate_secondary_tensor() leaves those of frozen parameters.
            if getattr(parameter, "ds_secondary_tensor", None) is not None:
                parameter.ds_secondary_tensor = None
        self.wait_for_swaps()

    @contextmanager
    def weight_in_memory(self, name: str) -> Iterator[torch.Tensor]:
        parameter_range = self._parameter_range(name)
        with ParameterFiles.rewrite(self._parameters[name]) as data:
            yield data.narrow(0, 0, parameter_range.span.numel)

    def _in_memory(self, name: str) -> torch.Tensor:
        """Returns this rank's partition of a weight that is not in a swap file, with its padding."""
        partition: torch.Tensor = self._parameters[name].ds_tensor
        return partition.detach()

    def _parameter_range(self, name: str, offset: int = 0) -> ParameterRange:
        """Returns the range of the parameter's elements that this rank's partition holds. ``offset``: the element at
        which the partition begins in its memory."""
        local = self._local_tensors[name]
        own = cut_alone(name, local.span, local.owners.rank, local.owners.size, offset)
        return own._replace(replicated=local.partition_replicated, stored_as=local.stored_as)


class Zero3(Partitioned):
    """Reads and restores DeepSpeed's ``DeepSpeedZeroOptimizer_Stage3``. ``Kind`` documents the members."""

    MEMORY: ClassVar = {
        MASTER: ("hp_params_pin_buffers",),
        PARAM: ("param_groups_fp16_flat_cpu_memory", "lp_param_contiguous_pin_buffer"),
        "momentum_buffer": ("muon_momentum_buffer_partitioned_groups_flat",),
        GRADIENT: (
            "averaged_gradients",
            "grad_partitions_flat_buffer",
            "lp_grad_partitions_flat_pin_buffers",
            "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer",  # only in versions without ipg_buckets
            "_muon_allgather_buffers",
        ),
    }

    def __init__(self, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> None:
        super().__init__(wrapper, parameters, local_tensors)
        self._files = OptimizerFiles(wrapper)
        self._moved: frozenset[Any] = frozenset()
        """The states that were offloaded before the restore, and are offloaded again after it."""
        self.flats = self._flats()

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        yield from super().unsupported(wrapper, parameters, local_tensors)
        yield from foreign(parameters, (parameter for group in wrapper.fp16_groups for parameter in group))

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        pending = any(gradients is not None for gradients in wrapper.averaged_gradients.values())
        # If the optimizer is offloaded, the gradients are elsewhere. Then the last two conditions tell whether a
        # backward pass has run since the last step.
        return pending or wrapper.micro_step_id > 0 or getattr(wrapper, "_epilogue_ran_this_backward", False)

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        # Before DeepSpeed 0.19, Muon changes its momentum outside of a step, while a backward pass reduces gradients.
        return hasattr(wrapper, "_apply_muon_to_accumulated_grads") or not uses_muon(wrapper.optimizer)

    @cached_property
    def optimizer(self) -> Any:
        wrapper = self._wrapper
        return wrapper.optimizer if getattr(wrapper, "backup_optimizer", None) is None else TwinOptimizer(wrapper)

    def tier(self, part: str) -> Tier:
        wrapper, moved = self._wrapper, {state.name for state in self._offloaded_states}
        if part == PARAM:
            return Tier.HOST if wrapper.offload_param or "lp_params" in moved else Tier.DEVICE
        state = "hp_params" if part == MASTER else "optim_states"
        return Tier.HOST if wrapper.offload_optimizer or state in moved else Tier.DEVICE

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for bucket in getattr(self._wrapper, "ipg_buckets", {}).values():
            # Between two backward passes the bucket is empty, because each gradient has been reduced into its
            # partition. Then nobody needs the values in the buffer.
            yield from holdings(GRADIENT, "ipg_buckets", bucket.buffer, workspace=not bucket.elements)
        for flat in self.flats:
            yield from self._files.gradients(self._numbers[flat])

    def wait_for_swaps(self) -> None:
        self._files.wait_for_swaps()
        super().wait_for_swaps()

    @staticmethod
    def after_write(wrapper: Any) -> None:
        if not Zero3._weights_moved(wrapper):  # Weights that offload_states() has moved cannot be gathered.
            wrapper.checkpoint_event_prologue()
            wrapper.checkpoint_event_epilogue()  # This gathers the persistent parameters.

    def before_restore(self) -> None:
        self._moved = self._offloaded_states
        if self._moved:
            self._wrapper.reload_states()
        super().before_restore()

    @contextmanager
    def flat_in_memory(self, flat: FlatBuffer) -> Iterator[FlatBuffer]:
        with self._files.in_memory(self._numbers[flat]):
            yield replace(flat, files={})
            self._derive_weights(flat)

    def after_masters(self) -> None:
        for flat in self.flats:
            if not flat.files:
                self._derive_weights(flat)
        self._drop_gradients()
        self._wrapper.overflow = False

    def after_restore(self) -> None:
        wrapper = self._wrapper
        wrapper.checkpoint_event_epilogue()  # This gathers the persistent parameters again.
        if self._moved:
            pinned = hasattr(wrapper, "hp_params_pin_buffers") or hasattr(wrapper, "lp_param_contiguous_pin_buffer")
            wrapper.offload_states(include=self._moved, pin_memory=pinned)

    def _drop_gradients(self) -> None:
        wrapper = self._wrapper
        wrapper.zero_grad()  # This also sets micro_step_id back to 0.
        wrapper.averaged_gradients = {}
        wrapper._offload_boundary_param_ids = set()
        # A step uses the gradients in this buffer even for parameters that no backward pass has reached.
        wrapper.grad_partitions_flat_buffer.zero_()
        self._zero_master_gradients()

    @staticmethod
    def _weights_moved(wrapper: Any) -> bool:
        """Returns whether offload_states() has moved the weights to host memory."""
        return any(state.name == "lp_params" for state in getattr(wrapper, "offloaded_states", ()))

    @cached_property
    def _numbers(self) -> dict[FlatBuffer, int]:
        """The number of the sub-group of each flat buffer."""
        return {flat: number for number, flat in enumerate(self.flats)}

    def _derive_weights(self, flat: FlatBuffer) -> None:
        """Computes the weights in the dtype of the model from the master weights of a flat buffer."""
        self._wrapper._reassign_or_swap_out_partitioned_parameters(self._numbers[flat])

    def _in_memory(self, name: str) -> torch.Tensor:
        # While the weights are offloaded, the ``ds_tensor`` of a trained parameter may have the values of another one:
        # DeepSpeedZeroOptimizer_Stage3.offload_states assigns them in the order of the module, not of the optimizer.
        if not self._weights_moved(self._wrapper) or name not in self._offsets:
            return super()._in_memory(name)
        buffer: torch.Tensor = self._wrapper.lp_param_buffer
        return buffer.detach().narrow(0, self._offsets[name], self._parameters[name].partition_numel())

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """The element at which the partition of each trained parameter begins in the buffer of all weights."""
        names = [parameter_range.name for flat in self.flats for parameter_range in flat.ranges]
        lengths = (self._parameters[name].partition_numel() for name in names)
        return dict(zip(names, accumulate(lengths, initial=0), strict=False))

    def _flats(self) -> tuple[FlatBuffer, ...]:
        wrapper = self._wrapper
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        flats = []
        for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
            ranges, offset = [], 0
            for parameter in wrapper.fp16_groups[index]:
                ranges.append(self._parameter_range(names[id(parameter)], offset))
                offset += parameter.partition_numel()
            flats.append(FlatBuffer(wrapper.sub_group_to_group_id[index], tuple(ranges), master, self._files.of(index)))
        return tuple(flats)
