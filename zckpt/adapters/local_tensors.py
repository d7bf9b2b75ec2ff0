"""Which elements a rank holds of each parameter, and which other ranks hold the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from zckpt.engines.group import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed import ProcessGroup

    from zckpt.engines.group import RankGroup
    from zckpt.geometry import Span


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What this rank holds of one parameter, before it is partitioned.

    A parameter may be divided between ranks in two steps. First, it is cut into *local tensors*, as tensor parallelism
    does. Then a local tensor, which several ranks may hold, may be cut into partitions for these ranks, as ZeRO does.
    """

    span: Span
    """The elements of the parameter which the local tensor holds, in the order in which it holds them."""
    owners: RankGroup
    """The ranks that hold this local tensor, or partitions of it, and read a share of it in a restore. Other groups of
    owners may hold the same elements."""
    replicated: str = ""
    """The value of ``Fragment.replicated`` for the local tensor, if this rank holds it whole."""
    partition_replicated: str = ""
    """The value of ``Fragment.replicated`` for the partition that this rank holds, if the local tensor is partitioned.
    It is empty if no rank other than the owners holds any elements of the local tensor."""
    writes_partition: bool = True
    """Whether this rank writes its partition. Several groups of owners may hold the same elements in partitions with
    other borders; then only one group writes them."""
    stored_as: str = ""
    """The name that the whole parameter has in a checkpoint, if it is another one. Two parameters of an engine may be
    parts of one parameter of the checkpoint, and then both have this name."""
    same_borders: bool = True
    """Whether all groups of owners cut this local tensor, or that which they have in its place, into partitions with
    the same borders. If not, the partitions of replicas cannot be compared."""


LocalTensors = Mapping[str, LocalTensor]
"""The local tensors of all parameters of a model, by name."""


def owner_mismatch(
    partitioned: Iterable[tuple[str, ProcessGroup | None]], local_tensors: LocalTensors
) -> Iterator[str]:
    """Yields a phrase for an error if a parameter is partitioned over other ranks than its owners, or in another order.
    ``partitioned``: names of parameters, and the process group over which each is partitioned."""
    ranks_of_group = cache(ranks_of)
    for name, handle in partitioned:
        ranks, owners = ranks_of_group(handle), local_tensors[name].owners.ranks
        if ranks != owners:
            yield f"{name}, which is partitioned over ranks {list(ranks)}, and not over ranks {list(owners)}"
            return
