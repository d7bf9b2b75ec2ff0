"""The part of a restore that is the same for all engines that train a ``torch.nn.Module`` with a torch optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch

from zckpt.adapters import optimizer
from zckpt.adapters.scheduler import SavedScheduler
from zckpt.adapters.trees import counters_of, subtree
from zckpt.engines import rng
from zckpt.engines.composed import is_composed
from zckpt.engines.contract import Batch
from zckpt.engines.tensors import set_in_place
from zckpt.plan.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, FileRange, Fragment
from zckpt.transfer.memory import lies_in_order
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from zckpt.adapters.extra_state import Gathered
    from zckpt.adapters.flats import FlatBuffer
    from zckpt.adapters.module_adapter import ModuleAdapter
    from zckpt.engines.contract import Selection


class ModuleRestoring:
    """Puts one ``Selection`` into one engine on one rank. ``Restoring`` documents its methods."""

    def __init__(self, adapter: ModuleAdapter, selection: Selection) -> None:
        self._adapter, self._engine, self._kind = adapter, adapter.engine, adapter.kind
        # There may be very many fragments, so only what is needed of them is kept.
        self._selection = replace(selection, wanted=())
        self._chosen: dict[str, dict[str, str]] = {}
        """The names of the tensors in ``Selection.wanted``, by part, with the dtype that each has in the engine."""
        for fragment in selection.wanted:
            self._chosen.setdefault(fragment.part, {})[fragment.name] = fragment.dtype
        in_module = adapter.buffers[0]
        self._wanted_extra = [f for f in selection.wanted if f.part == BUFFER and f.name not in in_module]
        """The fragments of the extra state that are restored."""
        self._moments = {part: chosen for part, chosen in self._chosen.items() if part not in RESERVED_PARTS}
        """Those of them that are moments."""
        self._extra: dict[str, torch.Tensor] = {}
        """The tensors of the extra state that are restored, by name. ``fill`` makes them."""
        trained, masters = (flat.stored_names for flat in self._kind.flats), selection.stored.get(MASTER, ())
        self._unknown = frozenset(name for name in chain.from_iterable(trained) if name not in masters)
        """The trained parameters that have no master weight in the checkpoint, and so perhaps no param group in it."""

    def problems(self) -> list[str]:
        state, reasons = self._selection.state, list[str]()
        if "counters" in state:
            counters_of(state)
        if "optimizer" in state and state["optimizer"] is None:
            live_class = optimizer.class_name(self._kind.optimizer)
            reasons.append(f"optimizer: none in the checkpoint, {live_class} in the engine")
        elif "optimizer" in state:
            reasons += self._optimizer.problems(self._selection.restored)
        else:
            # With a moment, but without its step, the optimizer would apply the wrong bias correction.
            created = sorted(self._selection.restored.keys() - RESERVED_PARTS - set(self._adapter.live_moments))
            reasons += [f"{part}: its step is in the state of the optimizer, which is not restored" for part in created]
            for flat in self._kind.flats:
                live = self._kind.optimizer.state.get(flat.master, {})
                reasons += [
                    f"{part}/{flat.stored_names[0]}: a {type(live[part]).__qualname__} in the engine"
                    for part, chosen in self._moments.items()
                    if is_composed(live.get(part)) and not chosen.keys().isdisjoint(flat.stored_names)
                ]
        if "scheduler" in state:
            keeps = self._selection.keeps_settings
            reasons += self._saved_scheduler().problems(strict=self._selection.strict, keeps_settings=keeps)
        return reasons

    def fill(self) -> Generator[Batch, None, None]:
        self._kind.before_restore()
        in_params, in_buffers = self._chosen.get(PARAM, {}), self._chosen.get(BUFFER, {})
        weights = {name: f for name, f in self._adapter.weights_to_read() if f.name in in_params}
        buffers = {name: buffer for name, buffer in self._adapter.buffers[0].items() if name in in_buffers}
        gaps = {name: buffer for name, buffer in buffers.items() if not lies_in_order(buffer)}
        in_order = {name: buffer for name, buffer in buffers.items() if name not in gaps}
        # No variable has this batch, because it would keep all fragments in memory while the caller reads.
        yield self._in_memory(in_order, (f for f in weights.values() if isinstance(f.data, torch.Tensor)))
        for fragment in self._adapter.buffer_fragments(gaps):
            yield Batch((fragment,))
            assert isinstance(fragment.data, torch.Tensor)  # It is a copy, which is copied back here.
            buffer = gaps[fragment.name]
            set_in_place(buffer, fragment.data.view(buffer.shape))
        for name, fragment in weights.items():
            if isinstance(fragment.data, FileRange):
                with self._kind.weight_in_memory(name) as data:
                    yield Batch((fragment._replace(data=data),))
        for flat in self._kind.flats:
            if flat.files:
                with self._kind.flat_in_memory(flat) as flat_in_memory:
                    yield Batch((*self._masters(flat_in_memory), *self._moments_of(flat_in_memory)))

    def _in_memory(self, buffers: Mapping[str, torch.Tensor], weights: Iterator[Fragment]) -> Batch:
        """Returns all that is read straight into the memory of the engine. ``buffers`` lie in order."""
        flats = [flat for flat in self._kind.flats if not flat.files]
        urgent = chain(
            self._adapter.buffer_fragments(buffers), self._extra_fragments(), weights,
            chain.from_iterable(map(self._masters, flats)),
        )  # fmt: skip
        moments = chain.from_iterable(map(self._moments_of, flats))
        return Batch(tuple(urgent), tuple(moments), self._kind.after_masters)

    def _extra_fragments(self) -> Iterator[Fragment]:
        """Yields the fragments of the extra state, with new memory that ``finish`` gives to the modules."""
        for fragment in self._wanted_extra:
            like = self._adapter.extra.tensors.get(fragment.name)
            device = self._adapter.device if like is None else like.device
            tensor = torch.empty(fragment.shape, dtype=TORCH_DTYPES[fragment.dtype], device=device)
            self._extra[fragment.name] = tensor
            yield fragment._replace(data=tensor.view(-1))

    def _masters(self, flat: FlatBuffer) -> Iterator[Fragment]:
        """Returns the fragments of the master weights of a flat buffer that is in memory."""
        return flat.wanted(MASTER, self._chosen.get(MASTER, ()), flat.master)

    def _moments_of(self, flat: FlatBuffer) -> Iterator[Fragment]:
        """Yields the fragments of the moments of a flat buffer that is in memory. Moments that do not exist yet are
        made."""
        for part, chosen in self._moments.items():
            dtype_name = next((chosen[name] for name in flat.stored_names if name in chosen), None)
            if dtype_name is None:
                continue
            state = self._kind.optimizer.state[flat.master]
            if part not in state:
                dtype = TORCH_DTYPES[dtype_name]
                state[part] = torch.zeros(flat.moment_shape(part), dtype=dtype, device=flat.master.device)
            yield from flat.wanted(part, chosen, state[part])

    def set_state(self) -> None:
        state, rank_state = self._selection.state, self._selection.rank_state
        scheduler = self._saved_scheduler() if "scheduler" in state else None
        if scheduler is not None:
            scheduler.take_steps(keeps_settings=self._selection.keeps_settings)
        if "optimizer" in state:
            self._optimizer.restore()
        self._kind.after_fill(self._chosen.get(PARAM, {}).keys())
        if scheduler is not None and not self._selection.keeps_settings:
            scheduler.restore(self._kind.optimizer.param_groups)
        self._set_more_state()
        if rank_state is not None and self._selection.rng:
            rng.restore(subtree(rank_state, "rng"), self._adapter.device)

    def _set_more_state(self) -> None:
        """Sets the counters, and what else belongs to one framework only. Not collective."""
        raise NotImplementedError

    def finish(self) -> None:
        self._kind.after_restore()
        self._adapter.extra.load(self._extra, self._gathered)

    @property
    def _gathered(self) -> Gathered:
        """A function that returns a context in which given parameters are whole. ``ExtraState.load`` calls it."""
        raise NotImplementedError

    @cached_property
    def _optimizer(self) -> optimizer.OptimizerRestoring:
        """The tree of the optimizer that is restored into the live one."""
        selection, live = self._selection, self._kind.optimizer
        saved = optimizer.Saved(
            subtree(selection.state, "optimizer"), (selection.rank_state or {}).get("optimizer"), selection.kept,
            keeps_settings=selection.keeps_settings, live_class=optimizer.class_name(live),
        )  # fmt: skip
        return optimizer.OptimizerRestoring(saved, live, self._kind.flats, self._unknown)

    def _saved_scheduler(self) -> SavedScheduler:
        groups: list[int | None] = [None] * len(self._kind.optimizer.param_groups)
        saved_count = None
        if self._selection.state.get("optimizer") is not None:
            groups, saved_count = self._optimizer.matching_groups(), self._optimizer.saved_groups
        return SavedScheduler(self._selection.state["scheduler"], self._adapter.scheduler, groups, saved_count)
