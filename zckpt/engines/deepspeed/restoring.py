"""One restore into a DeepSpeed engine, as ``Restoring``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines import rng
from zckpt.engines.deepspeed import cpu_adam, optimizer, scaler
from zckpt.engines.tensors import set_in_place
from zckpt.errors import FormatError
from zckpt.state.inventory import MASTER, PARAM, RESERVED_PARTS, FileSpan, Fragment
from zckpt.transfer.memory import lies_in_order
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from zckpt.engines.contract import Selection
    from zckpt.engines.deepspeed.adapter import DeepSpeedAdapter
    from zckpt.engines.deepspeed.flats import Flat

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class DeepSpeedRestoring:
    """Puts one ``Selection`` into one DeepSpeed engine on one rank; ``Restoring`` says what each method is for."""

    def __init__(self, adapter: DeepSpeedAdapter, selection: Selection) -> None:
        self._adapter, self._engine, self._zero = adapter, adapter.engine, adapter.zero
        self._selection = selection
        self._places = {(fragment.part, fragment.name): fragment for fragment in selection.wanted}
        self._moments = tuple(dict.fromkeys(part for part, _ in self._places if part not in RESERVED_PARTS))
        trained = {name for flat in self._zero.flats for name in flat.names}
        self._unknown = frozenset(trained.difference(selection.stored.get(MASTER, ())))
        """The trained parameters of which the checkpoint has no master, and so perhaps no param group."""

    def problems(self) -> list[str]:
        state, found = self._selection.state, list[str]()
        if "counters" in state:
            counters_of(state)
        if "scaler" in state:
            scaler.check(state["scaler"])
        if "optimizer" in state and state["optimizer"] is None:
            here = type(self._zero.optimizer).__name__
            found.append(f"optimizer: none in the checkpoint, {here} in the engine")
        elif "optimizer" in state:
            zero, restored = self._zero, self._selection.restored
            found += optimizer.problems(self._saved(), zero.optimizer, zero.flats, restored, self._unknown)
        else:
            # A moment without its step would be corrected for the wrong bias.
            parts = {key.partition("/")[0] for key in self._selection.restored}
            created = sorted(parts - RESERVED_PARTS - set(self._adapter.live_moments))
            found += [f"{part}: its step is in the state of the optimizer, which is not restored" for part in created]
        if "scheduler" in state:
            found += self._scheduler_problems()
        return found

    def fill(self) -> Generator[tuple[Fragment, ...], None, None]:
        self._zero.before_restore()
        weights = tuple(self._chosen(self._adapter.param_fragments(self._adapter.masterless)))
        buffers = self._adapter.buffers[0]
        strided = {name for name, buffer in buffers.items() if not lies_in_order(buffer)}
        here = [one for one in self._chosen(self._adapter.buffer_fragments()) if one.name not in strided]
        here += (f for f in weights if isinstance(f.data, torch.Tensor))
        for flat in self._zero.flats:
            if not flat.files:
                here += self._chosen(self._with_moments(flat))
        yield tuple(here)
        for fragment in self._chosen(self._adapter.buffer_fragments()):
            if fragment.name in strided:  # The data of such a fragment is a copy of the buffer.
                yield (fragment,)
                assert isinstance(fragment.data, torch.Tensor)
                buffer = buffers[fragment.name]
                set_in_place(buffer, fragment.data.view(buffer.shape))
        for fragment in weights:
            if isinstance(fragment.data, FileSpan):
                with self._zero.weight_in_memory(fragment.name) as data:
                    yield (replace(fragment, data=data),)
        for flat in self._zero.flats:
            if flat.files:
                with self._zero.flat_in_memory(flat) as in_memory:
                    yield tuple(self._chosen(self._with_moments(in_memory)))

    def _chosen(self, live: Iterable[Fragment]) -> Iterator[Fragment]:
        return (fragment for fragment in live if (fragment.part, fragment.name) in self._places)

    def _with_moments(self, flat: Flat) -> Iterator[Fragment]:
        """All of a flat that is in memory, moments made where they do not exist yet."""
        yield from flat.fragments(MASTER, flat.master.dtype, flat.master)
        for part in self._moments:
            found = next((self._places[part, name] for name in flat.names if (part, name) in self._places), None)
            if found is None:
                continue
            state = self._zero.optimizer.state[flat.master]
            if part not in state:
                dtype = TORCH_DTYPES[found.dtype]
                state[part] = torch.zeros(flat.moment_shape(part), dtype=dtype, device=flat.master.device)
            yield from flat.wanted(part, state[part].dtype, state[part])

    def set_state(self) -> None:
        state, rank_state = self._selection.state, self._selection.rank_state
        if "optimizer" in state:
            optimizer.restore(self._saved(), self._zero.optimizer, self._zero.flats, self._unknown)
        self._zero.after_fill(frozenset(name for part, name in self._places if part == PARAM))
        if "scheduler" in state:
            self._restore_scheduler()
        if "optimizer" in state:
            betas_vary = bool(getattr(self._engine.lr_scheduler, "cycle_momentum", False))
            cpu_adam.replay(self._zero.optimizer, self._zero.flats, betas_vary)
        if "scaler" in state:
            scaler.restore(state["scaler"], self._engine.optimizer)
        if "counters" in state:
            for name, value in counters_of(state).items():
                setattr(self._engine, name, value)
        # No gradients are left, so the next micro step is the first one of an optimizer step. The number may lie inside
        # a step: the engine's own if no counters were restored, or a saved one if gradients were dropped then.
        self._engine.micro_steps -= self._engine.micro_steps % self._engine.gradient_accumulation_steps()
        self._engine._unmanaged_backward_count = 0
        if rank_state is not None and self._selection.rng:
            rng.restore(subtree(rank_state, "rng"), self._engine.device)
            tracked = subtree(rank_state, "rng_tracker")
            if tracked:
                rng_tracker().set_states({name: rng.to_tensor(state) for name, state in tracked.items()})

    def finish(self) -> None:
        self._zero.after_restore()

    def _saved(self) -> optimizer.Saved:
        chosen = self._selection
        bound = (chosen.rank_state or {}).get("optimizer")
        return optimizer.Saved(subtree(chosen.state, "optimizer"), bound, chosen.kept)

    def _scheduler_problems(self) -> list[str]:
        state, scheduler = self._selection.state, self._engine.lr_scheduler
        groups = len(self._zero.optimizer.param_groups)
        tree = None if state.get("scheduler") is None else subtree(state, "scheduler")
        here = None if scheduler is None else type(scheduler).__name__
        there = None if tree is None else tree.get("class")
        # A conversion writes None where its source does not say the class.
        unknown = tree is not None and here is not None and there is None
        if here != there and not unknown:
            return [f"scheduler: {there or 'none'} in the checkpoint, {here or 'none'} in the engine"]
        rates = None if tree is None else subtree(tree, "state").get("base_lrs")
        if isinstance(rates, (list, tuple)) and len(rates) != groups:
            return [f"scheduler: {here} of {len(rates)} param groups in the checkpoint, {groups} in the engine"]
        return []

    def _restore_scheduler(self) -> None:
        scheduler = self._engine.lr_scheduler
        if scheduler is None:
            return
        saved = subtree(subtree(self._selection.state, "scheduler"), "state")
        scheduler.load_state_dict(dict(saved))
        if hasattr(scheduler, "_last_lr") and "_last_lr" not in saved:
            # DeepSpeed's own schedulers save a step number only; get_last_lr() would give the first step's.
            scheduler._last_lr = [group["lr"] for group in self._zero.optimizer.param_groups]


def rng_tracker() -> Any:
    """The generators of deepspeed.checkpointing, from which dropout draws under its fork(); most often none."""
    return sys.modules["deepspeed"].checkpointing.get_cuda_rng_tracker()


def counters_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the counters of an engine's state. Raises FormatError where they are not in it."""
    tree = subtree(state, "counters")
    for name in COUNTERS:
        if type(tree.get(name)) is not int:
            raise FormatError(f"state: counters.{name} is missing or not an integer")
    return {name: tree[name] for name in COUNTERS}


def subtree(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping at ``key``. Raises FormatError where there is none."""
    if not isinstance(state.get(key), Mapping):
        raise FormatError(f"state: {key} is missing or not a mapping")
    tree: Mapping[str, Any] = state[key]
    return tree
