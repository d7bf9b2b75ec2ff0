"""A live engine as the source of an export."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zckpt.engines import adapt
from zckpt.engines.hugging_face import write_config
from zckpt.engines.peft import adapter_configs
from zckpt.exporting.plan import SourceTensor
from zckpt.offloading.away import away, place_of
from zckpt.plan.reshard import StoredPieces
from zckpt.state.inventory import BUFFER, MASTER, PARAM
from zckpt.transfer.budget import Budget
from zckpt.transfer.devices import check_devices, synchronize
from zckpt.transfer.memory import check_cast
from zckpt.transfer.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.ranks.collectives import Ranks
    from zckpt.state.inventory import Fragment

_DTYPES = list(TORCH_DTYPES)


class EngineSource:
    """The weights and persistent buffers of an engine. ``fragments`` are those that this rank holds. All other
    attributes are equal on all ranks."""

    def __init__(self, engine: object, dtype: torch.dtype | None, budget: Budget | None, ranks: Ranks) -> None:
        """``dtype``: the dtype that floating point tensors are converted to; weights are then converted from their
        master weights. None means that all tensors are as the model computes with them. This is collective. Raises what
        ``zckpt.write`` raises for an engine."""
        shapes: dict[str, tuple[int, ...]] = {}

        def collect() -> bytes:
            self.budget = budget or Budget.from_environment()
            adapter = adapt(engine)
            out = away(engine)
            if out is not None:
                out.refuse_lost("zckpt.export")
            adapter.refuse_unsupported(drop_gradients=True)
            synchronize(adapter.devices)
            inventory = adapter.inventory((PARAM, BUFFER) if dtype is None else None)
            own = [f for f in inventory.fragments if f.part in (MASTER, PARAM, BUFFER) and f.copy == 0]
            check_devices(f.data for f in own if isinstance(f.data, torch.Tensor))
            self.fragments = [_where_it_is(fragment) for fragment in own]
            self.aliases = dict(inventory.aliases)
            self.module = adapter.module
            self.adapters = adapter_configs(adapter.module)
            shapes.update((f.name, f.shape) for f in adapter.wanted({}))  # every rank gets all names, in the same order
            numbers = {name: number for number, name in enumerate(shapes)}
            rows = [(numbers[f.name], f.start, f.stop, _DTYPES.index(f.dtype)) for f in own]
            return np.array(rows, np.int64).tobytes()

        told = [np.frombuffer(one, np.int64).reshape(-1, 4) for one in ranks.share(collect, "collect the weights")]
        rank = np.repeat(np.arange(len(told)), [len(one) for one in told])
        fragment = np.concatenate([np.arange(len(one)) for one in told])
        number, start, stop, stored = np.concatenate(told).T
        order = np.lexsort((start, number))
        columns = (number, rank, start, stop, fragment, np.zeros_like(number))
        self.held = StoredPieces(*(column[order] for column in columns))
        """Which rank holds which elements, in the form that ``plan_messages`` takes."""
        self.sources: dict[str, SourceTensor] = {}
        dtypes = dict(zip(number.tolist(), stored.tolist(), strict=True))
        for one, (name, shape) in enumerate(shapes.items()):
            own = TORCH_DTYPES[_DTYPES[dtypes[one]]]
            wanted = dtype if dtype is not None and own.is_floating_point else own
            check_cast(own, wanted, name)
            self.sources[name] = SourceTensor(DTYPE_NAMES[wanted], shape)

    @contextmanager
    def own_config(self) -> Iterator[str | None]:
        """Yields a temporary folder with the configuration of the model, or None if the model is not one of
        transformers'."""
        transformers = sys.modules.get("transformers")
        module: Any = self.module
        if transformers is None or getattr(transformers, type(module).__name__, None) is not type(module):
            yield None
            return
        with TemporaryDirectory() as folder:
            write_config(module, folder)
            yield folder


def _where_it_is(fragment: Fragment) -> Fragment:
    """Returns the fragment with the range of the file that holds it, if ``zckpt.offload`` has moved it to disk."""
    place = place_of(fragment.data) if isinstance(fragment.data, torch.Tensor) else None
    return fragment if place is None else replace(fragment, data=place)
