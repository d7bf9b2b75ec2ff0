"""ZeRO stages 1 and 2: every private attribute of ``DeepSpeedZeroOptimizer`` that is read or written.

The parameters of a param group lie one behind the other in one buffer, which is cut into as many equal partitions as
there are ranks, wherever that cuts a parameter. A rank keeps master weights and moments of its partition as one flat;
the weights in the compute dtype are whole on every rank, as are parameters that are not trained.

``_hp_mapping`` and what DeepSpeed derives from it are wrong where round_robin_gradients reorders the parameters, so
they are set anew after a restore, but never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from zckpt.engines.deepspeed import replicas
from zckpt.engines.deepspeed.flats import Flat, consecutive, cut_together, foreign, momentum_of_muon
from zckpt.engines.deepspeed.group import ranks_of
from zckpt.engines.tensors import holdings
from zckpt.state.inventory import GRADIENT, MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch

    from zckpt.engines.deepspeed.group import RankGroup
    from zckpt.state.inventory import Holding


class Group(NamedTuple):
    """One param group: its parameters in the order of the buffer, where they begin in it, and this rank's partition."""

    parameters: Sequence[Any]
    shapes: Sequence[torch.Size]
    offsets: Sequence[int]
    master: torch.Tensor
    muon: Sequence[Any] = ()
    """Parameters of which Muon's momentum is kept here whole, one behind the other: all that begin or go on here."""


class Zero12(replicas.Replicated):
    """The wrapper around the optimizer; ``wrapper.Wrapper`` says what each member is for."""

    MEMORY: ClassVar = {
        MASTER: ("hp_params_pin_buffers",),
        PARAM: ("lp_params_pin_buffers", "param_buffer_of_bit16_for_cpu_offload_groups"),
        GRADIENT: (
            "averaged_gradients",
            "all_grad_tensors",
            "ipg_buffer",  # before DeepSpeed had ipg_buckets
            "accumulated_grads_in_cpu",
            "temp_grad_buffer_for_cpu_offload",
            "temp_grad_buffer_for_gpu_offload",
            "_muon_allgather_buffers",
            "_muon_pending_momentum",
        ),
    }

    def __init__(self, wrapper: Any, parameters: Mapping[str, torch.nn.Parameter], group: RankGroup) -> None:
        super().__init__(wrapper, parameters, group)
        self._moved: frozenset[Any] = frozenset()
        self._pinned = False
        self.flats = self._flats()

    @classmethod
    def unsupported(cls, wrapper: Any, parameters: Mapping[str, Any], group: RankGroup) -> Iterator[str]:
        for handle in wrapper.real_dp_process_group:
            ranks = ranks_of(handle)
            if ranks != group.ranks:
                yield f"a partition group other than the engine's ranks in order: ranks {list(ranks)}"
                return
        yield from replicas.unsupported(parameters)
        yield from foreign(parameters, (p for group in cls._groups(wrapper) for p in group.parameters))

    @staticmethod
    def changes_only_in_step(wrapper: Any) -> bool:
        # Before DeepSpeed 0.19, Muon's momentum moves on while a backward pass fills the partition.
        return hasattr(wrapper, "_commit_muon_momentum") or not uses_muon(wrapper.optimizer)

    @classmethod
    def has_gradients(cls, wrapper: Any) -> bool:
        # The number of the micro step is put back to -1 by every step, and only counts what is not in one yet.
        pending = any(gradients is not None for gradients in wrapper.averaged_gradients.values())
        return pending or int(wrapper.micro_step_id) >= 0

    @property
    def optimizer(self) -> Any:
        return self._wrapper.optimizer

    def tier(self, part: str) -> str:
        moved = {state.name for state in self._offloaded_states}
        if part == PARAM:
            return "host" if "lp_params" in moved else "device"
        on_host = getattr(self._wrapper, "cpu_offload", False)
        return "host" if on_host or ("hp_params" if part == MASTER else "optim_states") in moved else "device"

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for bucket in getattr(self._wrapper, "ipg_buckets", {}).values():
            yield from holdings(GRADIENT, "ipg_buckets", bucket.grads)
            # Empty, as between two backward passes: each gradient is still the parameter's, or has been reduced.
            yield from holdings(GRADIENT, "ipg_buckets", bucket.buffer, workspace=not bucket.elements)

    def before_restore(self) -> None:
        wrapper, self._moved = self._wrapper, self._offloaded_states
        if self._moved:
            self._pinned = hasattr(wrapper, "hp_params_pin_buffers") or hasattr(wrapper, "lp_params_pin_buffers")
            wrapper.reload_states()

    def after_fill(self, weights: Collection[str]) -> None:
        wrapper = self._wrapper
        super().after_fill(weights)
        wrapper._link_all_hp_params()
        wrapper._hp_optimizer_states_linked = False
        if all(self.optimizer.state.get(flat.master) for flat in self.flats):
            wrapper._lazy_init_hp_params_optimizer_state()  # without moments yet, the first step does it
        self._drop_gradients()
        wrapper.overflow = False

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
        wrapper.averaged_gradients.clear()  # in place: the parameters' _hp_mapping holds it too
        getattr(wrapper, "all_grad_tensors", {}).clear()  # since DeepSpeed 0.17
        wrapper._offload_accumulated_param_ids = set()
        self._zero_master_gradients()

    def _flats(self) -> tuple[Flat, ...]:
        rank = self._group.rank
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        flats = []
        for index, group in enumerate(self._groups(self._wrapper)):
            called = [names[id(parameter)] for parameter in group.parameters]
            placed = zip(called, group.shapes, group.offsets, strict=True)
            slots = cut_together(placed, rank, group.master.numel())
            by_name = {slot.name: slot for slot in slots}
            momentum = (by_name[names[id(parameter)]] for parameter in group.muon)
            flats.append(Flat(index, slots, group.master, wider=momentum_of_muon(momentum)))
        return tuple(flats)

    @classmethod
    def _groups(cls, wrapper: Any) -> Iterator[Group]:
        for index, master in enumerate(wrapper.single_partition_of_fp32_groups):
            parameters = wrapper.round_robin_bit16_groups[index]
            # The parameters themselves are empty while their storage is offloaded.
            shapes = [meta.shape for meta in wrapper.round_robin_bit16_meta[index]]
            if hasattr(wrapper, "round_robin_bit16_offsets"):
                offsets = wrapper.round_robin_bit16_offsets[index]
            else:  # before DeepSpeed knew of padding between parameters
                offsets = consecutive(shapes)
            by_muon = wrapper.optimizer.param_groups[index].get("use_muon") and not wrapper.cpu_offload
            yield Group(parameters, shapes, offsets, master, wrapper.params_in_partition[index] if by_muon else ())


def uses_muon(optimizer: Any) -> bool:
    """Whether Muon moves any of the optimizer's param groups."""
    return any(group.get("use_muon") for group in optimizer.param_groups)
