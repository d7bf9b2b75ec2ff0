"""Restores a checkpoint into a DeepSpeed engine. This is the ``Restoring`` of DeepSpeed's adapter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines import rng
from zckpt.engines.composed import is_composed
from zckpt.engines.contract import Batch
from zckpt.engines.deepspeed import cpu_adam, optimizer, scaler
from zckpt.engines.deepspeed.scheduler import SavedScheduler
from zckpt.engines.tensors import set_in_place
from zckpt.errors import FormatError
from zckpt.state.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, FileRange, Fragment
from zckpt.transfer.memory import lies_in_order
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from zckpt.engines.contract import Selection
    from zckpt.engines.deepspeed.adapter import DeepSpeedAdapter
    from zckpt.engines.deepspeed.flats import FlatBuffer

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""The attributes of an engine that count steps and samples."""


class DeepSpeedRestoring:
    """Puts one ``Selection`` into one DeepSpeed engine on one rank. ``Restoring`` documents its methods."""

    def __init__(self, adapter: DeepSpeedAdapter, selection: Selection) -> None:
        self._adapter, self._engine, self._zero = adapter, adapter.engine, adapter.zero
        self._selection = selection
        self._places = {(fragment.part, fragment.name): fragment for fragment in selection.wanted}
        """The fragments of ``Selection.wanted``, by part and name."""
        self._moments = tuple(dict.fromkeys(part for part, _ in self._places if part not in RESERVED_PARTS))
        """The names of the moments that are restored."""
        self._extra: dict[str, torch.Tensor] = {}
        """The tensors of the extra state that are restored, by name. ``fill`` makes them."""
        trained = {name for flat in self._zero.flats for name in flat.names}
        self._unknown = frozenset(trained.difference(selection.stored.get(MASTER, ())))
        """The trained parameters that have no master weight in the checkpoint, and so perhaps no param group in it."""

    def problems(self) -> list[str]:
        state, reasons = self._selection.state, list[str]()
        if "counters" in state:
            counters_of(state)
        if "scaler" in state:
            scaler.check(state["scaler"])
        if "optimizer" in state and state["optimizer"] is None:
            live_class = type(self._zero.optimizer).__name__
            reasons.append(f"optimizer: none in the checkpoint, {live_class} in the engine")
        elif "optimizer" in state:
            zero, restored = self._zero, self._selection.restored
            reasons += optimizer.problems(self._saved(), zero.optimizer, zero.flats, restored, self._unknown)
        else:
            # With a moment, but without its step, the optimizer would apply the wrong bias correction.
            parts = {key.partition("/")[0] for key in self._selection.restored}
            created = sorted(parts - RESERVED_PARTS - set(self._adapter.live_moments))
            reasons += [f"{part}: its step is in the state of the optimizer, which is not restored" for part in created]
            for flat in self._zero.flats:
                live = self._zero.optimizer.state.get(flat.master, {})
                for part in (part for part in self._moments if is_composed(live.get(part))):
                    if any((part, name) in self._places for name in flat.names):
                        reasons.append(f"{part}/{flat.names[0]}: a {type(live[part]).__qualname__} in the engine")
        if "scheduler" in state:
            keeps = self._selection.keeps_settings
            reasons += self._saved_scheduler().problems(strict=self._selection.strict, keeps_settings=keeps)
        return reasons

    def fill(self) -> Generator[Batch, None, None]:
        self._zero.before_restore()
        weights = tuple(self._chosen(self._adapter.param_fragments(self._adapter.masterless)))
        buffers = self._adapter.buffers[0]
        not_contiguous = {name for name, buffer in buffers.items() if not lies_in_order(buffer)}
        urgent = [
            fragment
            for fragment in self._chosen(self._adapter.buffer_fragments(buffers))
            if fragment.name not in not_contiguous
        ]
        urgent += self._extra_fragments()
        urgent += (fragment for fragment in weights if isinstance(fragment.data, torch.Tensor))
        in_memory = [flat for flat in self._zero.flats if not flat.files]
        urgent += (fragment for flat in in_memory for fragment in self._masters(flat))
        moments = (fragment for flat in in_memory for fragment in self._moments_of(flat))
        yield Batch(tuple(urgent), tuple(moments), self._zero.after_masters)
        for fragment in self._chosen(self._adapter.buffer_fragments(buffers)):
            if fragment.name in not_contiguous:  # The data of such a fragment is a copy, which is copied back here.
                yield Batch((fragment,))
                assert isinstance(fragment.data, torch.Tensor)
                buffer = buffers[fragment.name]
                set_in_place(buffer, fragment.data.view(buffer.shape))
        for fragment in weights:
            if isinstance(fragment.data, FileRange):
                with self._zero.weight_in_memory(fragment.name) as data:
                    yield Batch((replace(fragment, data=data),))
        for flat in self._zero.flats:
            if flat.files:
                with self._zero.flat_in_memory(flat) as flat_in_memory:
                    yield Batch((*self._masters(flat_in_memory), *self._moments_of(flat_in_memory)))

    def _extra_fragments(self) -> Iterator[Fragment]:
        """Yields the fragments of the extra state, with new memory that ``finish`` gives to the modules."""
        for (part, name), fragment in self._places.items():
            if part == BUFFER and name not in self._adapter.buffers[0]:
                like = self._adapter.extra.tensors.get(name)
                device = self._engine.device if like is None else like.device
                tensor = torch.empty(fragment.shape, dtype=TORCH_DTYPES[fragment.dtype], device=device)
                self._extra[name] = tensor
                yield replace(fragment, data=tensor.view(-1))

    def _chosen(self, live: Iterable[Fragment]) -> Iterator[Fragment]:
        """Returns those fragments that are restored."""
        return (fragment for fragment in live if (fragment.part, fragment.name) in self._places)

    def _masters(self, flat: FlatBuffer) -> Iterator[Fragment]:
        """Yields the fragments of the master weights of a flat buffer that is in memory."""
        return self._chosen(flat.fragments(MASTER, flat.master.dtype, flat.master))

    def _moments_of(self, flat: FlatBuffer) -> Iterator[Fragment]:
        """Yields the fragments of the moments of a flat buffer that is in memory. Moments that do not exist yet are
        made."""
        for part in self._moments:
            fragment = next((self._places[part, name] for name in flat.names if (part, name) in self._places), None)
            if fragment is None:
                continue
            state = self._zero.optimizer.state[flat.master]
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
            optimizer.restore(self._saved(), self._zero.optimizer, self._zero.flats, self._unknown)
        self._zero.after_fill(frozenset(name for part, name in self._places if part == PARAM))
        if scheduler is not None and not self._selection.keeps_settings:
            scheduler.restore(self._zero.optimizer.param_groups)
        if "optimizer" in state:
            betas_vary = bool(getattr(self._engine.lr_scheduler, "cycle_momentum", False))
            cpu_adam.replay(self._zero.optimizer, self._zero.flats, betas_vary)
        if "scaler" in state:
            scaler.restore(state["scaler"], self._engine.optimizer)
        if "counters" in state:
            for name, value in counters_of(state).items():
                setattr(self._engine, name, value)
        # The restore has dropped all gradients, so the next micro step must be the first one of an optimizer step. The
        # count may be in the middle of a step: if no counters were restored, it is the engine's own, and if the writer
        # dropped gradients, it is the one that was saved.
        self._engine.micro_steps -= self._engine.micro_steps % self._engine.gradient_accumulation_steps()
        self._engine._unmanaged_backward_count = 0
        if rank_state is not None and self._selection.rng:
            rng.restore(subtree(rank_state, "rng"), self._engine.device)
            tracked = subtree(rank_state, "rng_tracker")
            if tracked:
                rng_tracker().set_states({name: rng.to_tensor(state) for name, state in tracked.items()})

    def finish(self) -> None:
        self._zero.after_restore()
        self._adapter.extra.load(self._extra, sys.modules["deepspeed"].zero.GatheredParameters)

    def _saved(self) -> optimizer.Saved:
        selection = self._selection
        bound = (selection.rank_state or {}).get("optimizer")
        tree = subtree(selection.state, "optimizer")
        return optimizer.Saved(tree, bound, selection.kept, keeps_settings=selection.keeps_settings)

    def _saved_scheduler(self) -> SavedScheduler:
        tree, live = self._selection.state["scheduler"], self._zero.optimizer
        groups: list[int | None] = [None] * len(live.param_groups)
        saved_count = None
        if self._selection.state.get("optimizer") is not None:
            saved = self._saved()
            groups, saved_count = optimizer.matching_groups(saved, live, self._zero.flats), len(saved.groups)
        return SavedScheduler(tree, self._engine.lr_scheduler, groups, saved_count)


def rng_tracker() -> Any:
    """Returns the tracker of deepspeed.checkpointing for random number generators. Dropout inside its fork() uses these
    generators. Mostly there are none."""
    return sys.modules["deepspeed"].checkpointing.get_cuda_rng_tracker()


def counters_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the counters in an engine's state. Raises FormatError if one of them is missing or not an integer."""
    tree = subtree(state, "counters")
    for name in COUNTERS:
        if type(tree.get(name)) is not int:
            raise FormatError(f"state: counters.{name} is missing or not an integer")
    return {name: tree[name] for name in COUNTERS}


def subtree(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the mapping that ``state`` has at ``key``. Raises FormatError if there is none."""
    if not isinstance(state.get(key), Mapping):
        raise FormatError(f"state: {key} is missing or not a mapping")
    tree: Mapping[str, Any] = state[key]
    return tree
