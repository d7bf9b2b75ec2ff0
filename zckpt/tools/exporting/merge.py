"""Merges a LoRA adapter into the weights of its model, as ``merge_and_unload`` of PEFT does.

A merged weight is ``W + (B @ A) * scaling``, rounded after each operation, in fp32. With DoRA, each of its rows (those
that belong to one output) is then multiplied by the quotient of its magnitude and its norm. A weight is merged a few
rows at a time, so it is never in memory as a whole.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from zckpt.errors import MismatchError, UnsupportedError, first_few
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.tools.exporting.adapter import MODEL, SETTINGS
from zckpt.tools.exporting.plan import Conversion, Extent, OutputTensor
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.tools.exporting.adapter import Adapter
    from zckpt.tools.exporting.plan import ExportPlan, SourceTensor

ELEMENTS_MAX = 1 << 20
"""The most elements of a weight that are merged at a time, unless one row has more. This does not depend on the budget,
because the product of fewer rows may be rounded in another way."""
WITHOUT_EFFECT = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "task_type",
))  # fmt: skip
"""The settings of an adapter that do not change how it is merged, or whose effect is seen in the tensors. An adapter
with another setting is not merged, unless the setting is one of those that this module uses."""

_CONVOLUTIONS = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
"""The convolutions, by the number of dimensions of their weights."""


@dataclass(frozen=True, slots=True)
class Merge:
    """What an adapter changes in a weight or a bias of the base model."""

    b: str
    """The name of the matrix B in the source, or of what is added to the bias."""
    a: str | None
    """The name of the matrix A in the source. None for a bias."""
    magnitude: str | None
    """The name of DoRA's magnitudes in the source. None means that the adapter has none."""
    scaling: float
    """The factor of the product."""
    transposed: bool
    """Whether the weight has the shape of the transposed product, as in an embedding."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors of the adapter that ``merged`` takes."""
        return tuple(name for name in (self.b, self.a, self.magnitude) if name is not None)

    def rows(self, shape: Sequence[int]) -> int:
        """Returns how many rows of a weight with this shape are merged at a time."""
        if self.magnitude is not None and self.transposed:  # The norms are those of the columns.
            return shape[0]
        return max(ELEMENTS_MAX // max(math.prod(shape[1:]), 1), 1)

    def merged(self, weight: torch.Tensor, first: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns some rows of the merged weight. ``weight``: these rows of the weight of the base model. ``first``:
        the number of the first of them. ``inputs``: the tensors ``inputs``."""
        b, rows = inputs[0], slice(first, first + len(weight))
        if self.a is None:
            delta = b[rows]
        elif self.transposed:
            delta = (b @ inputs[1][:, rows]).T
        elif weight.dim() == 2 or weight.shape[2:4] == (1, 1):
            delta = b.flatten(1)[rows] @ inputs[1].flatten(1)
        else:  # This is the same product, and is rounded as by PEFT.
            delta = _CONVOLUTIONS[weight.dim()](inputs[1].transpose(0, 1), b[rows]).transpose(0, 1)
        delta = delta.reshape(weight.shape) * self.scaling
        merged: torch.Tensor = weight + delta
        if self.magnitude is None:
            return merged
        outputs: torch.Tensor = merged.T if self.transposed else merged.flatten(1)
        magnitude = inputs[-1].flatten()[slice(None) if self.transposed else rows]
        outputs = (magnitude / torch.linalg.norm(outputs, dim=1)).view(-1, 1) * outputs
        return outputs.T if self.transposed else outputs.view(weight.shape)


# The selection


def without_adapters(
    adapter: Adapter, names: Mapping[str, str], sources: Mapping[str, SourceTensor]
) -> tuple[dict[str, str], dict[str, Merge]]:
    """Selects the tensors of the model without adapters, under the names that they have in it. Returns this selection,
    and what ``adapter`` changes, by the names of the weights in ``sources``. ``names``: the selection of all tensors of
    the model with adapters. Raises UnsupportedError and MismatchError if the adapter cannot be merged."""
    for setting, value in adapter.settings.items():
        if value and setting not in WITHOUT_EFFECT and setting not in SETTINGS:
            raise _refused(adapter, f"it has the setting {setting!r}")
    for key in adapter.settings["alpha_pattern"]:
        if not re.fullmatch(r"\^?[\w.-]+", key):
            raise _refused(adapter, f"its alpha_pattern has {key!r}, which is not the name of a module")
    merges = _changes(adapter, names, sources)
    copies: dict[str, set[str]] = {}
    """The modules that PEFT has wrapped, and the adapters that have trained a copy of each."""
    for name in names:
        module, _, rest = name.partition(".modules_to_save.")
        if "." in rest:
            copies.setdefault(module, set()).add(rest.partition(".")[0])
        module, _, rest = name.partition(".token_adapter.trainable_tokens_delta.")
        if rest:
            copies.setdefault(module, set())
    plain: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, source in names.items():
        new = _plain_name(name, adapter, copies)
        if new is None:
            continue
        if plain.setdefault(new, source) != source:
            raise MismatchError(f"two tensors would have the name {new!r} in the merged model", file=adapter.file)
        if source in merges and tied.setdefault(source, new) != new:
            raise _refused(adapter, f"it changes a weight that {tied[source]} and {new} share")
    return plain, merges


def _refused(adapter: Adapter, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the adapter {adapter.name!r} cannot be merged: {why}",
        file=adapter.file,
        hint=f"adapter={adapter.name!r} (--adapter {adapter.name}) exports the adapter instead",
    )


def _plain_name(name: str, adapter: Adapter, copies: Mapping[str, set[str]]) -> str | None:
    """Returns the name of a tensor in the model without adapters, or None if it is not in the merged model."""
    path, kept = name.split("."), []
    steps = iter(range(len(path)))
    for step in steps:
        module, part = ".".join(path[:step]), path[step]
        if module in adapter.layers and part.startswith("lora_"):
            return None
        if module in adapter.layers and part == "base_layer":
            continue
        if module in copies and part in ("original_module", "modules_to_save", "token_adapter"):
            trained = adapter.name in copies[module]
            if part == "token_adapter" or trained != (part == "modules_to_save"):
                return None
            if part == "modules_to_save" and path[next(steps, step)] != adapter.name:
                return None
            continue
        kept.append(part)
    return ".".join(kept).removeprefix(MODEL)


def _changes(adapter: Adapter, names: Mapping[str, str], sources: Mapping[str, SourceTensor]) -> dict[str, Merge]:
    """Returns what the adapter changes, by the names of the weights in ``sources``."""
    merges: dict[str, Merge] = {}
    square: list[str] = []
    orientations: set[bool] = set()
    with_more = {name.rpartition(".")[0] for name in names}
    for layer, kinds in adapter.layers.items():
        if not kinds:
            continue
        base, embedding = f"{layer}.base_layer.weight", "lora_embedding_A" in kinds
        if base not in names:
            raise MismatchError(
                f"the source has no weight {base}, so the adapter {adapter.name!r} cannot be merged into it",
                file=adapter.file,
                hint=f"adapter={adapter.name!r} (--adapter {adapter.name}) exports the adapter, which needs no weights "
                "of the base model",
            )
        weight = sources[names[base]]
        # bitsandbytes can keep weights of 4 bits in tensors of bf16, with their scales beside them.
        if base in with_more or not TORCH_DTYPES[weight.dtype].is_floating_point or ITEM_BYTES[weight.dtype] < 2:
            raise _refused(adapter, f"{base} is quantized ({weight.dtype})")
        required = ["lora_embedding_A", "lora_embedding_B"] if embedding else ["lora_A.weight", "lora_B.weight"]
        required += ["lora_magnitude_vector"] if adapter.settings["use_dora"] else []
        if not kinds.keys() >= {*required}:
            raise _refused(adapter, f"its tensors for {layer} are {first_few([*kinds], 5)}")
        a, b, magnitude, *_ = (*(names[kinds[kind]] for kind in required), None)
        of_a, of_b = sources[a].shape, sources[b].shape
        product, rank = of_b[:1] + of_a[1:], math.prod(of_a[:1])
        fits = [transposed for transposed, shape in ((False, product), (True, product[::-1])) if shape == weight.shape]
        if embedding or len(product) > 2:
            fits = [transposed for transposed in fits if transposed == embedding]
        ones = (1,) * (len(product) - 2)
        if not fits or not rank or of_b[1:] != (rank, *ones) or len(product) not in (2, *_CONVOLUTIONS):
            raise _refused(adapter, f"{base} is {list(weight.shape)}, its matrices are {list(of_a)} and {list(of_b)}")
        if len(fits) == 2:
            fits = [adapter.settings["fan_in_fan_out"]]
            square.append(base)
        elif len(product) == 2 and not embedding:
            orientations.add(fits[0])
        scaling = _alpha(adapter, layer) / (math.sqrt(rank) if adapter.settings["use_rslora"] else rank)
        if magnitude is not None and sources[magnitude].numel != of_b[0]:
            raise _refused(adapter, f"{base} has {of_b[0]} outputs, and {sources[magnitude].numel} magnitudes")
        merges[names[base]] = Merge(b, a, magnitude, scaling, fits[0])
        if "lora_B.bias" in kinds:
            bias, added = f"{layer}.base_layer.bias", names[kinds["lora_B.bias"]]
            if bias not in names or sources[names[bias]].shape != sources[added].shape:
                raise _refused(adapter, f"it has a bias for {layer}, and the base model has none of this shape")
            merges[names[bias]] = Merge(added, None, None, scaling, False)
    if square and orientations - {adapter.settings["fan_in_fan_out"]}:
        raise _refused(adapter, f"its fan_in_fan_out is not that of all layers, and {square[0]} is square")
    return merges


def _alpha(adapter: Adapter, layer: str) -> float:
    """Returns the numerator of the scaling of a module. PEFT takes the keys of ``alpha_pattern`` as regular
    expressions. Here they have to be names."""
    alphas, path = adapter.settings["alpha_pattern"], layer.removeprefix(MODEL)
    steps = path.split(".")
    keys = [f"^{path}", *(".".join(steps[first:]) for first in range(len(steps)))]
    found: set[float] = {alphas[key] for key in keys if key in alphas}
    if len(found) > 1:
        raise _refused(adapter, f"several entries of its alpha_pattern are for {path}")
    return found.pop() if found else float(adapter.settings["lora_alpha"])


# The plan


def with_merges(plan: ExportPlan, merges: Mapping[str, Merge], sources: Mapping[str, SourceTensor]) -> ExportPlan:
    """Returns the plan with its ``sources``, and with merged weights in the place of the weights ``merges``. What is
    merged is read in fp32, or in fp64 if the weight is. ``sources``: the tensors with the dtypes of the export."""
    read = dict(sources)
    for base, merge in merges.items():
        dtype = "F64" if sources[base].dtype == "F64" else "F32"
        read |= {name: sources[name]._replace(dtype=dtype) for name in (base, *merge.inputs)}
    merging = _Merging(merges, sources, {})
    files = tuple(
        replace(file, tensors={place: part for item in file.tensors.items() for place, part in merging.parts(*item)})
        for file in plan.files
    )
    return replace(plan, files=files, sources=read)


@dataclass(frozen=True, slots=True)
class _Merging:
    merges: Mapping[str, Merge]
    sources: Mapping[str, SourceTensor]
    conversions: dict[Conversion, Conversion]
    """The conversions of the plan, and those that take their place."""

    def parts(self, offset: int, tensor: OutputTensor) -> Iterator[tuple[int, OutputTensor]]:
        """Yields the parts of a tensor that begins at ``offset`` in its file, and the offset at which each begins."""
        conversion = tensor.conversion
        if tensor.extents is not None:
            names = tuple(dict.fromkeys(extent.source for extent in tensor.extents))
            if self.merges.keys().isdisjoint(names):
                yield offset, tensor
                return
            if tensor.extents == (self._whole(names[0]),):
                yield from self._slices(offset, tensor, names[0])
                return
            join = partial(_joined, tensor.name, tensor.extents, names)
            conversion = Conversion(tuple(map(self._whole, names)), join)
        assert conversion is not None, "a tensor without extents has a conversion"
        if conversion not in self.conversions:
            names = tuple(extent.source for extent in conversion.sources)
            inputs = (name for source in names if source in self.merges for name in self.merges[source].inputs)
            self.conversions[conversion] = Conversion(
                (*conversion.sources, *map(self._whole, inputs)), partial(self._convert, conversion)
            )
        yield offset, replace(tensor, extents=None, conversion=self.conversions[conversion])

    def _whole(self, name: str) -> Extent:
        return Extent(name, self.sources[name].all)

    def _rows(self, base: str) -> Iterator[tuple[int, Extent]]:
        """Yields the rows of the weight ``base`` that are merged at a time: the number of the first one, and their
        elements."""
        count, *row = self.sources[base].shape
        rows, row_numel = self.merges[base].rows(self.sources[base].shape), math.prod(row)
        whole = self.sources[base].all
        for first in range(0, count, rows):
            yield first, Extent(base, whole.narrow(first * row_numel, (min(first + rows, count) - first) * row_numel))

    def _slices(self, offset: int, tensor: OutputTensor, base: str) -> Iterator[tuple[int, OutputTensor]]:
        """Yields the parts of a tensor that consists of the merged weight ``base``."""
        inputs = tuple(map(self._whole, self.merges[base].inputs))
        for first, extent in self._rows(base):
            conversion = Conversion((extent, *inputs), partial(self._part, tensor.name, base, first))
            part = OutputTensor(tensor.name, tensor.dtype, (extent.span.numel,), None, conversion)
            yield offset + extent.span.start * ITEM_BYTES[tensor.dtype], part

    def _part(self, name: str, base: str, first: int, elements: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns some rows of the merged weight ``base``, by ``name``. ``first``: the number of the first of them.
        ``elements``: these rows of the weight of the base model, and the inputs of the merge."""
        weight, *inputs = elements
        merge = self.merges[base]
        of_adapter = [flat.view(self.sources[source].shape) for flat, source in zip(inputs, merge.inputs, strict=True)]
        merged = merge.merged(weight.view(-1, *self.sources[base].shape[1:]), first, of_adapter)
        return {name: merged.to(TORCH_DTYPES[self.sources[base].dtype]).flatten()}

    def _convert(self, conversion: Conversion, elements: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Merges the weights that a conversion takes, and converts them. ``elements``: what the conversion takes, and
        then the inputs of the merges."""
        given, rest = [], iter(elements[len(conversion.sources) :])
        for source, flat in zip(conversion.sources, elements[: len(conversion.sources)], strict=True):
            base = source.source
            if base in self.merges:
                inputs = [next(rest) for _ in self.merges[base].inputs]
                parts = [
                    self._part(base, base, first, [extent.of(flat), *inputs])[base]
                    for first, extent in self._rows(base)
                ]
                flat = torch.cat(parts)
            given.append(flat)
        return conversion.convert(given)


def _joined(
    name: str, extents: Sequence[Extent], sources: Sequence[str], elements: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Joins the extents of a tensor. ``elements``: all elements of the tensors ``sources``."""
    whole = dict(zip(sources, elements, strict=True))
    return {name: torch.cat([extent.of(whole[extent.source]) for extent in extents])}
