"""The part of an adapter that is the same for all engines that train a ``torch.nn.Module`` with a torch optimizer:
names, moments, buffers and extra state. The adapter of a framework derives from ``ModuleAdapter``."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zckpt.adapters import optimizer
from zckpt.adapters.extra_state import ExtraState
from zckpt.adapters.flats import moments
from zckpt.adapters.peft import adapter_configs
from zckpt.adapters.trees import subtree
from zckpt.engines.contract import EngineAdapter, UsingMethod
from zckpt.engines.group import RankGroup, rank_group_of
from zckpt.engines.tensors import (
    dtype_name,
    holdings,
    local_of,
    named_parameters,
    persistent_buffers,
    some_bytes,
    some_of,
)
from zckpt.errors import UnsupportedError
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.inventory import (
    BUFFER,
    EXTRA_STATE,
    MASTER,
    PARAM,
    RESERVED_PARTS,
    FileRange,
    Fragment,
    Holding,
    Inventory,
)
from zckpt.transfer.devices import devices_of
from zckpt.transfer.memory import not_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping, Sequence

    from zckpt.adapters.flats import ParameterRange
    from zckpt.adapters.kind import Kind
    from zckpt.engines.contract import Stored


T = TypeVar("T", bound=torch.Tensor)
Named = tuple[dict[str, T], dict[str, str]]
"""Tensors by their first names, and for each other name of a tied tensor its first name."""


class ModuleAdapter(EngineAdapter):
    """Reads one engine on one rank. ``EngineAdapter`` documents its methods. The classes that derive from this one have
    the methods that are missing here.

    Make a new adapter for each write or restore, because it remembers where the engine keeps its tensors. Call
    ``refuse_unsupported`` first: for an engine that it refuses, the behaviour of the other methods is undefined. The
    public members that ``EngineAdapter`` does not have are for ``ModuleRestoring``.
    """

    @cached_property
    def kind(self) -> Kind:
        """The object that reads and restores the state where this engine keeps it."""
        raise NotImplementedError

    @cached_property
    def group(self) -> RankGroup:
        """The ranks of the engine."""
        return rank_group_of(self.process_group(self.engine))

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        raise NotImplementedError

    @property
    def scheduler(self) -> Any:
        """The scheduler of the learning rate, or None."""
        raise NotImplementedError

    @property
    def module(self) -> torch.nn.Module:
        """The model without the wrappers around it."""
        raise NotImplementedError

    @property
    def trains(self) -> bool:
        return self.kind.optimizer is not None

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        masters = (flat.master for flat in self.kind.flats)
        weights = map(local_of, self.parameters[0].values())
        return frozenset({self.device, *devices_of(chain(weights, self._all_buffers.values(), masters))})

    @property
    def parts(self) -> tuple[str, ...]:
        return self._parts(self._moments)

    def _parts(self, moments_of_flats: Sequence[Mapping[str, torch.Tensor]]) -> tuple[str, ...]:
        masters = (MASTER,) if self.trains else ()
        return (*masters, *dict.fromkeys(chain.from_iterable(moments_of_flats)), PARAM, BUFFER)

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        moments_of_flats = self._moments
        available = self._parts(moments_of_flats)
        unknown = sorted(set(parts or ()) - set(available))
        if unknown:
            raise ValueError(f"the engine has no part {', '.join(unknown)}; it has {', '.join(available)}")
        self.kind.wait_for_swaps()
        buffers = self._all_buffers  # first, because a state_dict() may give weights other memory
        fragments: list[Fragment] = []
        for part in available:
            if parts is not None and part not in parts:
                continue
            if part == BUFFER:
                fragments += self.buffer_fragments(buffers)
            elif part == PARAM:
                fragments += self._weights(self.masterless if parts is None else self._in_memory_order)
            else:
                fragments += self._flat_fragments(part, moments_of_flats)
        aliases = {**self.parameters[1], **self.buffers[1]}
        return Inventory(tuple(fragments), aliases, frozenset(self.extra.tensors), tuple(self.extra.unsaved))

    def sample(self) -> Mapping[str, bytes]:
        trained = {name: weight for name, weight in self.parameters[0].items() if weight.requires_grad}
        chosen = some_of(list(trained))
        # Models of other names have no name in common, so the names are compared too.
        names = {} if self.names_differ else {"": repr(chosen).encode()}
        return names | {self.elements_here(name): some_bytes([trained[name]]) for name in chosen}

    def elements_here(self, name: str) -> str:
        """Returns the name of a weight, with the elements of it that this rank holds if these are not all."""
        return name

    def uses_of_state(self, modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[UsingMethod]:
        """Yields the methods of torch's classes that belong to the result of ``uses``."""
        for module in {id(module): module for module in modules}.values():
            for method in ("state_dict", "load_state_dict"):
                yield UsingMethod(module, method, {PARAM, BUFFER})
            # Conversions of a module, such as half, to and share_memory, call this method.
            yield UsingMethod(module, "_apply", {PARAM, BUFFER}, "a conversion of the module")
            yield UsingMethod(module, "__call__", {PARAM, BUFFER}, "a call of the module")
        for each in {id(each): each for each in optimizers}.values():
            for method in ("step", "state_dict", "load_state_dict"):
                yield UsingMethod(each, method)

    def memory(self) -> Iterator[Holding]:
        extra = self.extra.tensors  # first, as in ``inventory``
        yield from self.kind.memory()
        for name, buffer in chain(self.module.named_buffers(), extra.items()):
            yield from holdings(BUFFER, name, buffer)

    def needs_rank_state(self, state: Mapping[str, Any]) -> bool:
        return state.get("optimizer") is not None and optimizer.Saved.has_bound(subtree(state, "optimizer"))

    def wanted(self, stored: Mapping[str, Mapping[str, Stored]]) -> tuple[Fragment, ...]:
        fragments: list[Fragment] = []
        for flat in self.kind.flats:
            fragments += flat.expected(MASTER, flat.master.dtype)
        flats = [(flat, live, flat.stored_names) for flat, live in zip(self.kind.flats, self._moments, strict=True)]
        masters = stored.get(MASTER, {})
        live_moments = chain.from_iterable(live for _, live, _ in flats)
        for part in dict.fromkeys((*live_moments, *sorted(set(stored) - RESERVED_PARTS))):
            of_part = stored.get(part, {})
            for flat, live, names in flats:
                # If one parameter of the flat buffer has this moment, all of them must be filled: a moment that the
                # checkpoint lacks must be reported, and not stay at zero.
                if part in live:
                    fragments += flat.expected(part, live[part].dtype)
                elif saved := [of_part[name].dtype for name in names if name in of_part]:
                    dtype = saved[0]
                    if dtype in [masters[name].dtype for name in names if name in masters]:
                        # A moment that was saved in the dtype of its weight has it here too.
                        dtype = self.kind.moment_dtype(flat)
                    fragments += flat.expected(part, dtype)
        weights = (fragment for _, fragment in self.weights_to_read(empty=True))
        buffers = self.buffer_fragments(self.buffers[0], empty=True)
        fragments += (fragment._replace(data=None) for fragment in chain(weights, buffers))
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
            dtype = dtype_name(like.dtype, BUFFER, name)
            yield Fragment(BUFFER, name, dtype, all_of(like.shape), copy=self.group.rank)

    def _is_extra(self, name: str) -> bool:
        """Returns whether a module has extra state of this name, or would take it."""
        known = name in self._stored_parameters or name in self.buffers[0]
        return name in self.extra.tensors or (not known and self.extra.takes(name))

    def unexpected(self, stored: Mapping[str, Collection[str]]) -> list[str]:
        parameters = self._stored_parameters
        trained = (name for flat in self.kind.flats for name in flat.stored_names)
        optimized = dict.fromkeys(trained).keys() if self.trains else parameters
        places = {PARAM: parameters, BUFFER: self.buffers[0].keys()}

        def has_place(part: str, name: str) -> bool:
            name = self.counterpart(name)
            return not name or name in places.get(part, optimized) or (part == BUFFER and self._is_extra(name))

        return [
            f"{part}/{name}"
            for part, names in stored.items()
            for name in names
            if name not in places.get(part, optimized) and not has_place(part, name)
        ]

    @cached_property
    def _named(self) -> tuple[Named[torch.nn.Parameter], Named[torch.Tensor]]:
        """The parameters and the persistent buffers of the module, by the names that they have in it."""
        return named_parameters(self.module), persistent_buffers(self.module)

    @cached_property
    def parameters(self) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
        """The parameters of the module by their first names, and for each other name of a tied parameter its first
        name."""
        return self._renamed(self._named[0])

    @cached_property
    def buffers(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The persistent buffers of the module by their first names, and for each other name of a tied buffer its first
        name."""
        return self._renamed(self._named[1])

    @cached_property
    def _stored_parameters(self) -> KeysView[str]:
        """The names of all parameters in a checkpoint. A set of them would take more memory than the keys of a dict."""
        return dict.fromkeys(map(self.kind.stored_name, self.parameters[0])).keys()

    def global_name(self, name: str) -> str:
        """Returns the name that a tensor has in a checkpoint. ``name``: its name in the module. The two differ only if
        ranks have different tensors of the same name."""
        return name

    def counterpart(self, name: str) -> str:
        """Returns the name under which this rank has a tensor of a checkpoint, or the corresponding tensor: that of an
        expert of this rank in the place of an expert of another rank. The name is empty if only other ranks have such a
        tensor."""
        return name

    def _renamed(self, named: tuple[dict[str, T], dict[str, str]]) -> tuple[dict[str, T], dict[str, str]]:
        tensors, aliases = named
        rename = self.global_name
        return (
            {rename(name): tensor for name, tensor in tensors.items()},
            {rename(alias): rename(name) for alias, name in aliases.items() if rename(alias) != rename(name)},
        )

    @cached_property
    def extra(self) -> ExtraState:
        """The state that modules add to their ``state_dict`` by themselves."""
        # These are the names that the tensors have in the ``state_dict`` of the module.
        (parameters, aliases), (buffers, more_aliases) = self._named
        names = {*parameters, *aliases, *buffers, *more_aliases}
        return ExtraState(self.module, names, [*parameters.values(), *buffers.values()])

    @property
    def peft_configs(self) -> dict[str, str]:
        return adapter_configs(self.module)

    @staticmethod
    def joined_optimizer(trees: Sequence[dict[str, Any]], *, leave_out: bool) -> dict[str, Any]:
        return optimizer.joined(trees, leave_out=leave_out)

    @property
    def _all_buffers(self) -> dict[str, torch.Tensor]:
        return {**self.buffers[0], **self.extra.tensors}

    @cached_property
    def masterless(self) -> dict[str, None]:
        """The names of the parameters that the optimizer does not update. They are frozen, were not given to it, or
        have no elements."""
        optimized = {held.name for flat in self.kind.flats for held in flat.ranges}
        return {name: None for name in self.parameters[0] if name not in optimized}

    @cached_property
    def _in_memory_order(self) -> tuple[str, ...]:
        """The names of all parameters, in the order in which their weights lie in memory."""
        return (*(name for flat in self.kind.flats for name in flat.names), *self.masterless)

    @property
    def live_moments(self) -> tuple[str, ...]:
        """The names of the moments that exist in memory or in swap files now."""
        return tuple(dict.fromkeys(chain.from_iterable(self._moments)))

    @property
    def _moments(self) -> list[dict[str, torch.Tensor]]:
        """The moments of each flat buffer that exist in memory or in swap files now."""
        flats = self.kind.flats
        states = self.kind.optimizer.state if flats else {}
        return [moments(flat, states.get(flat.master, {})) for flat in flats]

    def trees_of_optimizer(self) -> dict[str, Any]:
        """Returns the trees ``optimizer`` and ``scheduler`` of ``EngineAdapter.state``."""
        scheduler = self.scheduler
        return {
            "optimizer": optimizer.capture(self.kind.optimizer, self.kind.flats),
            "scheduler": None
            if scheduler is None
            else {"class": type(scheduler).__name__, "state": scheduler.state_dict()},
        }

    def tree_of_extra_state(self) -> dict[str, Any]:
        """Returns the tree ``EXTRA_STATE``, if there is any extra state."""
        return {EXTRA_STATE: sorted(self.extra.tensors)} if self.extra.tensors else {}

    def _flat_fragments(self, part: str, moments_of_flats: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[Fragment]:
        """Yields the fragments that this rank writes of the master weights or of one moment. ``moments_of_flats``: the
        value of ``_moments``."""
        tier = self.kind.tier(part)
        for flat, of_flat in zip(self.kind.flats, moments_of_flats, strict=True):
            data = flat.master if part == MASTER else of_flat.get(part)
            if data is not None:
                yield from flat.fragments(part, data.dtype, flat.files.get(part, data), tier)

    def _weights(self, names: Iterable[str]) -> Iterator[Fragment]:
        """Yields a fragment for what this rank holds of each weight, in the dtype that the model computes with."""
        for name in names:
            fragment = self._weight(*self.kind.weight(name))
            # A parameter without elements has to be written by one rank: the first of its owners.
            if fragment.span.numel or (0 in fragment.shape and self.kind.writes_empty(name)):
                yield fragment

    def weights_to_read(self, *, empty: bool = False) -> Iterator[tuple[str, Fragment]]:
        """Yields, for each weight that has no master weight, the name of the parameter and a fragment for what this
        rank reads of it in a restore. ``empty``: also yields a fragment without elements for each parameter of which
        other ranks read all elements."""
        for name in self.masterless:
            fragment = self._weight(*self.kind.read_share(name))
            if fragment.span.numel or empty or (0 in fragment.shape and self.kind.writes_empty(name)):
                yield name, fragment

    def _weight(self, held: ParameterRange, data: torch.Tensor | FileRange) -> Fragment:
        name = held.stored_name
        dtype = dtype_name(self.parameters[0][held.name].dtype, PARAM, name)
        tier = Tier.NVME if isinstance(data, FileRange) else self.kind.tier(PARAM)
        return Fragment(PARAM, name, dtype, held.span, tier, replicated=held.replicated, data=data)

    def buffer_fragments(self, buffers: Mapping[str, torch.Tensor], *, empty: bool = False) -> Iterator[Fragment]:
        """Yields a fragment for each of ``buffers``. ``empty``: as in ``weights_to_read``. If the elements of a buffer
        are not contiguous in memory, the ``data`` of its fragment is a copy."""
        rank = self.group.rank
        for name, buffer in buffers.items():
            if why := not_plain(buffer):
                raise UnsupportedError(f"{BUFFER}/{name} {why}")
            data = buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            if data.numel() or empty or rank == 0 or self.names_differ:
                dtype = dtype_name(data.dtype, BUFFER, name)
                yield Fragment(BUFFER, name, dtype, all_of(buffer.shape), copy=rank, data=data)
