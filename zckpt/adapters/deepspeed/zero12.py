"""ZeRO stages 1 and 2. This file has all code that uses private attributes of DeepSpeed's ``DeepSpeedZeroOptimizer``
and ``BF16_Optimizer``.

The parameters of a param group lie one after another in one buffer. It is cut into as many equal partitions as there
are owners (see ``LocalTensor``), and a cut may go through a parameter. A rank keeps the master weights and moments of
its partition as one flat buffer. Every rank has all of its weights in the dtype that the model computes with, and all
parameters that are not trained.

If ``round_robin_gradients`` reorders the parameters, ``_hp_mapping`` and what DeepSpeed derives from it are wrong. They
are made anew after a restore, but are never read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from zckpt.adapters.flats import FlatBuffer, consecutive, cut_together, foreign, momentum_of_muon
from zckpt.adapters.local_tensors import owner_mismatch
from zckpt.adapters.replicas import Replicated
from zckpt.engines.group import rank_group_of
from zckpt.engines.tensors import holdings
from zckpt.format.names import Tier
from zckpt.plan.inventory import GRADIENT, MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from zckpt.adapters.local_tensors import LocalTensors
    from zckpt.plan.inventory import Holding


class ZeroGroup(NamedTuple):
    """One param group."""

    parameters: Sequence[Any]
    """The parameters, in the order in which they lie in the buffer of the group."""
    offsets: Sequence[int]
    """The element of the buffer at which each of these parameters begins."""
    master: torch.Tensor
    """The master weights of this rank's partition."""
    process_group: ProcessGroup
    """The process group over which the buffer is partitioned."""
    muon: Sequence[Any] = ()
    """The parameters whose momentum the optimizer Muon keeps on this rank, each of them whole and one after another.
    These are all parameters of which this rank's partition has any elements."""


class Zero12(Replicated):
    """Reads and restores DeepSpeed's ``DeepSpeedZeroOptimizer``. ``Kind`` documents the members."""

    MEMORY: ClassVar = {
        MASTER: ("hp_params_pin_buffers",),
        PARAM: ("lp_params_pin_buffers", "param_buffer_of_bit16_for_cpu_offload_groups"),
        GRADIENT: (
            "averaged_gradients",
            "all_grad_tensors",
            "ipg_buffer",  # only in versions of DeepSpeed without ipg_buckets
            "accumulated_grads_in_cpu",
            "temp_grad_buffer_for_cpu_offload",
            "temp_grad_buffer_for_gpu_offload",
            "_muon_allgather_buffers",
            "_muon_pending_momentum",
        ),
    }

    def __init__(self, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> None:
        super().__init__(wrapper, parameters, local_tensors)
        self._moved: frozenset[Any] = frozenset()
        """The states that were offloaded before the restore, and are offloaded again after it."""
        self._pinned = False
        """Whether these states were in pinned memory."""
        self.flats = self._flats()

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], local_tensors: LocalTensors) -> Iterator[str]:
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = list(cls._groups(wrapper))
        yield from super().unsupported(wrapper, parameters, local_tensors)
        yield from foreign(parameters, (parameter for group in groups for parameter in group.parameters))
        known = (
            (names[id(parameter)], group.process_group)
            for group in groups
            for parameter in group.parameters
            if id(parameter) in names
        )
        yield from owner_mismatch(known, local_tensors)

    @classmethod
    def shapes(cls, wrapper: Any, parameters: Mapping[str, Any]) -> Mapping[int, Sequence[int]]:
        # A parameter has no elements while its storage is offloaded.
        groups = zip(wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_meta, strict=True)
        return {
            id(parameter): meta.shape
            for parameters, metas in groups
            for parameter, meta in zip(parameters, metas, strict=True)
        }

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        # Before DeepSpeed 0.19, Muon changes its momentum outside of a step, while a backward pass fills the gradients.
        return hasattr(wrapper, "_commit_muon_momentum") or not uses_muon(wrapper.optimizer)

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        # Every step sets micro_step_id back to -1, so it counts only the backward passes since the last step.
        pending = any(gradients is not None for gradients in wrapper.averaged_gradients.values())
        return pending or int(wrapper.micro_step_id) >= 0

    @property
    def optimizer(self) -> Any:
        return self._wrapper.optimizer

    def tier(self, part: str) -> Tier:
        moved = {state.name for state in self._offloaded_states}
        if part == PARAM:
            return Tier.HOST if "lp_params" in moved else Tier.DEVICE
        on_host = getattr(self._wrapper, "cpu_offload", False)
        return Tier.HOST if on_host or ("hp_params" if part == MASTER else "optim_states") in moved else Tier.DEVICE

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for bucket in getattr(self._wrapper, "ipg_buckets", {}).values():
            yield from holdings(GRADIENT, "ipg_buckets", bucket.grads)
            # Between two backward passes the bucket is empty, because each gradient is still in its parameter or has
            # been reduced. Then nobody needs the values in the buffer.
            yield from holdings(GRADIENT, "ipg_buckets", bucket.buffer, workspace=not bucket.elements)

    def before_restore(self) -> None:
        wrapper, self._moved = self._wrapper, self._offloaded_states
        if self._moved:
            self._pinned = hasattr(wrapper, "hp_params_pin_buffers") or hasattr(wrapper, "lp_params_pin_buffers")
            wrapper.reload_states()

    def after_masters(self) -> None:
        self._drop_gradients()
        self._wrapper.overflow = False

    def after_fill(self, weights: Collection[str]) -> None:
        wrapper = self._wrapper
        super().after_fill(weights)
        wrapper._link_all_hp_params()
        wrapper._hp_optimizer_states_linked = False
        if all(self.optimizer.state.get(flat.master) for flat in self.flats):
            wrapper._lazy_init_hp_params_optimizer_state()  # If there are no moments yet, the first step does this.

    def after_restore(self) -> None:
        wrapper = self._wrapper
        super().after_restore()
        wrapper.update_lp_params()
        if self._moved:
            wrapper.offload_states(include=self._moved, pin_memory=self._pinned)

    def _drop_gradients(self) -> None:
        wrapper = self._wrapper
        wrapper.zero_grad()
        wrapper.micro_step_id = -1
        wrapper.averaged_gradients.clear()  # The dict must stay, because the parameters' _hp_mapping refers to it.
        getattr(wrapper, "all_grad_tensors", {}).clear()  # This attribute exists since DeepSpeed 0.17.
        wrapper._offload_accumulated_param_ids = set()
        self._zero_master_gradients()

    def _flats(self) -> tuple[FlatBuffer, ...]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        flats = []
        for index, group in enumerate(self._groups(self._wrapper)):
            parameter_names = [names[id(parameter)] for parameter in group.parameters]
            local_tensors = [self._local_tensors[name] for name in parameter_names]
            held = [local.span for local in local_tensors]
            rank = rank_group_of(group.process_group).rank
            ranges = cut_together(zip(parameter_names, held, group.offsets, strict=True), rank, group.master.numel())
            same_borders = all(local.same_borders for local in local_tensors)
            ranges = tuple(
                own._replace(replicated=local.partition_replicated, stored_as=local.stored_as)
                if same_borders
                else own._replace(written=local.writes_partition, stored_as=local.stored_as)
                for own, local in zip(ranges, local_tensors, strict=True)
            )
            by_name = {parameter_range.name: parameter_range for parameter_range in ranges}
            momentum = (by_name[names[id(parameter)]] for parameter in group.muon)
            wider = momentum_of_muon(momentum, dict(zip(parameter_names, held, strict=True)))
            flats.append(FlatBuffer(index, ranges, group.master, wider=wider))
        return tuple(flats)

    @classmethod
    def _groups(cls, wrapper: Any) -> Iterator[ZeroGroup]:
        for index, master in enumerate(wrapper.single_partition_of_fp32_groups):
            parameters = wrapper.round_robin_bit16_groups[index]
            if hasattr(wrapper, "round_robin_bit16_offsets"):
                offsets = wrapper.round_robin_bit16_offsets[index]
            else:  # Older versions of DeepSpeed put no padding between parameters.
                offsets = consecutive(meta.shape for meta in wrapper.round_robin_bit16_meta[index])
            by_muon = wrapper.optimizer.param_groups[index].get("use_muon") and not wrapper.cpu_offload
            muon = wrapper.params_in_partition[index] if by_muon else ()
            yield ZeroGroup(parameters, offsets, master, wrapper.real_dp_process_group[index], muon)


class Bf16Optimizer(Zero12):
    """Reads and restores DeepSpeed's ``BF16_Optimizer``, which it uses for stage 1 in bf16 with gradients in fp32. Its
    layout is the same, but it never reorders the parameters and never puts padding between them. ``Kind`` documents the
    members."""

    MEMORY: ClassVar = {GRADIENT: ("fp32_groups_gradients_flat",)}

    @classmethod
    def shapes(cls, wrapper: Any, parameters: Mapping[str, Any]) -> Mapping[int, Sequence[int]]:
        return {}

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        return True

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        return any(used for group in wrapper.fp32_groups_has_gradients for used in group)

    def _drop_gradients(self) -> None:
        self._wrapper.clear_hp_grads()
        self._wrapper.clear_lp_grads()

    @classmethod
    def _groups(cls, wrapper: Any) -> Iterator[ZeroGroup]:
        columns = (wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, wrapper.real_dp_process_group)
        for parameters, master, process_group in zip(*columns, strict=True):
            yield ZeroGroup(parameters, consecutive(parameter.shape for parameter in parameters), master, process_group)


def uses_muon(optimizer: Any) -> bool:
    """Returns whether Muon updates any of the optimizer's param groups."""
    return any(group.get("use_muon") for group in optimizer.param_groups)
