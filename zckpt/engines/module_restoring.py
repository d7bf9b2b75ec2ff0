"""The part of a restore that is the same for all engines that train a ``torch.nn.Module`` with a torch optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zckpt.engines import optimizer, rng
from zckpt.engines.composed import is_composed
from zckpt.engines.contract import Batch
from zckpt.engines.scheduler import SavedScheduler
from zckpt.engines.tensors import set_in_place
from zckpt.engines.trees import counters_of, subtree
from zckpt.plan.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, FileRange, Fragment
from zckpt.transfer.memory import lies_in_order
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from zckpt.engines.bitsandbytes import Gathered
    from zckpt.engines.contract import Selection
    from zckpt.engines.flats import FlatBuffer
    from zckpt.engines.module_adapter import ModuleAdapter


class ModuleRestoring:
    """Puts one ``Selection`` into one engine on one rank. ``Restoring`` documents its methods."""

    def __init__(self, adapter: ModuleAdapter, selection: Selection) -> None:
        self._adapter, self._engine, self._kind = adapter, adapter.engine, adapter.kind
        self._selection = selection
        self._places = {(fragment.part, fragment.name): fragment for fragment in selection.wanted}
        """The fragments of ``Selection.wanted``, by part and name."""
        self._moments = tuple(dict.fromkeys(part for part, _ in self._places if part not in RESERVED_PARTS))
        """The names of the moments that are restored."""
        self._extra: dict[str, torch.Tensor] = {}
        """The tensors of the extra state that are restored, by name. ``fill`` makes them."""
        trained = {name for flat in self._kind.flats for name in flat.stored_names}
        self._unknown = frozenset(trained.difference(selection.stored.get(MASTER, ())))
        """The trained parameters that have no master weight in the checkpoint, and so perhaps no param group in it."""

    def problems(self) -> list[str]:
        state, reasons = self._selection.state, list[str]()
        if "counters" in state:
            counters_of(state)
        if "optimizer" in state and state["optimizer"] is None:
            live_class = optimizer.class_name(self._kind.optimizer)
            reasons.append(f"optimizer: none in the checkpoint, {live_class} in the engine")
        elif "optimizer" in state:
            zero, restored = self._kind, self._selection.restored
            reasons += optimizer.problems(self._saved(), zero.optimizer, zero.flats, restored, self._unknown)
        else:
            # With a moment, but without its step, the optimizer would apply the wrong bias correction.
            parts = {key.partition("/")[0] for key in self._selection.restored}
            created = sorted(parts - RESERVED_PARTS - set(self._adapter.live_moments))
            reasons += [f"{part}: its step is in the state of the optimizer, which is not restored" for part in created]
            for flat in self._kind.flats:
                live = self._kind.optimizer.state.get(flat.master, {})
                for part in (part for part in self._moments if is_composed(live.get(part))):
                    if any((part, name) in self._places for name in flat.stored_names):
                        reasons.append(
                            f"{part}/{flat.stored_names[0]}: a {type(live[part]).__qualname__} in the engine"
                        )
        if "scheduler" in state:
            keeps = self._selection.keeps_settings
            reasons += self._saved_scheduler().problems(strict=self._selection.strict, keeps_settings=keeps)
        return reasons

    def fill(self) -> Generator[Batch, None, None]:
        self._kind.before_restore()
        weights = {name: f for name, f in self._adapter.weights_to_read() if (f.part, f.name) in self._places}
        buffers = self._adapter.buffers[0]
        not_contiguous = {name for name, buffer in buffers.items() if not lies_in_order(buffer)}
        urgent = [
            fragment
            for fragment in self._chosen(self._adapter.buffer_fragments(buffers))
            if fragment.name not in not_contiguous
        ]
        urgent += self._extra_fragments()
        urgent += (fragment for fragment in weights.values() if isinstance(fragment.data, torch.Tensor))
        in_memory = [flat for flat in self._kind.flats if not flat.files]
        urgent += (fragment for flat in in_memory for fragment in self._masters(flat))
        moments = (fragment for flat in in_memory for fragment in self._moments_of(flat))
        yield Batch(tuple(urgent), tuple(moments), self._kind.after_masters)
        for fragment in self._chosen(self._adapter.buffer_fragments(buffers)):
            if fragment.name in not_contiguous:  # The data of such a fragment is a copy, which is copied back here.
                yield Batch((fragment,))
                assert isinstance(fragment.data, torch.Tensor)
                buffer = buffers[fragment.name]
                set_in_place(buffer, fragment.data.view(buffer.shape))
        for name, fragment in weights.items():
            if isinstance(fragment.data, FileRange):
                with self._kind.weight_in_memory(name) as data:
                    yield Batch((fragment._replace(data=data),))
        for flat in self._kind.flats:
            if flat.files:
                with self._kind.flat_in_memory(flat) as flat_in_memory:
                    yield Batch((*self._masters(flat_in_memory), *self._moments_of(flat_in_memory)))

    def _extra_fragments(self) -> Iterator[Fragment]:
        """Yields the fragments of the extra state, with new memory that ``finish`` gives to the modules."""
        for (part, name), fragment in self._places.items():
            if part == BUFFER and name not in self._adapter.buffers[0]:
                like = self._adapter.extra.tensors.get(name)
                device = self._adapter.device if like is None else like.device
                tensor = torch.empty(fragment.shape, dtype=TORCH_DTYPES[fragment.dtype], device=device)
                self._extra[name] = tensor
                yield fragment._replace(data=tensor.view(-1))

    def _chosen(self, live: Iterable[Fragment]) -> Iterator[Fragment]:
        """Returns those fragments that are restored."""
        return (fragment for fragment in live if (fragment.part, fragment.name) in self._places)

    def _masters(self, flat: FlatBuffer) -> Iterator[Fragment]:
        """Yields the fragments of the master weights of a flat buffer that is in memory."""
        return self._chosen(flat.wanted(MASTER, flat.master.dtype, flat.master))

    def _moments_of(self, flat: FlatBuffer) -> Iterator[Fragment]:
        """Yields the fragments of the moments of a flat buffer that is in memory. Moments that do not exist yet are
        made."""
        for part in self._moments:
            fragment = next(
                (self._places[part, name] for name in flat.stored_names if (part, name) in self._places), None
            )
            if fragment is None:
                continue
            state = self._kind.optimizer.state[flat.master]
            if part not in state:
                dtype = TORCH_DTYPES[fragment.dtype]
                state[part] = torch.zeros(flat.moment_shape(part), dtype=dtype, device=flat.master.device)
            yield from self._chosen(flat.wanted(part, state[part].dtype, state[part]))

    def set_state(self) -> None:
        state, rank_state = self._selection.state, self._selection.rank_state
        scheduler = self._saved_scheduler() if "scheduler" in state else None
        if scheduler is not None:
            scheduler.take_steps(keeps_settings=self._selection.keeps_settings)
        if "optimizer" in state:
            optimizer.restore(self._saved(), self._kind.optimizer, self._kind.flats, self._unknown)
        self._kind.after_fill(frozenset(name for part, name in self._places if part == PARAM))
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

    def _saved(self) -> optimizer.Saved:
        selection = self._selection
        bound = (selection.rank_state or {}).get("optimizer")
        tree = subtree(selection.state, "optimizer")
        return optimizer.Saved(
            tree,
            bound,
            selection.kept,
            keeps_settings=selection.keeps_settings,
            live_class=optimizer.class_name(self._kind.optimizer),
        )

    def _saved_scheduler(self) -> SavedScheduler:
        tree, live = self._selection.state["scheduler"], self._kind.optimizer
        groups: list[int | None] = [None] * len(live.param_groups)
        saved_count = None
        if self._selection.state.get("optimizer") is not None:
            saved = self._saved()
            groups, saved_count = optimizer.matching_groups(saved, live, self._kind.flats), len(saved.groups)
        return SavedScheduler(tree, self._adapter.scheduler, groups, saved_count)
