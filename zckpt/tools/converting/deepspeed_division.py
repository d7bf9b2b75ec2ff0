"""How the ranks of a run have divided its model before ZeRO has partitioned it. The numbers of the ranks are those that
DeepSpeed itself gives them: the stage of a pipeline counts most, and the tensor-parallel rank least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zckpt.adapters.local_tensors import LocalTensor
from zckpt.engines.group import RankGroup
from zckpt.errors import FormatError
from zckpt.format.limits import NAMES_MAX, WORLD_SIZE_MAX
from zckpt.geometry import all_of, section_of
from zckpt.tools.converting.deepspeed_folder import Coordinates, of_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.geometry import Span
    from zckpt.tools.converting.deepspeed_cuts import Cuts, Shape
    from zckpt.tools.converting.deepspeed_experts import Experts


class RunRanks:
    """The ranks of one run: their coordinates, and which of them hold the same local tensors. ``saved``: the model
    states of rank 0. ``experts``: the experts, if there are any."""

    def __init__(self, saved: Mapping[str, Any], experts: Experts | None) -> None:
        self.data_ranks, self.model_ranks = ranks_of(saved)
        self.stages = stages_of(saved)
        """The number of stages of the pipeline."""
        self.tensor_ranks = self.model_ranks // self.stages
        """The number of tensor-parallel ranks in a stage."""
        self._experts = experts

    @property
    def world_size(self) -> int:
        """The number of all ranks of the run."""
        return self.data_ranks * self.model_ranks

    @property
    def names_differ(self) -> bool:
        """Whether ranks have tensors of different names."""
        return self.stages > 1 or (self._experts is not None and self._experts.names_differ)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank."""
        rest, tensor_rank = divmod(rank, self.tensor_ranks)
        stage, data_rank = divmod(rest, self.data_ranks)
        return Coordinates(data_rank, stage * self.tensor_ranks + tensor_rank)

    def rank(self, coordinates: Coordinates) -> int:
        """Returns the rank that has these coordinates."""
        stage, tensor_rank = divmod(coordinates.model_rank, self.tensor_ranks)
        return (stage * self.data_ranks + coordinates.data_rank) * self.tensor_ranks + tensor_rank

    def rank_in_stage(self, coordinates: Coordinates) -> int:
        """Returns the number of a rank among those of its stage of the pipeline."""
        return coordinates.data_rank * self.tensor_ranks + coordinates.model_rank % self.tensor_ranks

    def expert_rank(self, coordinates: Coordinates) -> int:
        """Returns the number of a rank among those over which the experts are divided. It is 0 if there are none."""
        return 0 if self._experts is None else self._experts.expert_rank(self.rank_in_stage(coordinates))

    def name_of(self, coordinates: Coordinates) -> str:
        """Returns a name of the ranks that hold the same local tensors as the one at ``coordinates``, for people."""
        name = f"model-parallel rank {coordinates.model_rank}"
        return name if self._experts is None else f"{name}, expert-parallel rank {self.expert_rank(coordinates)}"

    def alike(self, coordinates: Coordinates) -> Coordinates:
        """Returns the coordinates of the first rank that holds the same local tensors as the one at ``coordinates``."""
        if self._experts is None or self.tensor_ranks > 1:
            return Coordinates(0, coordinates.model_rank)
        return Coordinates(self._experts.holders(coordinates.data_rank).ranks[0], coordinates.model_rank)


class Division:
    """What each rank of one run holds of each parameter.

    Args:
        ranks: the ranks.
        cuts: how tensor parallelism has cut the parameters.
        experts: the experts, if there are any.
        stage: the ZeRO stage.
        shapes: the shapes of the parameters that the first rank of each rank of model parallelism holds, by name.
    """

    def __init__(
        self, ranks: RunRanks, cuts: Cuts, experts: Experts | None, stage: int, shapes: Sequence[Mapping[str, Shape]]
    ) -> None:
        self._ranks, self._cuts, self._experts, self._stage, self._shapes = ranks, cuts, experts, stage, shapes

    @property
    def tells_order(self) -> bool:
        """Whether the numbers of the ranks are known. An ``mpu`` may give them to ranks in another order than AutoTP
        and DeepSpeed itself do."""
        return self._ranks.tensor_ranks == 1 or self._ranks.stages > 1 or self._cuts.by_autotp

    def local_tensors(self, coordinates: Coordinates, shapes: Mapping[str, Shape]) -> dict[str, LocalTensor]:
        """Returns what a rank holds of each parameter, before ZeRO partitions it. ``shapes``: the shapes of these
        parameters on the rank."""
        everyone = RankGroup(None, coordinates.data_rank, tuple(range(self._ranks.data_ranks)))
        expert_rank = self._ranks.expert_rank(coordinates)
        rank_in_stage = self._ranks.rank_in_stage(coordinates)
        holders = everyone if self._experts is None else self._experts.holders(rank_in_stage)
        pipeline_stage, tensor_rank = divmod(coordinates.model_rank, self._ranks.tensor_ranks)
        local_tensors = {}
        for name, shape in shapes.items():
            if self._experts is not None and self._experts.is_expert(name):
                cuts = self._experts.cuts(name, shape, expert_rank)
                span = all_of(shape) if cuts is None else section_of(*cuts)
                if span.numel != math.prod(shape):
                    raise FormatError(f"its shape {list(shape)} is not that of the experts of a rank", key=name)
                local_tensors[name] = LocalTensor(span, holders, stored_as=self._experts.auto.stored_as(name))
                continue
            span, replicated = self._span(coordinates.model_rank, name, shape)
            owners, first = everyone, not replicated or tensor_rank == 0
            stages = self._stages_with(name)
            if len(stages) > 1:
                replicated, first = True, first and stages[0] == pipeline_stage
            # At stage 0, each file of the optimizer is one of the ranks that have the same experts.
            if self._experts is not None and self._stage == 0 and self._experts.ranks > 1:
                owners, replicated, first = holders, True, first and expert_rank == 0
            # Which ranks have replicas does not matter here: the conversion compares all of them.
            local_tensors[name] = LocalTensor(
                span, owners, partition_replicated="partition" if replicated else "", writes_partition=first
            )
        return local_tensors

    def whole_tensors(self, coordinates: Coordinates, shapes: Mapping[str, Shape]) -> dict[str, LocalTensor]:
        """Returns the whole parameters of which a rank holds a part, as a Universal Checkpoint has them. The ranks of a
        stage share them. ``shapes``: as for ``local_tensors``."""
        ranks = self._ranks
        sharing = RankGroup(None, ranks.rank_in_stage(coordinates), tuple(range(ranks.data_ranks * ranks.tensor_ranks)))
        stage, whole_tensors = coordinates.model_rank // ranks.tensor_ranks, {}
        for name, local in self.local_tensors(coordinates, shapes).items():
            shape, first = local.span.grid.shape, self._stages_with(name)[0] == stage
            half = {} if self._experts is None else self._experts.auto.cuts_of_half(name, shape)
            span = section_of(shape, half) if half else all_of(shape)
            whole_tensors[name] = replace(
                local, span=span, owners=sharing, partition_replicated="", writes_partition=first
            )
        return whole_tensors

    def _stages_with(self, name: str) -> list[int]:
        """Returns the stages of the pipeline that have a parameter, which are several for that of a shared module."""
        ranks = self._ranks
        if ranks.stages == 1:
            return [0]
        return [stage for stage in range(ranks.stages) if name in self._shapes[stage * ranks.tensor_ranks]]

    @lru_cache(maxsize=NAMES_MAX)  # noqa: B019, because there is one division for each conversion
    def _span(self, model_rank: int, name: str, shape: Shape) -> tuple[Span, bool]:
        """Returns the elements of a parameter that a rank of model parallelism holds, and whether there are other
        tensor-parallel ranks, which hold the same ones."""
        tensor_ranks = self._ranks.tensor_ranks
        if tensor_ranks == 1:
            return all_of(shape), False
        stage, tensor_rank = divmod(model_rank, tensor_ranks)
        of_ranks = self._shapes[stage * tensor_ranks : (stage + 1) * tensor_ranks]
        if not all(name in other for other in of_ranks):
            raise FormatError("only some tensor-parallel ranks have this parameter", key=name)
        own_name = name if self._experts is None else self._experts.own_name(name)
        cut = self._cuts.of(own_name, [other[name] for other in of_ranks])
        if cut is None:
            return all_of(shape), True
        whole, dim, sections = cut
        return section_of(whole, {dim: (sections, tensor_rank)}), False


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
