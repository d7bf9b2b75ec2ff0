"""DeepSpeed's offload to NVMe. This file has all code that uses private attributes of DeepSpeed's two swappers.

The *optimizer swapper* (plain or pipelined) keeps each large sub-group in one file for the master weights and one file
for each moment. Between steps the tensors themselves have no elements. The swapper has few pinned buffers, so only one
sub-group can be in memory at a time. The *parameter swapper* keeps one file for each large partition of the weights in
the dtype that the model computes with. Both kinds of file contain raw elements, followed by padding that has no
meaning. Small tensors stay in memory even if the configuration says that they are offloaded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zckpt.engines.tensors import holdings
from zckpt.plan.inventory import GRADIENT, MASTER, FileRange, Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch


class OptimizerFiles:
    """The files of the optimizer swapper. ``wrapper``: a DeepSpeedZeroOptimizer_Stage3, which may have no such
    swapper."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def wait_for_swaps(self) -> None:
        """Waits until everything that is being written has been written, and gives back the buffers that were used for
        it. No gradients are lost."""
        swapper = self._wrapper.optimizer_swapper
        if swapper is None:
            return
        swapper.flush_gradients()
        pending = getattr(swapper, "swap_ops", {})  # Only the pipelined swapper has this attribute.
        if pending.get("async_swap_out") is not None:
            swapper._complete_swap_out("async_swap_out")

    def of(self, sub_group: int) -> dict[str, FileRange]:
        """Returns the swap files of a sub-group by part. The result is empty if the sub-group stays in memory."""
        wrapper = self._wrapper
        if not wrapper._swappable_optimizer_subgroup(sub_group):
            return {}
        master = wrapper.fp32_partitioned_groups_flat[sub_group]
        info = wrapper.optimizer_swapper.swap_params_info[master.ds_id]
        paths = {id(swapped.compute_tensor): swapped.swap_path for swapped in info.tensors}
        tensors: Mapping[str, Any] = {MASTER: master, **wrapper.optimizer.state.get(master, {})}
        nbytes = info.tensor_numel * wrapper.optimizer_swapper.swap_element_size
        return {
            part: FileRange(paths[id(tensor)], 0, nbytes) for part, tensor in tensors.items() if id(tensor) in paths
        }

    def gradients(self, sub_group: int) -> Iterator[Holding]:
        """Yields the gradients of a sub-group that is swapped to files. Large gradients are in files, which a step does
        not remove, and small ones are in memory."""
        if not self._wrapper._swappable_optimizer_subgroup(sub_group):
            return
        swapper = self._wrapper.optimizer_swapper
        info = swapper.swap_params_info[self._wrapper.fp32_partitioned_groups_flat[sub_group].ds_id]
        name = str(info.param_id)
        for gradient in info.swapped_gradients.values():
            file_range = FileRange(gradient.path, 0, gradient.length * swapper.swap_element_size)
            yield Holding(GRADIENT, name, file_range, info.tensor_dtype)
        yield from holdings(GRADIENT, name, info.unswapped_gradients)

    @contextmanager
    def in_memory(self, sub_group: int) -> Iterator[None]:
        """A context in which the master weights and moments of a sub-group are in memory. They may be changed, and
        moments may be added. At its end all of them are written back to the files.

        If the context ends by an error, nothing is written back, and moments that were added are removed.
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
                del wrapper.optimizer.state[master][part]  # The swapper would treat it as a tensor that has a file.
            wrapper._release_swap_buffers(sub_group)
            raise
        finally:
            self.wait_for_swaps()


class ParameterFiles:
    """The files of the parameter swapper, which a partitioned parameter may have. The class keeps no state."""

    @staticmethod
    def wait_for_swaps(parameter: Any) -> None:
        """Waits until everything that is being read or written has been read or written."""
        swapper = getattr(parameter, "nvme_swapper", None)
        if swapper is not None:
            swapper.synchronize_writes()
            swapper.synchronize_reads()

    @staticmethod
    def of(parameter: Any) -> FileRange | None:
        """Returns the file with this rank's partition of a parameter, or None if the partition is in memory now."""
        if getattr(parameter, "nvme_swapper", None) is None or parameter.ds_tensor.status.name == "AVAILABLE":
            return None
        path = parameter.nvme_swapper.get_path(parameter, must_exist=True)
        return FileRange(path, 0, parameter.ds_tensor.ds_numel * parameter.dtype.itemsize)

    @staticmethod
    @contextmanager
    def rewrite(parameter: Any) -> Iterator[torch.Tensor]:
        """A context whose value is memory for a partition that is in a file. The caller fills the memory. At the end it
        is written to the file, unless the context ends by an error."""
        swapper = parameter.nvme_swapper
        memory = swapper.get_buffer(parameter, parameter.ds_tensor.ds_numel)
        try:
            yield memory
            swapper.swap_out_and_release([parameter])
        except BaseException:
            swapper.remove_partition_and_release_buffers([parameter])
            raise
