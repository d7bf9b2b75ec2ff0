"""The ``EngineAdapter`` of DeepSpeed engines: everything that does not depend on the ZeRO stage. Other files have what
is specific to each stage."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines import rng
from zckpt.engines.contract import Use
from zckpt.engines.deepspeed import optimizer, refuse, scaler
from zckpt.engines.deepspeed.flats import moments
from zckpt.engines.deepspeed.group import RankGroup, process_group, rank_group_of
from zckpt.engines.deepspeed.restoring import COUNTERS, DeepSpeedRestoring, rng_tracker, subtree
from zckpt.engines.deepspeed.setup import setup_of
from zckpt.engines.deepspeed.stage0 import Unwrapped
from zckpt.engines.deepspeed.wrapper import Wrapper, kind_of
from zckpt.engines.deepspeed.zero12 import uses_muon
from zckpt.engines.extra_state import ExtraState
from zckpt.engines.hooks import call_before
from zckpt.engines.tensors import (
    dtype_name,
    holdings,
    named_parameters,
    persistent_buffers,
    some_bytes,
    unwrapped,
)
from zckpt.errors import UnsupportedError
from zckpt.format.names import Tier
from zckpt.state.inventory import (
    BUFFER,
    EXTRA_STATE,
    GRADIENT,
    MASTER,
    PARAM,
    RESERVED_PARTS,
    FileRange,
    Fragment,
    Holding,
    Inventory,
)
from zckpt.transfer.devices import devices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from zckpt.engines.contract import Selection, Stored


class DeepSpeedAdapter:
    """Reads and restores one DeepSpeed engine on one rank. ``EngineAdapter`` documents its methods.

    Make a new adapter for each write or restore, because it remembers where the engine keeps its tensors. Call
    ``refuse_unsupported`` first: for an engine that it refuses, the behaviour of the other methods is undefined. The
    public members that ``EngineAdapter`` does not have are for ``DeepSpeedRestoring``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @staticmethod
    def process_group(engine: Any) -> ProcessGroup | None:
        return process_group(engine)

    @property
    def trains(self) -> bool:
        return self.zero.optimizer is not None

    @property
    def trees(self) -> tuple[str, ...]:
        return ("counters", *(("optimizer", "scaler", "scheduler") if self.trains else ()))

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    @property
    def description(self) -> dict[str, str]:
        return {
            "framework": f"DeepSpeed {sys.modules['deepspeed'].__version__}",
            "torch": str(torch.__version__),
            "mode": f"ZeRO stage {int(self.engine.zero_optimization_stage())}",
            "optimizer": type(self.zero.optimizer).__name__ if self.trains else "none",
        }

    @property
    def module(self) -> torch.nn.Module:
        return unwrapped(self.engine.module)

    @property
    def devices(self) -> frozenset[torch.device]:
        masters = (flat.master for flat in self.zero.flats)
        tensors = chain(self._parameters[0].values(), self._all_buffers.values(), masters)
        return frozenset({torch.device(self.engine.device), *devices_of(tensors)})

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        reasons = refuse.unsupported(self.engine) or ([] if leave_out else self.extra.unsaved)
        if reasons:
            raise UnsupportedError(
                f"zckpt does not support this DeepSpeed engine: {'; '.join(reasons)}", hint=refuse.SUPPORTED
            )
        # If backward passes change the optimizer's state too, it already contains these gradients, and dropping them
        # would not undo this.
        droppable = self._kind.changes_only_in_step(self.engine.optimizer)
        if drop_gradients and droppable:
            return
        for gradients in refuse.pending_gradients(self.engine):
            hint = "do this at a gradient accumulation boundary, right after the engine.step() that ends it"
            alternative = ', or pass pending_gradients="drop" to write without these gradients' if droppable else ""
            raise UnsupportedError(f"the engine holds {gradients}", hint=hint + alternative)

    def refuse_lazy(self) -> None:
        if not self._kind.changes_only_in_step(self.engine.optimizer):
            raise UnsupportedError(
                "snapshot='lazy': before DeepSpeed 0.19, Muon updates its momentum while the gradients are reduced",
                hint="write with snapshot='copy', or upgrade DeepSpeed",
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return (*((MASTER,) if self.trains else ()), *self.live_moments, PARAM, BUFFER)

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        available = self.parts
        unknown = sorted(set(parts or ()) - set(available))
        if unknown:
            raise ValueError(f"the engine has no part {', '.join(unknown)}; it has {', '.join(available)}")
        self.zero.settle()
        buffers = self._all_buffers  # first, because a state_dict() may give weights other memory
        fragments: list[Fragment] = []
        for part in available:
            if parts is not None and part not in parts:
                continue
            if part == BUFFER:
                fragments += self.buffer_fragments(buffers)
            elif part == PARAM:
                fragments += self.param_fragments(self.masterless if parts is None else self._in_memory_order)
            else:
                fragments += self._flat_fragments(part)
        aliases = {**self._parameters[1], **self.buffers[1]}
        return Inventory(tuple(fragments), aliases, frozenset(self.extra.tensors), tuple(self.extra.unsaved))

    def sample(self) -> bytes:
        trained = [weight for weight in self._parameters[0].values() if weight.requires_grad]
        # With ZeRO-3, no rank has whole weights, but DeepSpeed numbers the parameters of a job alike on every rank.
        numbers = [weight.ds_id for weight in trained if hasattr(weight, "ds_id")]
        return repr(numbers[:1]).encode() if numbers else some_bytes(trained)

    def memory(self) -> Iterator[Holding]:
        extra = self.extra.tensors  # first, as in ``inventory``
        yield from self.zero.memory()
        for name, buffer in chain(self.module.named_buffers(), extra.items()):
            yield from holdings(BUFFER, name, buffer)

    def state(self) -> dict[str, Any]:
        trees: dict[str, Any] = {
            "counters": {name: int(getattr(self.engine, name)) for name in COUNTERS},
            "deepspeed": setup_of(self.engine, self._parameters[0], self._groups()).tree(),
            **({EXTRA_STATE: sorted(self.extra.tensors)} if self.extra.tensors else {}),
        }
        if not self.trains:
            return trees
        scheduler = self.engine.lr_scheduler
        return trees | {
            "optimizer": optimizer.capture(self.zero.optimizer, self.zero.flats),
            "scaler": scaler.capture(self.engine.optimizer),
            "scheduler": None
            if scheduler is None
            else {"class": type(scheduler).__name__, "state": scheduler.state_dict()},
        }

    def rank_state(self) -> dict[str, Any]:
        tracked = rng_tracker().get_states()
        return {
            "rng": rng.capture(self.engine.device),
            "rng_tracker": {name: rng.to_bytes(state) for name, state in tracked.items()},
            "optimizer": optimizer.capture_bound(self.zero.optimizer, self.zero.flats),
        }

    def after_write(self) -> None:
        self.zero.after_write()

    def before_change(self, action: Callable[[], None]) -> None:
        steps = [(self.engine.optimizer, "step")] if self.trains else []
        call_before(action, [*steps, (self.engine, "offload_states"), (self.engine, "reload_states")])

    def uses(self) -> Iterator[Use]:
        engine = self.engine
        weights = {PARAM, BUFFER}
        yield Use(engine, "forward", weights)
        yield Use(engine, "save_16bit_model", weights)
        yield Use(engine, "_zero3_consolidated_16bit_state_dict", weights, "module_state_dict")
        yield Use(engine.module, "__call__", weights, "a call of the module")
        for method in ("state_dict", "load_state_dict"):
            yield Use(engine.module, method, weights)
        # Conversions of a module, such as half, to and share_memory, call this method.
        yield Use(engine.module, "_apply", weights, "a conversion of the module")
        # Muon combines its momentum with the gradients while they are reduced.
        moment = {"momentum_buffer"} if self.trains and uses_muon(self.zero.optimizer) else set()
        for method in ("backward", "_backward_prologue"):  # DeepSpeed calls the second for loss.backward()
            if hasattr(engine, method):
                yield Use(engine, method, {PARAM, GRADIENT} | moment, "backward")
        yield Use(engine, "zero_grad", {GRADIENT})
        for method in ("step", "offload_states", "reload_states"):
            yield Use(engine, method)
        for method in ("save_checkpoint", "load_checkpoint"):
            if not isinstance(vars(engine).get(method), partial):  # zckpt.attach replaces both with zckpt's own
                yield Use(engine, method)
        if self.trains:
            for owner in {id(owner): owner for owner in (engine.optimizer, self.zero.optimizer)}.values():
                for method in ("step", "state_dict", "load_state_dict"):
                    yield Use(owner, method)

    def needs_rank_state(self, state: Mapping[str, Any]) -> bool:
        return state.get("optimizer") is not None and optimizer.Saved.has_bound(subtree(state, "optimizer"))

    def wanted(self, stored: Mapping[str, Mapping[str, Stored]]) -> tuple[Fragment, ...]:
        fragments: list[Fragment] = []
        for flat in self.zero.flats:
            fragments += flat.expected(MASTER, flat.master.dtype)
        for part in dict.fromkeys((*self.live_moments, *sorted(set(stored) - RESERVED_PARTS))):
            names = stored.get(part, {})
            for flat in self.zero.flats:
                live = moments(flat, self._state_of(flat.master)).get(part)
                # If one parameter of the flat buffer has this moment, all of them must be filled: a moment that the
                # checkpoint lacks must be reported, and not stay at zero.
                if live is not None or not names.keys().isdisjoint(flat.names):
                    like = next(names[name] for name in flat.names if name in names) if live is None else live
                    fragments += flat.expected(part, like.dtype)
        weights = self.param_fragments(self.masterless, empty=True)
        buffers = self.buffer_fragments(self.buffers[0], empty=True)
        fragments += (replace(fragment, data=None) for fragment in chain(weights, buffers))
        fragments += self._wanted_extra(stored)
        return tuple(fragments)

    def _wanted_extra(self, stored: Mapping[str, Mapping[str, Stored]]) -> Iterator[Fragment]:
        """Yields a fragment for each tensor of the extra state. The shape and dtype are those that are stored, because
        those that the module has now may be others."""
        # DeepSpeed's files below stage 3 do not tell all of the extra state from frozen weights, so a conversion has
        # put some of it into the part ``param``.
        saved = {**stored.get(PARAM, {}), **stored.get(BUFFER, {})}
        extra = {name: tensor for name, tensor in saved.items() if self._is_extra(name)}
        for name, like in {**self.extra.tensors, **extra}.items():
            dtype, numel = dtype_name(like.dtype, f"{BUFFER}/{name}"), math.prod(like.shape)
            yield Fragment(BUFFER, name, tuple(like.shape), dtype, 0, numel, copy=self._group.rank)

    def _is_extra(self, name: str) -> bool:
        """Returns whether a module has extra state of this name, or would take it."""
        known = name in self._parameters[0] or name in self.buffers[0]
        return name in self.extra.tensors or (not known and self.extra.takes(name))

    def unexpected(self, stored: Mapping[str, Collection[str]]) -> list[str]:
        parameters = self._parameters[0].keys()
        optimized = {name for flat in self.zero.flats for name in flat.names} if self.trains else parameters
        places = {PARAM: parameters, BUFFER: self.buffers[0].keys()}
        return [
            f"{part}/{name}"
            for part, names in stored.items()
            for name in names
            if name not in places.get(part, optimized) and not (part == BUFFER and self._is_extra(name))
        ]

    def restoring(self, selection: Selection) -> DeepSpeedRestoring:
        return DeepSpeedRestoring(self, selection)

    @property
    def _kind(self) -> type[Wrapper]:
        kind = kind_of(self.engine)
        assert kind is not None, "refuse_unsupported comes first"
        return kind

    @cached_property
    def zero(self) -> Wrapper:
        """The object that reads and restores the state in DeepSpeed's wrapper of the optimizer."""
        return self._kind(self.engine.optimizer, self._parameters[0], self._group)

    def _groups(self) -> list[list[str]] | None:
        """Returns the value of ``Setup.groups``: the names of the parameters of each param group, or None unless the
        optimizer works on the model's own parameters."""
        if self._kind is not Unwrapped:
            return None
        names = {id(parameter): name for name, parameter in self._parameters[0].items()}
        groups = ([id(parameter) for parameter in group["params"]] for group in self.engine.optimizer.param_groups)
        return [[names[parameter_id] for parameter_id in group if parameter_id in names] for group in groups]

    @cached_property
    def _group(self) -> RankGroup:
        return rank_group_of(self.engine)

    @cached_property
    def _parameters(self) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
        """The parameters of the module by their first names, and for each other name of a tied parameter its first
        name."""
        return named_parameters(self.module)

    @cached_property
    def buffers(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The persistent buffers of the module by their first names, and for each other name of a tied buffer its first
        name."""
        return persistent_buffers(self.module)

    @cached_property
    def extra(self) -> ExtraState:
        """The state that modules add to their ``state_dict`` by themselves."""
        (parameters, aliases), (buffers, more_aliases) = self._parameters, self.buffers
        names = {*parameters, *aliases, *buffers, *more_aliases}
        return ExtraState(self.module, names, [*parameters.values(), *buffers.values()])

    @property
    def _all_buffers(self) -> dict[str, torch.Tensor]:
        return {**self.buffers[0], **self.extra.tensors}

    @cached_property
    def masterless(self) -> dict[str, None]:
        """The names of the parameters that the optimizer does not update. They are frozen, were not given to it, or
        have no elements."""
        optimized = {name for flat in self.zero.flats for name in flat.names}
        return {name: None for name in self._parameters[0] if name not in optimized}

    @cached_property
    def _in_memory_order(self) -> tuple[str, ...]:
        """The names of all parameters, in the order in which their weights lie in memory."""
        return (*(name for flat in self.zero.flats for name in flat.names), *self.masterless)

    @property
    def live_moments(self) -> tuple[str, ...]:
        """The names of the moments that exist in memory or in swap files now."""
        parts = (moments(flat, self._state_of(flat.master)) for flat in self.zero.flats)
        return tuple(dict.fromkeys(part for flat_parts in parts for part in flat_parts))

    def _state_of(self, master: torch.Tensor) -> dict[str, Any]:
        """Returns what the optimizer keeps for a flat buffer. ``master``: the master weights of that flat buffer."""
        state: dict[str, Any] = self.zero.optimizer.state.get(master, {})
        return state

    def _flat_fragments(self, part: str) -> Iterator[Fragment]:
        """Yields the fragments that this rank writes of the master weights or of one moment."""
        for flat in self.zero.flats:
            data = flat.master if part == MASTER else moments(flat, self._state_of(flat.master)).get(part)
            if data is not None:
                yield from flat.fragments(part, data.dtype, flat.files.get(part, data), self.zero.tier(part))

    def param_fragments(self, names: Iterable[str], *, empty: bool = False) -> Iterator[Fragment]:
        """Yields a fragment for this rank's share of each weight, in the dtype that the model computes with. ``empty``:
        also yields a fragment without elements for each parameter of which other ranks write all elements."""
        rank = self._group.rank
        for name in names:
            parameter_range, data = self.zero.weight(name)
            # No rank has a share of a tensor without elements, so rank 0 writes it.
            if parameter_range.start < parameter_range.stop or empty or (rank == 0 and 0 in parameter_range.shape):
                dtype = dtype_name(self._parameters[0][name].dtype, f"{PARAM}/{name}")
                tier = Tier.NVME if isinstance(data, FileRange) else self.zero.tier(PARAM)
                yield Fragment(
                    PARAM,
                    name,
                    parameter_range.shape,
                    dtype,
                    parameter_range.start,
                    parameter_range.stop,
                    tier,
                    data=data,
                )

    def buffer_fragments(self, buffers: Mapping[str, torch.Tensor], *, empty: bool = False) -> Iterator[Fragment]:
        """Yields a fragment for each of ``buffers``. ``empty``: as in ``param_fragments``. If the elements of a buffer
        are not contiguous in memory, the ``data`` of its fragment is a copy."""
        rank = self._group.rank
        for name, buffer in buffers.items():
            data = buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            if data.numel() or empty or rank == 0:
                dtype = dtype_name(data.dtype, f"{BUFFER}/{name}")
                yield Fragment(BUFFER, name, tuple(buffer.shape), dtype, 0, data.numel(), copy=rank, data=data)
