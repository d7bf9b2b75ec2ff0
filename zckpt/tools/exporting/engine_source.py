"""A live engine as the source of an export."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.distributed.fsdp import FSDPModule

from zckpt.engines import adapt
from zckpt.engines.away import away, where_they_are
from zckpt.geometry import Grid
from zckpt.plan.inventory import BUFFER, PARAM, WEIGHT_PARTS, unconverted
from zckpt.plan.reshard import StoredPieces
from zckpt.tools.exporting.plan import SourceTensor
from zckpt.tools.hugging_face import write_config
from zckpt.transfer.budget import Budget, budget_or_default
from zckpt.transfer.devices import synchronize
from zckpt.transfer.memory import check_cast, check_fragments
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from zckpt.geometry import Sections
    from zckpt.ranks.collectives import Ranks

_DTYPES = list(TORCH_DTYPES)


class _Told(NamedTuple):
    """What a rank tells rank 0 of its tensors."""

    held: bytes
    """The fragments that the rank holds: a table of int64 numbers with a row for each."""
    tensors: Sequence[tuple[str, Sequence[int], Sections]] = ()
    """The name of each tensor that the rank knows, with the shape and the sections of its grid. A row of ``held`` has
    the position of its tensor in this list. If it is empty, the rank has the tensors of rank 0."""
    aliases: Mapping[str, str] = {}
    kept: Sequence[str] = ()
    """The names of the tensors that are not converted."""


class EngineSource:
    """The weights and persistent buffers of an engine as the source of an export. ``fragments`` are the fragments that
    this rank holds. ``sources``, ``aliases``, ``adapters`` and ``held`` are equal on all ranks."""

    path = None
    """An engine has no path."""

    def __init__(self, engine: object, dtype: torch.dtype | None, budget: Budget | None, ranks: Ranks) -> None:
        """``dtype``: the dtype to which floating point tensors are converted. Weights are then converted from their
        master weights. None means that all tensors keep the dtypes with which the model computes. This is collective.
        Raises the errors that ``zckpt.write`` raises for an engine."""

        def collect() -> _Told:
            self.budget = budget_or_default(budget)
            adapter = adapt(engine)
            out = away(engine)
            if out is not None:
                out.refuse_lost("zckpt.export")
            adapter.refuse_unsupported(drop_gradients=True)
            synchronize(adapter.devices)
            inventory, differ = adapter.inventory((PARAM, BUFFER) if dtype is None else None), adapter.names_differ
            fragments = [f for f in inventory.fragments if f.part in WEIGHT_PARTS and (f.copy == 0 or differ)]
            self.fragments = where_they_are(fragments)
            check_fragments(self.fragments)
            self.module = adapter.module
            self.adapters = adapter.peft_configs
            grids = {f.name: f.span.grid for f in adapter.wanted({})}
            numbers = {name: number for number, name in enumerate(grids)}
            rows = [(numbers[f.name], f.span.start, f.span.stop, f.copy, _DTYPES.index(f.dtype)) for f in fragments]
            held = np.array(rows, np.int64).tobytes()
            if ranks.rank and not differ:  # The rest would be what rank 0 tells, in the same order.
                return _Told(held)
            tensors = [(name, grid.shape, grid.sections) for name, grid in grids.items()]
            return _Told(held, tensors, dict(inventory.aliases), sorted(unconverted(inventory.extra)))

        held, tensors, self.aliases, kept = _Told(*ranks.decide(collect, _joined, "collect the weights"))
        number, start, stop, rank, fragment, dtype_number = np.frombuffer(held, np.int64).reshape(6, -1)
        self.held = StoredPieces(number, start, stop, rank, fragment, np.zeros_like(number))
        """The elements of each tensor that each rank holds, as ``plan_exchange`` takes them."""
        self.grids = [Grid(tuple(shape), _as_tuples(sections)) for _, shape, sections in tensors]
        """The grid of each tensor."""
        self.sources: dict[str, SourceTensor] = {}
        """The tensors by name, with the dtypes to which they are converted."""
        dtype_numbers = dict(zip(number.tolist(), dtype_number.tolist(), strict=True))
        for tensor, ((name, *_), grid) in enumerate(zip(tensors, self.grids, strict=True)):
            held_dtype = TORCH_DTYPES[_DTYPES[dtype_numbers[tensor]]]
            target_dtype = dtype if dtype and held_dtype.is_floating_point and name not in kept else held_dtype
            check_cast(held_dtype, target_dtype, name)
            self.sources[name] = SourceTensor(DTYPE_NAMES[target_dtype], grid.shape)

    @contextmanager
    def own_config(self, prefix: str) -> Iterator[str | None]:
        """Yields a temporary folder with the configuration of the module whose tensors have names that begin with
        ``prefix``, or None if its class is not one of transformers. In the place of a ``PeftModel``, this is the model
        that has the adapters."""
        transformers = sys.modules.get("transformers")
        module: Any = None if self.module is None else dict(self.module.named_modules()).get(prefix.removesuffix("."))
        if hasattr(module, "get_base_model"):
            module = module.get_base_model()
        # fully_shard replaces the class of a module by a subclass of it, which is none of transformers.
        kind = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
        if transformers is None or getattr(transformers, kind.__name__, None) is not kind:
            yield None
            return
        with TemporaryDirectory() as folder:
            write_config(module, kind.__name__, folder)
            yield folder


def _joined(of_ranks: Sequence[Sequence[Any]]) -> _Told:
    """Returns what all ranks have. ``held`` then has the columns of the fragments that together have every element
    once: the tensor, the start, the stop, the rank, the number of the fragment on this rank, and the dtype."""
    all_told = [_Told(*told) for told in of_ranks]
    described = {tensor[0]: tensor for told in all_told for tensor in told.tensors}
    aliases = {alias: name for told in reversed(all_told) for alias, name in told.aliases.items()}
    kept = {name for told in all_told for name in told.kept}
    numbers = {name: number for number, name in enumerate(described)}
    tables = []
    for told in all_told:
        position, *others = np.frombuffer(told.held, np.int64).reshape(-1, 5).T
        number_at = np.array([numbers[name] for name, *_ in told.tensors or all_told[0].tensors], np.int64)
        tables.append((number_at[position], *others))
    rank = np.repeat(np.arange(len(tables)), [len(number) for number, *_ in tables])
    fragment = np.concatenate([np.arange(len(number)) for number, *_ in tables])
    number, start, stop, copy, dtype_number = map(np.concatenate, zip(*tables, strict=True))
    order = _one_holder_each(number, start, stop, copy, rank)
    held = np.stack((number, start, stop, rank, fragment, dtype_number))[:, order].tobytes()
    return _Told(held, list(described.values()), aliases, sorted(kept))


def _as_tuples(value: Any) -> Any:
    """Returns a sequence with tuples in the place of all sequences in it."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _one_holder_each(
    number: np.ndarray, start: np.ndarray, stop: np.ndarray, copy: np.ndarray, rank: np.ndarray
) -> np.ndarray:
    """Returns the rows of fragments that together have every element once, ordered by tensor and element. Of a tensor
    that differs from rank to rank, they have the first copy. If several ranks hold the same elements, they take turns
    from one fragment to the next. Each argument is a column."""
    order = np.lexsort((rank, stop, start, copy, number))
    is_first = number[order] != np.r_[-1, number[order][:-1]]
    order = order[copy[order] == copy[order][is_first][np.cumsum(is_first) - 1]]
    rows = np.stack((number, start, stop), axis=1)[order]
    first = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)][: len(rows)])
    holders = np.diff(np.r_[first, len(rows)])
    chosen: np.ndarray = order[first + np.arange(len(first)) % np.maximum(holders, 1)]
    return chosen
