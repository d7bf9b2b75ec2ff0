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

    from zckpt.checkpoint.listing.contents import TensorInfo

_STAND_INS = {MASTER: PARAM, PARAM: MASTER, BUFFER: PARAM}
"""The part in which a tensor was saved if the checkpoint does not have it in the part that the engine asks for. This is
so if a parameter was frozen either when it was saved or now. For buffers, it is so if the checkpoint was converted from
files that do not tell some of them from frozen weights."""


@dataclass(frozen=True, slots=True)
class Match:
    """Which tensors of a checkpoint fit the tensors of an engine. All tensors are named by their keys."""

    wanted: tuple[Fragment, ...]
    """All fragments of the engine that this rank would fill (``EngineAdapter.wanted``)."""
    sources: Mapping[str, TensorInfo]
    """The tensor of the checkpoint that is read for a tensor of the engine, by the key of the latter."""
    differences: Mapping[str, Mismatch]
    """Why nothing is read for another tensor of the engine that was asked for, by the key of the latter."""
    zeroed: Collection[str]
    """The keys of ``differences`` whose tensors become zero."""
    no_place: Sequence[str]
    """The tensors of the checkpoint that the engine does not have."""
    unexpected: Sequence[str]
    """The tensors of the checkpoint that are left out: those of ``no_place``, and those whose shape or dtype differs in
    the engine."""

    @property
    def filled(self) -> tuple[Fragment, ...]:
        return tuple(f for f in self.wanted if f.key in self.sources or f.key in self.zeroed)

    @property
    def kept(self) -> list[str]:
        """The tensors of the engine that were asked for and keep their values."""
        return [key for key in self.differences if key not in self.zeroed]

    @property
    def converted(self) -> list[str]:
        """The master weights and moments of the engine that get another dtype than they have in the checkpoint."""
        keys = {fragment.key: fragment for fragment in self.wanted if fragment.part not in (PARAM, BUFFER)}
        return [
            key
            for key, fragment in keys.items()
            if key in self.sources and self.sources[key].dtype != TORCH_DTYPES[fragment.dtype]
        ]

    @property
    def weights_kept(self) -> frozenset[str]:
        """The names of the parameters whose weights keep their values."""
        return frozenset(key.partition("/")[2] for key in self.kept if _is_weight(key))

    @property
    def restores_nothing(self) -> bool:
        """Whether tensors were asked for and none is restored, or weights were asked for and none of them is
        restored."""
        weight_restored = any(_is_weight(key) and 0 not in info.shape for key, info in self.sources.items())
        return bool(self.differences) and (not self.sources or (bool(self.weights_kept) and not weight_restored))

    def changed_roles(self) -> list[str]:
        """Returns a line for each parameter that is frozen in the engine and was trained when it was saved, or the
        reverse."""
        words = {MASTER: "trained", PARAM: "frozen"}
        roles = {(f.name, f.part, self.sources[f.key].part): None for f in self.wanted if f.key in self.sources}
        return [
            f"differs: {name} is {words[here]} in the engine and was {words[there]} when it was saved"
            for name, here, there in roles
            if here != there and here in words
        ]

    def problems(self, changed_roles: Sequence[str]) -> list[str]:
        """Returns the reasons why the whole checkpoint cannot be restored into the whole engine, one line each."""
        lines = [f"unexpected: {key}, the engine has no place for it" for key in self.no_place]
        return [
            *told_differences(self.differences, {fragment.key: None for fragment in self.wanted}),
            *told(changed_roles, "parameters are frozen on one side only"),
            *told(lines, "tensors of the checkpoint have no place in the engine"),
        ]


def match(
    checkpoint: Mapping[str, TensorInfo],
    names: Mapping[str, Collection[str]],
    wanted: tuple[Fragment, ...],
    no_place: Iterable[str],
    *,
    in_part: bool,
    trains: bool,
) -> Match:
    """Matches the tensors of a checkpoint with those of an engine.

    ``names`` has the names of the tensors of the checkpoint that may be read, by part. ``in_part`` says that ``names``
    has only the parts that the caller asked for. Then a fragment of another part is read if the part that stands in for
    its own part has its tensor. If not, nobody asked for it, so it is not missing. ``no_place`` has the keys among
    ``names`` that the engine does not have. An engine that does not train takes each weight from the master weights if
    they have it.
    """
    sources: dict[str, TensorInfo] = {}
    differences: dict[str, Mismatch] = {}
    for key, fragment in {fragment.key: fragment for fragment in wanted}.items():
        parts = [fragment.part, _STAND_INS.get(fragment.part, fragment.part)]
        parts = [part for part in parts if part in names or not in_part]
        if not trains:
            parts.sort(key=lambda part: part != MASTER)
        candidates = (f"{part}/{fragment.name}" for part in parts)
        stored_key = next((candidate for candidate in candidates if candidate in checkpoint), None)
        if stored_key is not None:
            info = checkpoint[stored_key]
            difference = _difference(info, fragment)
            if difference is None:
                sources[key] = info
            else:
                differences[key] = difference
        elif fragment.part in parts:
            differences[key] = Mismatch(MISSING, f"missing: {key} {list(fragment.shape)}")
    used = {info.key for info in sources.values()}
    homeless = {key: None for key in no_place if key not in used}
    misfitting = {key.partition("/")[2] for key, why in differences.items() if why.kind != MISSING}
    stored = (f"{part}/{name}" for part, of_part in names.items() for name in of_part)
    left_out = (key for key in stored if key in homeless or key.partition("/")[2] in misfitting)
    unexpected = [key for key in left_out if key not in used]
    return Match(wanted, sources, differences, _zeroed(wanted, sources, differences), list(homeless), unexpected)


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
    wanted: Sequence[Fragment], sources: Mapping[str, TensorInfo], differences: Collection[str]
) -> dict[str, None]:
    """Returns the keys of the moments that become zero: those of the parameters whose weight is restored and of which
    no moment can be restored. If the checkpoint has some of the moments of a parameter, the others are not made up,
    because a made-up moment beside a real one would make steps of any size."""
    moments = [fragment for fragment in wanted if fragment.part not in RESERVED_PARTS]
    restored = {fragment.name for fragment in moments if fragment.key in sources}
    return {
        f.key: None
        for f in moments
        if f.key in differences and f.name not in restored and f"{MASTER}/{f.name}" in sources
    }


def _is_weight(key: str) -> bool:
    return part_of(key) in (MASTER, PARAM)
