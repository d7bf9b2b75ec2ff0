"""DeepSpeed's NVMe offload: every private attribute of its two swappers that is read or written, and nothing else.

The *optimizer swapper* (plain or pipelined) keeps each large sub-group in one file for the masters and one per moment;
in between steps the tensors themselves have no elements. It has few pinned buffers: one sub-group at a time fits. The
*parameter swapper* keeps one file per large partition of the weights in the compute dtype. Both kinds of file are raw
elements, then alignment padding of no meaning. What is small stays in memory, whatever the configuration says.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zckpt.engines.tensors import holdings
from zckpt.state.inventory import GRADIENT, MASTER, FileSpan, Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch


class OptimizerFiles:
    """The optimizer swapper of ``wrapper`` (DeepSpeedZeroOptimizer_Stage3), if it has one."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def settle(self) -> None:
        """Has all that is under way written, and gives back the buffers it used. Gradients are not lost."""
        swapper = self._wrapper.optimizer_swapper
        if swapper is None:
            return
        swapper.flush_gradients()
        pending = getattr(swapper, "swap_ops", {})  # the pipelined swapper's
        if pending.get("async_swap_out") is not None:
            swapper._complete_swap_out("async_swap_out")

    def of(self, sub_group: int) -> dict[str, FileSpan]:
        """The files of a sub-group by part, empty if it lives in memory."""
        wrapper = self._wrapper
        if not wrapper._swappable_optimizer_subgroup(sub_group):
            return {}
        master = wrapper.fp32_partitioned_groups_flat[sub_group]
        info = wrapper.optimizer_swapper.swap_params_info[master.ds_id]
        paths = {id(swapped.compute_tensor): swapped.swap_path for swapped in info.tensors}
        tensors: Mapping[str, Any] = {MASTER: master, **wrapper.optimizer.state.get(master, {})}
        nbytes = info.tensor_numel * wrapper.optimizer_swapper.swap_element_size
        return {part: FileSpan(paths[id(tensor)], 0, nbytes) for part, tensor in tensors.items() if id(tensor) in paths}

    def gradients(self, sub_group: int) -> Iterator[Holding]:
        """The gradients of a sub-group: in files, which a step leaves as they are for the next one, and those that are
        too small for files."""
        if not self._wrapper._swappable_optimizer_subgroup(sub_group):
            return
        swapper = self._wrapper.optimizer_swapper
        info = swapper.swap_params_info[self._wrapper.fp32_partitioned_groups_flat[sub_group].ds_id]
        name = str(info.param_id)
        for one in info.swapped_gradients.values():
            span = FileSpan(one.path, 0, one.length * swapper.swap_element_size)
            yield Holding(GRADIENT, name, span, info.tensor_dtype)
        yield from holdings(GRADIENT, name, info.unswapped_gradients)

    @contextmanager
    def in_memory(self, sub_group: int) -> Iterator[None]:
        """Master and moments are in memory inside, and so may be changed and moments added; written back afterwards.

        If it ends by an error, nothing is written back and the moments that were added are dropped.
        """
        wrapper = self._wrapper
        master = wrapper.fp32_partitioned_groups_flat[sub_group]
        wrapper._optimizer_states_and_gradient_swap_in(sub_group)
        before = set(wrapper.optimizer.state.get(master, ()))
        try:
            yield
            wrapper._optimizer_states_and_gradient_swap_out(sub_group)
        except BaseException:
            for part in set(wrapper.optimizer.state.get(master, ())) - before:
                del wrapper.optimizer.state[master][part]  # the swapper would take them for tensors that it knows
            wrapper._release_swap_buffers(sub_group)
            raise
        finally:
            self.settle()


class ParameterFiles:
    """The parameter swapper behind a partitioned ``parameter``, if it has one. Stateless."""

    @staticmethod
    def settle(parameter: Any) -> None:
        """Has all that is under way read and written."""
        swapper = getattr(parameter, "nvme_swapper", None)
        if swapper is not None:
            swapper.synchronize_writes()
            swapper.synchronize_reads()

    @staticmethod
    def of(parameter: Any) -> FileSpan | None:
        """The file of this rank's partition; None if it lives in memory, now at least."""
        if getattr(parameter, "nvme_swapper", None) is None or parameter.ds_tensor.status.name == "AVAILABLE":
            return None
        path = parameter.nvme_swapper.get_path(parameter, must_exist=True)
        return FileSpan(path, 0, parameter.ds_tensor.ds_numel * parameter.dtype.itemsize)

    @staticmethod
    @contextmanager
    def rewrite(parameter: Any) -> Iterator[torch.Tensor]:
        """Memory for a partition that lives in a file, to be filled; written to the file unless an error ends it."""
        swapper = parameter.nvme_swapper
        memory = swapper.get_buffer(parameter, parameter.ds_tensor.ds_numel)
        try:
            yield memory
            swapper.swap_out_and_release([parameter])
        except BaseException:
            swapper.remove_partition_and_release_buffers([parameter])
            raise
