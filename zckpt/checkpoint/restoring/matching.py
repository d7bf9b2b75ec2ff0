"""Decides which tensor of a checkpoint goes to which tensor of an engine. They are matched by name, part, shape and
dtype alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.checkpoint.restoring.mismatch import DTYPE, MISSING, SHAPE, Mismatch, told, told_differences
from zckpt.plan.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, Fragment
from zckpt.plan.select import part_of
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from zckpt.checkpoint.listing.tensors import TensorInfo

_WEIGHTS = (MASTER, PARAM)
_STAND_INS = {MASTER: PARAM, PARAM: MASTER, BUFFER: PARAM}
"""The part in which a tensor was saved if the checkpoint does not have it in the part that the engine asks for. This is
so if a parameter was frozen either when it was saved or now. For buffers, it is so if the checkpoint was converted from
files that do not tell some of them from frozen weights."""


@dataclass(frozen=True, slots=True)
class Match:
    """Which tensors of a checkpoint fit the tensors of an engine."""

    wanted: tuple[Fragment, ...]
    """All fragments of the engine that this rank would fill (``EngineAdapter.wanted``)."""
    filled: tuple[Fragment, ...]
    """Those of them that are filled: from the checkpoint, or with zeros."""
    sources: Mapping[str, Mapping[str, TensorInfo]]
    """The tensor of the checkpoint that is read for a tensor of the engine, by the part and the name of the latter."""
    converted: Mapping[str, Sequence[str]]
    """The names of the master weights and moments of the engine, by part, that get another dtype than they have in the
    checkpoint."""
    differences: Mapping[str, Mismatch]
    """Why nothing is read for another tensor of the engine that was asked for, by the key of the latter."""
    zeroed: Collection[str]
    """The keys of the moments that become zero, because nothing is read for them and their weight is restored."""
    no_place: Sequence[str]
    """The keys of the tensors of the checkpoint that the engine does not have."""
    unexpected: Sequence[str]
    """The keys of the tensors of the checkpoint that are left out: those of ``no_place``, and those whose shape or
    dtype differs in the engine."""

    @property
    def kept(self) -> list[str]:
        """The keys of the tensors of the engine that were asked for and keep their values."""
        return [key for key in self.differences if key not in self.zeroed]

    @property
    def unfilled(self) -> set[str]:
        """The keys of the fragments in ``wanted`` that are not filled."""
        reads = self.sources
        return {f.key for f in self.wanted if f.name not in reads.get(f.part, ()) and f.key not in self.zeroed}

    @property
    def read_bytes(self) -> int:
        """How many bytes of the checkpoint this rank reads into the engine."""
        return sum(
            fragment.span.numel * self.sources[fragment.part][fragment.name].item_bytes
            for fragment in self.filled
            if fragment.name in self.sources.get(fragment.part, ())
        )

    @property
    def weights_kept(self) -> frozenset[str]:
        """The names of the parameters whose weights keep their values."""
        return frozenset(key.partition("/")[2] for key in self.kept if part_of(key) in _WEIGHTS)

    @property
    def restores_nothing(self) -> bool:
        """Whether tensors were asked for and none is restored, or weights were asked for and none of them is
        restored."""
        if not self.differences:
            return False
        weights = (info for part in _WEIGHTS for info in self.sources.get(part, {}).values())
        weight_restored = any(0 not in info.shape for info in weights)
        return not self.sources or (bool(self.weights_kept) and not weight_restored)

    def changed_roles(self) -> list[str]:
        """Returns a line for each parameter that is frozen in the engine and was trained when it was saved, or the
        reverse."""
        words = {MASTER: "trained", PARAM: "frozen"}
        return [
            f"differs: {name} is {here} in the engine and was {words[info.part]} when it was saved"
            for part, here in words.items()
            for name, info in self.sources.get(part, {}).items()
            if info.part != part
        ]

    def problems(self, changed_roles: Sequence[str]) -> list[str]:
        """Returns the reasons why the whole checkpoint cannot be restored into the whole engine, one line each."""
        lines = [f"unexpected: {key}, the engine has no place for it" for key in self.no_place]
        keys = {fragment.key: None for fragment in self.wanted} if self.differences else {}
        return [
            *told_differences(self.differences, keys),
            *told(changed_roles, "parameters are frozen on one side only"),
            *told(lines, "tensors of the checkpoint have no place in the engine"),
        ]


def match(
    names: Mapping[str, Mapping[str, TensorInfo]],
    aliases: Mapping[str, str],
    wanted: tuple[Fragment, ...],
    no_place: Iterable[str],
    *,
    in_part: bool,
    trains: bool,
) -> Match:
    """Matches the tensors of a checkpoint with those of an engine.

    ``names`` has the tensors of the checkpoint that may be read, by part and name, and ``aliases`` the other names of
    tied weights. ``in_part`` says that ``names`` has only the parts that the caller asked for. Then a fragment of
    another part is read if the part that stands in for its own part has its tensor. If not, nobody asked for it, so it
    is not missing. ``no_place`` has the keys among ``names`` that the engine does not have. An engine that does not
    train takes each weight from the master weights if they have it.
    """
    sources: dict[str, dict[str, TensorInfo]] = {}
    converted: dict[str, list[str]] = {}
    differences: dict[str, Mismatch] = {}
    places: dict[str, list[Mapping[str, TensorInfo]]] = {}
    """For each part of the engine, the tensors of the parts of the checkpoint in which its tensors may be."""
    for fragment in wanted:
        part, name = fragment.part, fragment.name
        if part not in places:
            parts = sorted((part, _STAND_INS.get(part, part)), key=lambda each: not trains and each != MASTER)
            places[part] = [names[each] for each in dict.fromkeys(parts) if each in names]
            sources[part] = {}
        of_part = sources[part]
        if name in of_part:  # Another fragment has other elements of the same tensor.
            continue
        stored_name = aliases.get(name, name)
        info = next((stored[stored_name] for stored in places[part] if stored_name in stored), None)
        if info is None:
            if part in names or not in_part:
                differences[fragment.key] = Mismatch(MISSING, f"missing: {fragment.key} {list(fragment.shape)}")
            continue
        if info.dtype_name != fragment.dtype or info.shape != fragment.shape:
            difference = _difference(info, fragment)
            if difference is not None:
                differences[fragment.key] = difference
                continue
            if part not in (PARAM, BUFFER):
                converted.setdefault(part, []).append(name)
        of_part[name] = info
    sources = {part: of_part for part, of_part in sources.items() if of_part}
    misfitting = {key.partition("/")[2] for key, why in differences.items() if why.kind != MISSING}
    homeless, unexpected = dict.fromkeys(no_place), list[str]()
    if homeless or misfitting:
        used = {info.key for of_part in sources.values() for info in of_part.values()}
        homeless = {key: None for key in homeless if key not in used}
        stored = (f"{part}/{name}" for part, of_part in names.items() for name in of_part)
        left_out = (key for key in stored if key in homeless or key.partition("/")[2] in misfitting)
        unexpected = [key for key in left_out if key not in used]
    zeroed = _zeroed(wanted, sources, differences)
    filled = wanted
    if any(fragment.name not in sources.get(fragment.part, ()) for fragment in wanted):
        filled = tuple(f for f in wanted if f.name in sources.get(f.part, ()) or f.key in zeroed)
    return Match(wanted, filled, sources, converted, differences, zeroed, list(homeless), unexpected)


def _difference(info: TensorInfo, fragment: Fragment) -> Mismatch | None:
    """Returns why a stored tensor cannot be read into a fragment, or None if it can. Weights and buffers of the dtype
    in which a model computes may be converted. Tensors that the optimizer updates may be converted between fp32 and the
    16-bit dtypes, because an engine without separate master weights updates weights of 16 bits."""
    dtype = TORCH_DTYPES[fragment.dtype]
    floating = dtype.is_floating_point and info.dtype.is_floating_point
    computed = not {fragment.part, info.part}.isdisjoint((PARAM, BUFFER))
    converts = floating and (computed or {dtype.itemsize, info.dtype.itemsize} == {2, 4})
    if info.shape == fragment.shape and (converts or info.dtype == dtype):
        return None
    there, here = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(fragment.shape)}"
    kind = DTYPE if info.shape == fragment.shape else SHAPE
    return Mismatch(kind, f"differs: {info.key} is {there}, the engine has {here}")


def _zeroed(
    wanted: Sequence[Fragment], sources: Mapping[str, Mapping[str, TensorInfo]], differences: Collection[str]
) -> dict[str, None]:
    """Returns the keys of the moments that become zero: those of the parameters whose weight is restored and of which
    no moment can be restored. If the checkpoint has some of the moments of a parameter, the others are not made up,
    because a made-up moment beside a real one would make steps of any size."""
    if not differences:
        return {}
    restored = {name for part, of_part in sources.items() if part not in RESERVED_PARTS for name in of_part}
    begun = sources.get(MASTER, {}).keys() - restored
    moments = (fragment for fragment in wanted if fragment.part not in RESERVED_PARTS)
    return {f.key: None for f in moments if f.name in begun and f.key in differences}
