"""A DeepSpeed engine as ``EngineAdapter``: what does not depend on the ZeRO stage. Each stage has a file of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines import rng
from zckpt.engines.deepspeed import cpu_adam, optimizer, refuse, scaler
from zckpt.engines.deepspeed.flats import moments
from zckpt.engines.deepspeed.group import RankGroup, process_group, rank_group_of
from zckpt.engines.deepspeed.wrapper import Wrapper, kind_of
from zckpt.engines.hooks import call_before
from zckpt.engines.tensors import (
    dtype_name,
    named_parameters,
    persistent_buffers,
    set_in_place,
    unwrapped,
)
from zckpt.errors import FormatError, UnsupportedError
from zckpt.state.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, FileSpan, Fragment, Inventory
from zckpt.transfer.devices import devices_of
from zckpt.transfer.tensors import lies_in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator

    from torch.distributed import ProcessGroup

    from zckpt.engines.deepspeed.flats import Flat

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class DeepSpeedAdapter:
    """One DeepSpeed engine on one rank; ``EngineAdapter`` says what each method is for.

    Make a new one for each write or restore: it remembers where the engine keeps things. ``refuse_unsupported`` comes
    first; what the other methods do with an engine that it refuses is undefined.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._weights_wanted: frozenset[str] = frozenset()
        self._moments_wanted: dict[tuple[str, ...], dict[str, torch.dtype]] = {}
        """The moments to be restored, by the names of a flat's parameters."""
        self._unknown: frozenset[str] = frozenset()
        """The trained parameters of which the checkpoint has no master, and so perhaps no param group."""

    @staticmethod
    def process_group(engine: Any) -> ProcessGroup | None:
        return process_group(engine)

    @property
    def trains(self) -> bool:
        return self._zero.optimizer is not None

    @property
    def trees(self) -> tuple[str, ...]:
        return ("counters", *(("optimizer", "scaler", "scheduler") if self.trains else ()))

    @property
    def step(self) -> int:
        return int(self._engine.global_steps)

    @property
    def description(self) -> dict[str, str]:
        return {
            "framework": f"DeepSpeed {sys.modules['deepspeed'].__version__}",
            "torch": str(torch.__version__),
            "mode": f"ZeRO stage {int(self._engine.zero_optimization_stage())}",
            "optimizer": type(self._zero.optimizer).__name__ if self.trains else "none",
        }

    @property
    def devices(self) -> frozenset[torch.device]:
        masters = (flat.master for flat in self._zero.flats)
        tensors = chain(self._parameters[0].values(), self._buffers[0].values(), masters)
        return frozenset({torch.device(self._engine.device), *devices_of(tensors)})

    def refuse_unsupported(self, *, drop_gradients: bool = False) -> None:
        found = refuse.unsupported(self._engine)
        if found:
            raise UnsupportedError(
                f"zckpt does not support this DeepSpeed engine: {'; '.join(found)}", hint=refuse.SUPPORTED
            )
        # Where the optimizer's state holds some of them already, they cannot be dropped.
        droppable = self._kind.changes_only_in_step(self._engine.optimizer)
        if drop_gradients and droppable:
            return
        for gradients in refuse.pending_gradients(self._engine):
            hint = "do this at a gradient accumulation boundary, right after the engine.step() that ends it"
            instead = ', or pass pending_gradients="drop" to write without these gradients' if droppable else ""
            raise UnsupportedError(f"the engine holds {gradients}", hint=hint + instead)

    def refuse_lazy(self) -> None:
        if not self._kind.changes_only_in_step(self._engine.optimizer):
            raise UnsupportedError(
                "snapshot='lazy': before DeepSpeed 0.19, Muon updates its momentum while the gradients are reduced",
                hint="write with snapshot='copy', or upgrade DeepSpeed",
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return (*((MASTER,) if self.trains else ()), *self._live_moments, PARAM, BUFFER)

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        available = self.parts
        unknown = sorted(set(parts or ()) - set(available))
        if unknown:
            raise ValueError(f"the engine has no part {', '.join(unknown)}; it has {', '.join(available)}")
        self._zero.settle()
        fragments: list[Fragment] = []
        for part in available:
            if parts is not None and part not in parts:
                continue
            if part == BUFFER:
                fragments += self._buffer_fragments()
            elif part == PARAM:
                fragments += self._param_fragments(self._masterless if parts is None else self._in_memory_order)
            else:
                fragments += self._flat_fragments(part)
        return Inventory(tuple(fragments), {**self._parameters[1], **self._buffers[1]})

    def state(self) -> dict[str, Any]:
        counters: dict[str, Any] = {"counters": {name: int(getattr(self._engine, name)) for name in COUNTERS}}
        if not self.trains:
            return counters
        scheduler = self._engine.lr_scheduler
        return counters | {
            "optimizer": optimizer.capture(self._zero.optimizer, self._zero.flats),
            "scaler": scaler.capture(self._engine.optimizer),
            "scheduler": None
            if scheduler is None
            else {"class": type(scheduler).__name__, "state": scheduler.state_dict()},
        }

    def rank_state(self) -> dict[str, Any]:
        tracked = _rng_tracker().get_states()
        return {
            "rng": rng.capture(self._engine.device),
            "rng_tracker": {name: rng.to_bytes(state) for name, state in tracked.items()},
            "optimizer": optimizer.capture_bound(self._zero.optimizer, self._zero.flats),
        }

    def after_write(self) -> None:
        self._zero.after_write()

    def before_change(self, action: Callable[[], None]) -> None:
        steps = [(self._engine.optimizer, "step")] if self.trains else []
        call_before(action, [*steps, (self._engine, "offload_states"), (self._engine, "reload_states")])

    def needs_rank_state(self, state: Mapping[str, Any]) -> bool:
        return state.get("optimizer") is not None and optimizer.Saved.has_bound(_tree(state, "optimizer"))

    def wanted(self, stored: Mapping[str, Mapping[str, torch.dtype]]) -> tuple[Fragment, ...]:
        trained = {name for flat in self._zero.flats for name in flat.names}
        self._unknown = frozenset(trained.difference(stored.get(MASTER, ())))
        self._moments_wanted = {}
        fragments: list[Fragment] = []
        for flat in self._zero.flats:
            fragments += flat.expected(MASTER, flat.master.dtype)
        for part in dict.fromkeys((*self._live_moments, *sorted(set(stored) - RESERVED_PARTS))):
            names = stored.get(part, {})
            for flat in self._zero.flats:
                live = moments(flat, self._state_of(flat.master)).get(part)
                # All of the flat or nothing: if one parameter has a moment, the others' must not be left at zero.
                if live is not None or not names.keys().isdisjoint(flat.names):
                    dtype = next(names[name] for name in flat.names if name in names) if live is None else live.dtype
                    self._moments_wanted.setdefault(flat.names, {})[part] = dtype
                    fragments += flat.expected(part, dtype)
        others = chain(self._param_fragments(self._masterless, empty=True), self._buffer_fragments(empty=True))
        fragments += (replace(fragment, data=None) for fragment in others)
        return tuple(fragments)

    def unexpected(self, stored: Mapping[str, Collection[str]]) -> list[str]:
        parameters = self._parameters[0].keys()
        optimized = {name for flat in self._zero.flats for name in flat.names} if self.trains else parameters
        places = {PARAM: parameters, BUFFER: self._buffers[0].keys()}
        return [
            f"{part}/{name}"
            for part, names in stored.items()
            for name in names
            if name not in places.get(part, optimized)
        ]

    def check_state(
        self,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None,
        restored: Collection[str],
        kept: Collection[str],
    ) -> list[str]:
        found: list[str] = []
        if "counters" in state:
            _counters(state)
        if "scaler" in state:
            scaler.check(state["scaler"])
        if "optimizer" in state and state["optimizer"] is None:
            here = type(self._zero.optimizer).__name__
            found.append(f"optimizer: none in the checkpoint, {here} in the engine")
        elif "optimizer" in state:
            saved = optimizer.Saved(_tree(state, "optimizer"), (rank_state or {}).get("optimizer"), kept)
            found += optimizer.problems(saved, self._zero.optimizer, self._zero.flats, restored, self._unknown)
        else:
            # A moment without its step would be corrected for the wrong bias.
            created = sorted({key.partition("/")[0] for key in restored} - RESERVED_PARTS - set(self._live_moments))
            found += [f"{part}: its step is in the state of the optimizer, which is not restored" for part in created]
        if "scheduler" in state:
            found += self._scheduler_problems(state)
        return found

    def fill(self, wanted: tuple[Fragment, ...]) -> Generator[tuple[Fragment, ...], None, None]:
        self._weights_wanted = frozenset(fragment.name for fragment in wanted if fragment.part == PARAM)
        self._zero.before_restore()
        places = {(fragment.part, fragment.name) for fragment in wanted}
        self._moments_wanted = {
            names: {part: dtype for part, dtype in parts.items() if any((part, name) in places for name in names)}
            for names, parts in self._moments_wanted.items()
        }

        def chosen(live: Iterable[Fragment]) -> Iterator[Fragment]:
            return (fragment for fragment in live if (fragment.part, fragment.name) in places)

        weights = tuple(chosen(self._param_fragments(self._masterless)))
        strided = {name for name, buffer in self._buffers[0].items() if not lies_in_order(buffer)}
        here = [fragment for fragment in chosen(self._buffer_fragments()) if fragment.name not in strided]
        here += (f for f in weights if isinstance(f.data, torch.Tensor))
        for flat in self._zero.flats:
            if not flat.files:
                here += chosen(self._with_moments(flat))
        yield tuple(here)
        for fragment in chosen(self._buffer_fragments()):
            if fragment.name in strided:  # The data of such a fragment is a copy of the buffer.
                yield (fragment,)
                assert isinstance(fragment.data, torch.Tensor)
                buffer = self._buffers[0][fragment.name]
                set_in_place(buffer, fragment.data.view(buffer.shape))
        for fragment in weights:
            if isinstance(fragment.data, FileSpan):
                with self._zero.weight_in_memory(fragment.name) as data:
                    yield (replace(fragment, data=data),)
        for flat in self._zero.flats:
            if flat.files:
                with self._zero.flat_in_memory(flat) as in_memory:
                    yield tuple(chosen(self._with_moments(in_memory)))

    def _with_moments(self, flat: Flat) -> Iterator[Fragment]:
        """All of a flat that is in memory, moments made where they do not exist yet."""
        yield from flat.fragments(MASTER, flat.master.dtype, flat.master)
        for part, dtype in self._moments_wanted.get(flat.names, {}).items():
            state = self._zero.optimizer.state[flat.master]
            if part not in state:
                state[part] = torch.zeros(flat.moment_shape(part), dtype=dtype, device=flat.master.device)
            yield from flat.wanted(part, state[part].dtype, state[part])

    def set_state(
        self,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None,
        kept: Collection[str],
        rng_too: bool,
    ) -> None:
        if "optimizer" in state:
            saved = optimizer.Saved(_tree(state, "optimizer"), (rank_state or {}).get("optimizer"), kept)
            optimizer.restore(saved, self._zero.optimizer, self._zero.flats, self._unknown)
        self._zero.after_fill(self._weights_wanted)
        if "scheduler" in state:
            self._restore_scheduler(state)
        if "optimizer" in state:
            betas_vary = bool(getattr(self._engine.lr_scheduler, "cycle_momentum", False))
            cpu_adam.replay(self._zero.optimizer, self._zero.flats, betas_vary)
        if "scaler" in state:
            scaler.restore(state["scaler"], self._engine.optimizer)
        if "counters" in state:
            for name, value in _counters(state).items():
                setattr(self._engine, name, value)
        # No gradients are left, so the next micro step is the first one of an optimizer step. The number may lie inside
        # a step: the engine's own if no counters were restored, or a saved one if gradients were dropped then.
        self._engine.micro_steps -= self._engine.micro_steps % self._engine.gradient_accumulation_steps()
        self._engine._unmanaged_backward_count = 0
        if rank_state is not None and rng_too:
            rng.restore(_tree(rank_state, "rng"), self._engine.device)
            tracked = _tree(rank_state, "rng_tracker")
            if tracked:
                _rng_tracker().set_states({name: rng.to_tensor(state) for name, state in tracked.items()})

    def finish_restore(self) -> None:
        self._zero.after_restore()

    @property
    def _kind(self) -> type[Wrapper]:
        kind = kind_of(self._engine)
        assert kind is not None, "refuse_unsupported comes first"
        return kind

    @cached_property
    def _zero(self) -> Wrapper:
        return self._kind(self._engine.optimizer, self._parameters[0], self._group)

    @cached_property
    def _group(self) -> RankGroup:
        return rank_group_of(self._engine)

    @cached_property
    def _parameters(self) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
        return named_parameters(unwrapped(self._engine.module))

    @cached_property
    def _buffers(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return persistent_buffers(unwrapped(self._engine.module))

    @cached_property
    def _masterless(self) -> dict[str, None]:
        """Names of the parameters that no optimizer has: frozen, left out of it, or without elements."""
        optimized = {name for flat in self._zero.flats for name in flat.names}
        return {name: None for name in self._parameters[0] if name not in optimized}

    @cached_property
    def _in_memory_order(self) -> tuple[str, ...]:
        return (*(name for flat in self._zero.flats for name in flat.names), *self._masterless)

    @property
    def _live_moments(self) -> tuple[str, ...]:
        parts = (moments(flat, self._state_of(flat.master)) for flat in self._zero.flats)
        return tuple(dict.fromkeys(part for flat_parts in parts for part in flat_parts))

    def _state_of(self, master: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._zero.optimizer.state.get(master, {})
        return state

    def _flat_fragments(self, part: str) -> Iterator[Fragment]:
        for flat in self._zero.flats:
            data = flat.master if part == MASTER else moments(flat, self._state_of(flat.master)).get(part)
            if data is not None:
                yield from flat.fragments(part, data.dtype, flat.files.get(part, data), self._zero.tier(part))

    def _param_fragments(self, names: Iterable[str], *, empty: bool = False) -> Iterator[Fragment]:
        """``empty``: also yields fragments of no elements, for the parameters that other ranks write."""
        rank = self._group.rank
        for name in names:
            slot, data = self._zero.weight(name)
            # A tensor without elements is nobody's; rank 0 speaks for it.
            if slot.start < slot.stop or empty or (rank == 0 and 0 in slot.shape):
                dtype = dtype_name(self._parameters[0][name].dtype, f"{PARAM}/{name}")
                tier = "nvme" if isinstance(data, FileSpan) else self._zero.tier(PARAM)
                yield Fragment(PARAM, name, slot.shape, dtype, slot.start, slot.stop, tier, data=data)

    def _buffer_fragments(self, *, empty: bool = False) -> Iterator[Fragment]:
        """``empty`` as in ``_param_fragments``. The ``data`` of a buffer that does not lie in order is a copy."""
        rank = self._group.rank
        for name, buffer in self._buffers[0].items():
            data = buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            if data.numel() or empty or rank == 0:
                dtype = dtype_name(data.dtype, f"{BUFFER}/{name}")
                yield Fragment(BUFFER, name, tuple(buffer.shape), dtype, 0, data.numel(), copy=rank, data=data)

    def _scheduler_problems(self, state: Mapping[str, Any]) -> list[str]:
        scheduler, groups = self._engine.lr_scheduler, len(self._zero.optimizer.param_groups)
        tree = None if state.get("scheduler") is None else _tree(state, "scheduler")
        here = None if scheduler is None else type(scheduler).__name__
        there = None if tree is None else tree.get("class")
        if here != there:
            return [f"scheduler: {there or 'none'} in the checkpoint, {here or 'none'} in the engine"]
        rates = None if tree is None else _tree(tree, "state").get("base_lrs")
        if isinstance(rates, (list, tuple)) and len(rates) != groups:
            return [f"scheduler: {here} of {len(rates)} param groups in the checkpoint, {groups} in the engine"]
        return []

    def _restore_scheduler(self, state: Mapping[str, Any]) -> None:
        scheduler = self._engine.lr_scheduler
        if scheduler is None:
            return
        saved = _tree(_tree(state, "scheduler"), "state")
        scheduler.load_state_dict(dict(saved))
        if hasattr(scheduler, "_last_lr") and "_last_lr" not in saved:
            # DeepSpeed's own schedulers save a step number only; get_last_lr() would give the first step's.
            scheduler._last_lr = [group["lr"] for group in self._zero.optimizer.param_groups]


def _rng_tracker() -> Any:
    """The generators of deepspeed.checkpointing, from which dropout draws under its fork(); most often none."""
    return sys.modules["deepspeed"].checkpointing.get_cuda_rng_tracker()


def _counters(state: Mapping[str, Any]) -> dict[str, int]:
    tree = _tree(state, "counters")
    for name in COUNTERS:
        if type(tree.get(name)) is not int:
            raise FormatError(f"state: counters.{name} is missing or not an integer")
    return {name: tree[name] for name in COUNTERS}


def _tree(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    if not isinstance(state.get(key), Mapping):
        raise FormatError(f"state: {key} is missing or not a mapping")
    tree: Mapping[str, Any] = state[key]
    return tree
