"""Where the elements lie that one rank holds of a parameter, and which other ranks hold the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from zckpt.engines.group import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from zckpt.engines.group import RankGroup
    from zckpt.geometry import Span


@dataclass(frozen=True, slots=True)
class Placement:
    """What this rank holds of one parameter.

    The parameter may be divided between ranks in two steps. First, it is cut into *local tensors*, as tensor
    parallelism does. Then a local tensor, which several ranks may hold, may be cut into partitions for these ranks, as
    ZeRO does.
    """

    span: Span
    """The elements of the local tensor, in the order in which they lie in it."""
    owners: RankGroup
    """The ranks that hold this local tensor, or partitions of it. In a restore, each of them reads a share of it."""
    replicated: str = ""
    """As in ``Fragment``, if this rank holds the whole local tensor."""
    partition_replicated: str = ""
    """As in ``Fragment``, if this rank holds only one partition: the label is empty if no rank other than the owners
    holds any of these elements."""
    writes_partition: bool = True
    """Whether this rank writes its partition, even if the partitions of other owners of the same elements have other
    borders. Of several groups of owners that hold the same elements, only one does."""
    everywhere: bool = True
    """Whether all ranks of the engine are owners of the same elements."""
    alike: bool = True
    """Whether the local tensors of all ranks have the same number of elements."""


def other_owners(
    partitioned: Iterable[tuple[str, ProcessGroup | None]], placements: Mapping[str, Placement]
) -> Iterator[str]:
    """Yields a phrase for an error if a parameter is partitioned over other ranks than its owners, or in another order.
    ``partitioned``: names of parameters, and the process group over which each is partitioned."""
    ranks_of_group = cache(ranks_of)
    for name, handle in partitioned:
        ranks, owners = ranks_of_group(handle), placements[name].owners.ranks
        if ranks != owners:
            yield f"{name}, which is partitioned over ranks {list(ranks)}, and not over ranks {list(owners)}"
            return
