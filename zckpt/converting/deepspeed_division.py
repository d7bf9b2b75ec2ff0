"""How the ranks of a run have divided its model before ZeRO has partitioned it. The numbers of the ranks are those that
DeepSpeed's own grids give them: the stage of a pipeline counts most, and the tensor-parallel rank least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zckpt.converting.deepspeed_cuts import INFO, Cuts
from zckpt.converting.deepspeed_folder import Place, of_type
from zckpt.engines.group import RankGroup
from zckpt.engines.local_tensors import LocalTensor
from zckpt.errors import FormatError
from zckpt.format.limits import NAMES_MAX, WORLD_SIZE_MAX
from zckpt.geometry import all_of, section_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.converting.deepspeed_experts import Experts
    from zckpt.geometry import Span


class Division:
    """The division of one run. ``saved``: the model states of rank 0. ``experts``: the experts, if there are any.
    ``stage``: the ZeRO stage."""

    def __init__(self, saved: Mapping[str, Any], experts: Experts | None, stage: int) -> None:
        self.data_ranks, self.model_ranks = ranks_of(saved)
        self.stages = stages_of(saved)
        """The number of stages of the pipeline."""
        self.tensor_ranks = self.model_ranks // self.stages
        """The number of tensor-parallel ranks in a stage."""
        self._cuts = Cuts(saved.get(INFO), self.tensor_ranks)
        self._experts, self._stage = experts, stage
        self._shapes: Sequence[Mapping[str, tuple[int, ...]]] = ()

    @property
    def ranks(self) -> int:
        """The number of all ranks of the run."""
        return self.data_ranks * self.model_ranks

    @property
    def names_differ(self) -> bool:
        """Whether ranks have tensors of different names."""
        return self.stages > 1 or (self._experts is not None and self._experts.names_differ)

    @property
    def tells_order(self) -> bool:
        """Whether the numbers of the ranks are known. An ``mpu`` may give them to ranks in another order than AutoTP
        and DeepSpeed's own grids do."""
        return self.tensor_ranks == 1 or self.stages > 1 or self._cuts.by_autotp

    def place(self, rank: int) -> Place:
        """Returns the place of a rank in the grid of ranks."""
        rest, tensor_rank = divmod(rank, self.tensor_ranks)
        stage, data = divmod(rest, self.data_ranks)
        return Place(data, stage * self.tensor_ranks + tensor_rank)

    def rank(self, place: Place) -> int:
        """Returns the rank that has a place in the grid of ranks."""
        stage, tensor_rank = divmod(place.model, self.tensor_ranks)
        return (stage * self.data_ranks + place.data) * self.tensor_ranks + tensor_rank

    def in_stage(self, place: Place) -> int:
        """Returns the number of a rank among those of its stage of the pipeline."""
        return place.data * self.tensor_ranks + place.model % self.tensor_ranks

    def name_of(self, place: Place) -> str:
        """Returns a name of the ranks that hold the same local tensors as the one at ``place``, for people."""
        name = f"model-parallel rank {place.model}"
        if self._experts is None:
            return name
        return f"{name}, expert-parallel rank {self._experts.number(self.in_stage(place))}"

    def alike(self, place: Place) -> Place:
        """Returns the place of the first rank that holds the same local tensors as the rank at ``place``."""
        if self._experts is None or self.tensor_ranks > 1:
            return Place(0, place.model)
        return Place(self._experts.holders(place.data).ranks[0], place.model)

    def set_shapes(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Sets the shapes of the parameters that the first rank of each rank of model parallelism holds, by name. It is
        called before ``local_tensors``."""
        self._shapes = shapes

    def local_tensors(self, place: Place, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LocalTensor]:
        """Returns what a rank holds of each parameter, before ZeRO partitions it. ``shapes``: the shapes of these
        parameters on the rank."""
        everyone = RankGroup(None, place.data, tuple(range(self.data_ranks)))
        holders, number = everyone, 0
        if self._experts is not None:
            holders, number = self._experts.holders(self.in_stage(place)), self._experts.number(self.in_stage(place))
        tensor_rank = place.model % self.tensor_ranks
        local_tensors = {}
        for name, shape in shapes.items():
            if self._experts is not None and self._experts.is_expert(name):
                cuts = self._experts.cuts(name, shape, number)
                span = all_of(shape) if cuts is None else section_of(*cuts)
                if span.numel != math.prod(shape):
                    raise FormatError(f"its shape {list(shape)} is not that of the experts of a rank", key=name)
                local_tensors[name] = LocalTensor(span, holders, stored_as=self._experts.stored_as(name))
                continue
            span, replicated = self._span(place.model, name, shape)
            owners, first = everyone, not replicated or tensor_rank == 0
            stages = self._stages_with(name)
            if len(stages) > 1:
                replicated, first = "every stage", first and stages[0] == place.model // self.tensor_ranks
            # At stage 0, each file of the optimizer is one of the ranks that have the same experts.
            if self._experts is not None and self._stage == 0 and self._experts.ranks > 1:
                owners, replicated, first = holders, "every rank", first and number == 0
            local_tensors[name] = LocalTensor(span, owners, partition_replicated=replicated, writes_partition=first)
        return local_tensors

    def whole_tensors(self, place: Place, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LocalTensor]:
        """Returns the whole parameters of which a rank holds a part, as a Universal Checkpoint has them. The ranks of a
        stage share them. ``shapes``: as for ``local_tensors``."""
        sharing = RankGroup(None, self.in_stage(place), tuple(range(self.data_ranks * self.tensor_ranks)))
        stage, local_tensors = place.model // self.tensor_ranks, self.local_tensors(place, shapes)
        whole_tensors = {}
        for name, local in local_tensors.items():
            shape, first = local.span.grid.shape, self._stages_with(name)[0] == stage
            half = {} if self._experts is None else self._experts.cuts_of_half(name, shape)
            span = section_of(shape, half) if half else all_of(shape)
            whole_tensors[name] = replace(
                local, span=span, owners=sharing, partition_replicated="", writes_partition=first
            )
        return whole_tensors

    def _stages_with(self, name: str) -> list[int]:
        """Returns the stages of the pipeline that have a parameter, which are several for that of a shared module."""
        if self.stages == 1:
            return [0]
        return [stage for stage in range(self.stages) if name in self._shapes[stage * self.tensor_ranks]]

    @lru_cache(maxsize=NAMES_MAX)  # noqa: B019, because there is one division for each conversion
    def _span(self, model: int, name: str, shape: tuple[int, ...]) -> tuple[Span, str]:
        """Returns the elements of a parameter that a rank of model parallelism holds. The text beside them is empty
        unless the other tensor-parallel ranks hold the same ones."""
        if self.tensor_ranks == 1:
            return all_of(shape), ""
        stage, tensor_rank = divmod(model, self.tensor_ranks)
        of_ranks = self._shapes[stage * self.tensor_ranks : (stage + 1) * self.tensor_ranks]
        if not all(name in other for other in of_ranks):
            raise FormatError("only some tensor-parallel ranks have this parameter", key=name)
        own_name = name if self._experts is None else self._experts.own_name(name)
        cut = self._cuts.of(own_name, [other[name] for other in of_ranks])
        return (
            (all_of(shape), "every rank") if cut is None else (section_of(cut[0], {cut[1]: (cut[2], tensor_rank)}), "")
        )


def ranks_of(saved: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of ranks of data parallelism of a run, and of those that each have a part of the model:
    tensor-parallel ranks in each stage of a pipeline. ``saved``: the model states of rank 0."""
    data_ranks, model_ranks = of_type(saved, "dp_world_size", int), of_type(saved, "mp_world_size", int)
    if data_ranks < 1 or model_ranks < 1 or data_ranks * model_ranks > WORLD_SIZE_MAX:
        raise FormatError(f"it says that the run had {data_ranks * model_ranks} ranks")
    return data_ranks, model_ranks


def stages_of(saved: Mapping[str, Any]) -> int:
    """Returns the number of stages of the pipeline. ``saved``: the model states of rank 0."""
    dimensions, model_ranks = saved.get("checkpoint_parallel_dimensions"), ranks_of(saved)[1]
    is_pipeline = not isinstance(saved["module"], Mapping)
    stages: Any = (dimensions or {}).get("pp_degree", model_ranks if is_pipeline else 1)
    if type(stages) is not int or stages < 1 or model_ranks % stages:
        raise FormatError(f"it says that the run had {stages} pipeline stages and {model_ranks} model-parallel ranks")
    return stages
