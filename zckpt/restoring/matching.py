"""Which tensor of a checkpoint goes where in an engine: found by name, part, shape and dtype alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zckpt.plan.select import part_of
from zckpt.restoring.mismatch import DTYPE, MISSING, SHAPE, Difference, told, told_differences
from zckpt.state.inventory import BUFFER, MASTER, PARAM, RESERVED_PARTS, Fragment
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from zckpt.listing.contents import TensorInfo

_STAND_INS = {MASTER: PARAM, PARAM: MASTER}
"""The part in which a parameter's weight was saved if it is not in the one that is wanted: it was frozen on one side.
"""


@dataclass(frozen=True, slots=True)
class Match:
    """What of a checkpoint fits what an engine wants. All tensors are named by their keys."""

    wanted: tuple[Fragment, ...]
    """All that the engine wants."""
    sources: Mapping[str, TensorInfo]
    """What is read, by the engine's key."""
    differences: Mapping[str, Difference]
    """Why nothing is read for the others that are asked for, by the engine's key."""
    zeroed: Collection[str]
    """Those of the latter that begin at zero."""
    no_place: Sequence[str]
    """The checkpoint's tensors for which the engine has no place."""
    unexpected: Sequence[str]
    """The checkpoint's tensors that are left out: the former, and those that go to a place of another shape."""

    @property
    def filled(self) -> tuple[Fragment, ...]:
        return tuple(one for one in self.wanted if one.key in self.sources or one.key in self.zeroed)

    @property
    def kept(self) -> list[str]:
        """The engine's tensors that are asked for and stay as they are."""
        return [key for key in self.differences if key not in self.zeroed]

    @property
    def weights_kept(self) -> frozenset[str]:
        """The names of the parameters whose weights stay as they are."""
        return frozenset(key.partition("/")[2] for key in self.kept if _is_weight(key))

    @property
    def restores_nothing(self) -> bool:
        """Whether tensors are asked for and none is restored, or weights are and none of those is."""
        weight_restored = any(_is_weight(key) and 0 not in info.shape for key, info in self.sources.items())
        return bool(self.differences) and (not self.sources or (bool(self.weights_kept) and not weight_restored))

    def changed_roles(self) -> list[str]:
        """A line for each parameter that is frozen in the engine and was not when it was saved, or the reverse."""
        words = {MASTER: "trained", PARAM: "frozen"}
        found = {(f.name, f.part, self.sources[f.key].part): None for f in self.wanted if f.key in self.sources}
        return [
            f"differs: {name} is {words[here]} in the engine and was {words[there]} when it was saved"
            for name, here, there in found
            if here != there
        ]

    def problems(self, changed_roles: Sequence[str]) -> list[str]:
        """What keeps the whole checkpoint from being restored into the whole engine, one line each."""
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
    """``names``: those of the checkpoint's tensors that may be read, by part. ``in_part``: ``names`` has only the parts
    that the caller asked for. A wanted tensor of another part is then read if the part that stands in for its own has
    it; if not, it was not asked for, and is not missing. ``no_place``: the keys among ``names`` that the engine does
    not have. An engine that does not train takes every weight from its master, where there is one.
    """
    sources: dict[str, TensorInfo] = {}
    differences: dict[str, Difference] = {}
    for key, fragment in {fragment.key: fragment for fragment in wanted}.items():
        parts = [fragment.part, _STAND_INS.get(fragment.part, fragment.part)]
        parts = [part for part in parts if part in names or not in_part]
        if not trains:
            parts.sort(key=lambda part: part != MASTER)
        found = [f"{part}/{fragment.name}" for part in parts if f"{part}/{fragment.name}" in checkpoint]
        if found:
            info = checkpoint[found[0]]
            difference = _difference(info, fragment)
            if difference is None:
                sources[key] = info
            else:
                differences[key] = difference
        elif fragment.part in parts:
            differences[key] = Difference(MISSING, f"missing: {key} {list(fragment.shape)}")
    used = {info.key for info in sources.values()}
    homeless = {key: None for key in no_place if key not in used}
    misfitting = {key.partition("/")[2] for key, why in differences.items() if why.kind != MISSING}
    stored = (f"{part}/{name}" for part, own in names.items() for name in own)
    left_out = (key for key in stored if key in homeless or key.partition("/")[2] in misfitting)
    unexpected = [key for key in left_out if key not in used]
    return Match(wanted, sources, differences, _zeroed(wanted, sources, differences), list(homeless), unexpected)


def _difference(info: TensorInfo, fragment: Fragment) -> Difference | None:
    """Why a stored tensor cannot be read into a place. Weights and buffers in the dtype that a model computes with may
    be converted; what the optimizer updates may not."""
    dtype = TORCH_DTYPES[fragment.dtype]
    floating = dtype.is_floating_point and info.dtype.is_floating_point
    converts = floating and not {fragment.part, info.part}.isdisjoint((PARAM, BUFFER))
    if info.shape == fragment.shape and (converts or info.dtype == dtype):
        return None
    there, here = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(fragment.shape)}"
    kind = DTYPE if info.shape == fragment.shape else SHAPE
    return Difference(kind, f"differs: {info.key} is {there}, the engine has {here}")


def _zeroed(
    wanted: Sequence[Fragment], sources: Mapping[str, TensorInfo], differences: Collection[str]
) -> dict[str, None]:
    """The keys of moments that start at zero: of parameters whose weight is restored and of which no moment can be. One
    alone is not made up: beside another one from the checkpoint, it would make for steps of any size."""
    moments = [fragment for fragment in wanted if fragment.part not in RESERVED_PARTS]
    restored = {fragment.name for fragment in moments if fragment.key in sources}
    return {
        f.key: None
        for f in moments
        if f.key in differences and f.name not in restored and f"{MASTER}/{f.name}" in sources
    }


def _is_weight(key: str) -> bool:
    return part_of(key) in (MASTER, PARAM)
