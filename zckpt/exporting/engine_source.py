"""A live engine as the source of an export."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from zckpt.engines import adapt
from zckpt.engines.hugging_face import write_config
from zckpt.engines.peft import adapter_configs
from zckpt.errors import UnsupportedError
from zckpt.exporting.plan import SourceTensor
from zckpt.offloading.away import away, where_it_is
from zckpt.plan.reshard import StoredPieces
from zckpt.state.inventory import BUFFER, PARAM, WEIGHT_PARTS, unconverted
from zckpt.transfer.budget import Budget
from zckpt.transfer.devices import synchronize
from zckpt.transfer.memory import check_cast, check_fragments
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from zckpt.geometry import Grid
    from zckpt.ranks.collectives import Ranks

_DTYPES = list(TORCH_DTYPES)


class EngineSource:
    """The weights and persistent buffers of an engine as the source of an export. ``fragments`` are the fragments that
    this rank holds. ``sources``, ``aliases``, ``adapters`` and ``held`` are equal on all ranks."""

    path = None
    """An engine has no path."""

    def __init__(self, engine: object, dtype: torch.dtype | None, budget: Budget | None, ranks: Ranks) -> None:
        """``dtype``: the dtype to which floating point tensors are converted. Weights are then converted from their
        master weights. None means that all tensors keep the dtypes with which the model computes. This is collective.
        Raises the errors that ``zckpt.write`` raises for an engine."""
        grids: dict[str, Grid] = {}
        kept: set[str] = set()

        def collect() -> bytes:
            self.budget = budget or Budget.from_environment()
            adapter = adapt(engine)
            out = away(engine)
            if out is not None:
                out.refuse_lost("zckpt.export")
            adapter.refuse_unsupported(drop_gradients=True)
            if adapter.names_differ:
                raise UnsupportedError(
                    "the ranks of this engine have different tensors (experts or pipeline stages)",
                    hint="write a checkpoint with zckpt.write, and export that",
                )
            synchronize(adapter.devices)
            inventory = adapter.inventory((PARAM, BUFFER) if dtype is None else None)
            fragments = [f for f in inventory.fragments if f.part in WEIGHT_PARTS and f.copy == 0]
            self.fragments = [where_it_is(fragment) for fragment in fragments]
            check_fragments(self.fragments)
            self.aliases = dict(inventory.aliases)
            kept.update(unconverted(inventory.extra))
            self.module = adapter.module
            self.adapters = adapter_configs(adapter.module)
            # All ranks get the same names, in one order.
            grids.update((f.name, f.span.grid) for f in adapter.wanted({}))
            numbers = {name: number for number, name in enumerate(grids)}
            rows = [(numbers[f.name], f.span.start, f.span.stop, _DTYPES.index(f.dtype)) for f in fragments]
            return np.array(rows, np.int64).tobytes()

        tables = [np.frombuffer(raw, np.int64).reshape(-1, 4) for raw in ranks.share(collect, "collect the weights")]
        rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        fragment = np.concatenate([np.arange(len(table)) for table in tables])
        number, start, stop, dtype_number = np.concatenate(tables).T
        order = _one_holder_each(number, start, stop, rank)
        columns = (number, start, stop, rank, fragment, np.zeros_like(number))
        self.held = StoredPieces(*(column[order] for column in columns))
        """The elements of each tensor that each rank holds, as ``plan_messages`` takes them."""
        self.grids = list(grids.values())
        """The grid of each tensor."""
        self.sources: dict[str, SourceTensor] = {}
        """The tensors by name, with the dtypes to which they are converted."""
        dtype_numbers = dict(zip(number.tolist(), dtype_number.tolist(), strict=True))
        for tensor, (name, grid) in enumerate(grids.items()):
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
        if transformers is None or getattr(transformers, type(module).__name__, None) is not type(module):
            yield None
            return
        with TemporaryDirectory() as folder:
            write_config(module, folder)
            yield folder


def _one_holder_each(number: np.ndarray, start: np.ndarray, stop: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Returns the rows of fragments that together have every element once, ordered by tensor and element. If several
    ranks hold the same elements, they take turns from one fragment to the next. Each argument is a column."""
    order = np.lexsort((rank, stop, start, number))
    rows = np.stack((number, start, stop), axis=1)[order]
    first = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)][: len(rows)])
    holders = np.diff(np.r_[first, len(rows)])
    chosen: np.ndarray = order[first + np.arange(len(first)) % np.maximum(holders, 1)]
    return chosen
