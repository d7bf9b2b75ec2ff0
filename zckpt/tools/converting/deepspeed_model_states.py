"""Reads what one file of model states of DeepSpeed has: weights, buffers, and the names and shapes of parameters."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.flats import cut_alone
from zckpt.engines.tensors import plain_name
from zckpt.errors import FormatError
from zckpt.format.limits import NDIM_MAX, TENSOR_BYTES_MAX
from zckpt.geometry import all_of
from zckpt.plan.inventory import unconverted
from zckpt.tools.converting.deepspeed_folder import STOCK, STOCK_OF_EXPERTS, of_type
from zckpt.tools.converting.stacked import Stacked
from zckpt.transfer.stored import stored_range
from zckpt.transfer.values_digest import values_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zckpt.tools.converting.deepspeed_values import Shapes


class ModelStates:
    """The model states of one rank, or below stage 3 those of all ranks that have the same ones. All names are those
    that zckpt uses.

    Args:
        saved: the content of the file.
        partitions_weights: whether the folder is of stage 3.
        more: weights, buffers and other values of the module that are in other files, by name.
        name_of: a function that returns the name that zckpt uses for a name in the file.
        flat_names: the names of the parameters of each flat buffer, if the file does not tell them.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        *,
        partitions_weights: bool,
        more: Mapping[str, Any] | None = None,
        name_of: Callable[[str], str] = plain_name,
        flat_names: Sequence[Sequence[str]] = (),
    ) -> None:
        self.saved = saved
        self._partitions_weights = partitions_weights
        self._more, self._name_of, self._flat_names = more or {}, name_of, flat_names

    @cached_property
    def module(self) -> dict[str, Any]:
        """The weights and buffers by name, as tensors or ``Stacked``. At stage 3 the weights have no elements here,
        because each rank has a part of them in another file."""
        return {name: value for name, value in self._values.items() if isinstance(value, (torch.Tensor, Stacked))}

    @cached_property
    def buffer_names(self) -> list[str]:
        """The names of the persistent buffers."""
        return list(map(self._name_of, self.saved.get("buffer_names") or ()))

    @property
    def other_values(self) -> list[str]:
        """The names of the values that modules have added to their ``state_dict`` and that are no tensors."""
        return [name for name in self._values if name not in self.module]

    @property
    def lost_buffers(self) -> list[str]:
        """The names of the buffers whose values are not in the files."""
        return [name for name in self.buffer_names if name not in self._values and name not in self.aliases]

    @cached_property
    def _values(self) -> dict[str, Any]:
        """What the module has in its ``state_dict``, by name."""
        saved = {} if self.saved["module"] is None else of_type(self.saved, "module", dict)
        return {**{self._name_of(name): value for name, value in saved.items()}, **self._more}

    @property
    def client_state(self) -> dict[str, Any]:
        """The entries that the caller of ``save_checkpoint`` has added to the model states."""
        stock = STOCK | STOCK_OF_EXPERTS if "num_experts" in self.saved else STOCK
        return {key: value for key, value in self.saved.items() if key not in stock}

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers, and what modules have added to their ``state_dict``, by name."""
        names = self.extra.union(self.buffer_names)
        named = {name: tensor for name, tensor in self.module.items() if name in names}
        return {name: tensor for name, tensor in named.items() if name not in self.aliases}

    @cached_property
    def buffer_digests(self) -> dict[str, bytes]:
        """The digests of the buffers by name."""
        return {name: values_digest(buffer) for name, buffer in self.buffers.items()}

    @cached_property
    def extra(self) -> frozenset[str]:
        """The names of the tensors that modules have added to their ``state_dict`` by themselves, as far as the files
        tell them from frozen weights. At stage 3 weights have no elements here, and no weight has a name that begins
        with that of another one. The others are in the part ``param``, where a restore finds them too."""
        shapes = [*(self.saved.get("param_shapes") or ()), self.saved.get("frozen_param_shapes") or {}]
        others = self.module.keys() - {*map(self._name_of, chain(*shapes)), *self.buffer_names}
        return frozenset(
            name
            for name in others
            if name.split(".")[-1] == "_extra_state"
            or not unconverted([name.rpartition(".")[0]]).isdisjoint(self.module)
            or (self._partitions_weights and self.module[name].numel())
        )

    @cached_property
    def aliases(self) -> dict[str, str]:
        """For each other name of a tied weight or buffer, the name under which it is stored."""
        # Beside experts, DeepSpeed saves copies of tied weights.
        told = self._partitions_weights or "num_experts" in self.saved
        shared = self.saved.get("shared_params") or {} if told else {}
        aliases = {self._name_of(name): self._name_of(first) for name, first in shared.items()}
        aliases = {name: first for name, first in aliases.items() if name != first}
        places: dict[tuple[Any, ...], str] = {}
        for name, tensor in self.module.items():
            # A restore needs the extra state under each of its names.
            if isinstance(tensor, torch.Tensor) and tensor.numel() and name not in self.extra:
                place = (stored_range(tensor) or tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                if places.setdefault(place, name) != name:
                    aliases[name] = places[place]
        return aliases

    @cached_property
    def weights(self) -> dict[str, Any]:
        """The weights of all parameters by name, in the order of the module, as tensors or ``Stacked``."""
        other = self.extra.union(self.buffer_names, self.aliases)
        return {name: tensor for name, tensor in self.module.items() if name not in other}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters that this rank holds, before ZeRO partitions them."""
        flats = [] if self.saved.get("param_shapes") is None else self.flat_shapes
        of_flats = {name: shape for of_flat in flats for name, shape in of_flat.items()}
        if self._partitions_weights:
            return of_flats | self.frozen_shapes
        shapes = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        other = next((name for name, shape in of_flats.items() if shapes.get(name, shape) != shape), None)
        if other is not None:
            raise FormatError("the optimizer's parameter has another shape than the weight", key=other)
        return shapes | of_flats  # The weights of AutoEP's experts are not in this file.

    @cached_property
    def flat_shapes(self) -> Shapes:
        """For each flat buffer that is partitioned, the shapes of its parameters by name."""
        if self._flat_names:
            return [{name: tuple(self.module[name].shape) for name in of_flat} for of_flat in self._flat_names]
        return [self._shapes(of_flat) for of_flat in of_type(self.saved, "param_shapes", list)]

    @property
    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the frozen weights of stage 3 by name."""
        return self._shapes(self.saved.get("frozen_param_shapes") or {}) if self._partitions_weights else {}

    @property
    def frozen_fragments(self) -> dict[str, torch.Tensor]:
        """What the rank has of the frozen weights of stage 3, by name."""
        fragments = self.saved.get("frozen_param_fragments") or {} if self._partitions_weights else {}
        return {self._name_of(name): data for name, data in fragments.items()}

    def not_saved(self, ranks: int) -> set[str]:
        """Returns the names of the frozen weights whose values are not in the files. ``ranks``: the number of ranks
        over which each is partitioned. The file is that of the first of them."""
        return {
            name
            for name, data in self.frozen_fragments.items()
            if data.numel() < cut_alone(name, all_of(self.frozen_shapes[name]), 0, ranks).span.stop
        }

    def _shapes(self, saved: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Returns saved shapes of parameters by name. Raises FormatError for one that no tensor can have."""
        for shape in saved.values():
            if len(shape) > NDIM_MAX or not all(type(size) is int and 0 <= size <= TENSOR_BYTES_MAX for size in shape):
                raise FormatError("it has a shape that no tensor can have")
        return {self._name_of(name): tuple(shape) for name, shape in saved.items()}
