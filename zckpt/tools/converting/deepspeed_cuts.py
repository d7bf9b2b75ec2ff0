"""How tensor parallelism has cut the parameters of a run, as ``universal_checkpoint_info`` in a file of model states
says. AutoTP puts it there. A training script with Megatron's parallelism may put it into its ``client_state``, for
DeepSpeed's own converter ``ds_to_universal``:

    {"affine_map": {"version": 1, "params": {PATTERN: MAP, ...}},              AutoTP: the elements of each rank
     "tp_replicated_parameter_patterns": [PATTERN, ...],                       not cut, and equal on all ranks
     "parameter_to_average_patterns": [PATTERN, ...],                          not cut; here they have to be equal too
     "parameter_with_row_parallelism_patterns": [PATTERN, ...],                cut in dimension 1
     "parameter_with_2_sub_params_cat_dim_0": [PATTERN, ...],                  two parts, each cut in dimension 0
     "parameter_with_sub_params": [{"patterns": [...], "shape": [...], "partition_dim": 0}, ...],     several parts
     "sub_param_shard_widths": {PATTERN: [[WIDTH of each rank], ...], ...},    the widths of these parts
     "autotp_unsupported_parameter_patterns": {PATTERN: REASON, ...}}

A pattern is a regular expression that matches the beginning of a name. As for DeepSpeed's converter, a parameter that
no pattern matches is cut evenly in dimension 0, unless AutoTP has written its maps, which name every parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from zckpt.adapters.deepspeed.local_tensors import INTERVALS_MAX, cut_by_map, cut_evenly, cut_of_view
from zckpt.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zckpt.adapters.deepspeed.experts import Cut

Shape = tuple[int, ...]
INFO = "universal_checkpoint_info"
REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
ROWS, TWO_PARTS, PARTS, WIDTHS = (
    "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params",
    "sub_param_shard_widths",
)  # fmt: skip
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
MAP_VERSION = 1
"""The newest version of AutoTP's maps that is understood."""
EXPRESSIONS_MAX, EXPRESSION_LENGTH_MAX = 64, 256
"""The most patterns that are more than one name, and the most characters of each."""
_COSTLY = re.compile(r"(?<!\\)[({|]|([*+?].*){3}")
"""Matches patterns that could take very long: those with groups, with alternatives, with counts, or with more than two
repetitions."""
HINT = (
    "load the folder into an engine after zckpt.attach(engine), which reads DeepSpeed's checkpoints too, and write it "
    f"with zckpt.write; or save it with client_state={{'{INFO}': ...}}, whose patterns tell how each parameter is cut"
)
"""What the errors about unknown cuts advise the user to do."""


class Cuts:
    """The cuts of one run. ``info``: what the folder has as ``universal_checkpoint_info``, or None. ``ranks``: the
    number of tensor-parallel ranks. Raises UnsupportedError if there are several ranks and no ``info``."""

    def __init__(self, info: Any, ranks: int) -> None:
        if ranks > 1 and not isinstance(info, Mapping):
            raise UnsupportedError(
                f"it was written with tensor parallelism over {ranks} ranks, and has no {INFO}, which would tell how "
                "each parameter is cut", hint=HINT,
            )  # fmt: skip
        self._info: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
        self._ranks = ranks

    @property
    def by_autotp(self) -> bool:
        """Whether AutoTP has cut the parameters."""
        return bool(self._maps)

    def of(self, name: str, shapes: Sequence[Shape]) -> Cut | None:
        """Returns how a parameter is cut, or None if each rank holds all of it. ``shapes``: the shape of the local
        tensor of each rank. Raises UnsupportedError if the folder does not tell how it is cut, and FormatError if what
        it tells does not fit the shapes."""
        if self._ranks == 1:
            return None
        try:
            cut = self._of(name, shapes)
            of_ranks = [shapes[0]] * self._ranks
            if cut is not None:
                whole, dim, sections = cut
                sizes = (sum(count for _, count in section) for section in sections)
                of_ranks = [(*whole[:dim], size, *whole[dim + 1 :]) for size in sizes]
            if of_ranks != list(shapes):
                raise ValueError(f"the shapes are {[*map(list, shapes)]}, and should be {[*map(list, of_ranks)]}")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
            raise FormatError(f"{INFO} does not fit the tensors: {error}", key=name) from error
        return cut

    def _of(self, name: str, shapes: Sequence[Shape]) -> Cut | None:
        reason, cut_map = self._info.get(UNSUPPORTED, {}).get(_only(name)), self._maps.get(_only(name))
        pieces = [] if cut_map is None else [piece for rank in cut_map["ranks"].values() for piece in rank["pieces"]]
        if reason is None and any(piece.get("scale", 1.0) != 1.0 for piece in pieces):
            reason = "its values are scaled by the number of ranks"
        replicated = any(self._patterns[key].match(name) for key in REPLICATED)
        if reason is None and self._maps and cut_map is None and not replicated:
            reason = "it does not tell how"
        if reason is not None:
            raise UnsupportedError(f"AutoTP has cut this parameter, and {reason}", key=name, hint=HINT)
        if replicated:
            return None
        if cut_map is not None:
            if len(cut_map["ranks"]) != self._ranks or len(pieces) > INTERVALS_MAX:
                raise ValueError(f"its map is one of {len(cut_map['ranks'])} ranks")
            return _by_map(name, cut_map, shapes)
        if self._patterns[TWO_PARTS].match(name):
            return cut_evenly(name, shapes[0], 0, 2, self._ranks)
        for entry, patterns in self._parts:
            if patterns.match(name):
                return self._in_parts(name, entry, shapes)
        return cut_evenly(name, shapes[0], int(self._patterns[ROWS].match(name)), 1, self._ranks)

    def _in_parts(self, name: str, entry: Mapping[str, Any], shapes: Sequence[Shape]) -> Cut:
        """Returns the cut of a parameter that consists of several parts one after another, which are each cut.
        ``entry``: that of the parameter in ``PARTS``."""
        dim, view = int(entry["partition_dim"]), list(entry["shape"])
        widths = next((of_parts for of_parts, patterns in self._widths if patterns.match(name)), None)
        if widths is None and isinstance(view[dim], int):  # Before version 0.4, it is the number of equal parts.
            return cut_evenly(name, shapes[0], dim, min(view[dim], INTERVALS_MAX), self._ranks)
        if widths is None:
            if any(size % self._ranks for size in view[dim]):
                raise ValueError(f"its parts of {view[dim]} cannot be cut evenly")
            widths = [[size // self._ranks] * self._ranks for size in view[dim]]
        sections: list[list[tuple[int, int]]] = [[] for _ in range(self._ranks)]
        for first, part in zip(accumulate(map(sum, widths), initial=0), widths, strict=False):
            for section, (start, end) in zip(sections, pairwise(accumulate(part, initial=first)), strict=True):
                section.append((start, end - start))
        view[dim] = sum(map(sum, widths))
        sizes = [sum(size) if isinstance(size, (list, tuple)) else int(size) for size in view]
        rest = sum(map(math.prod, shapes)) // abs(math.prod(sizes))
        shape = tuple(rest if size == -1 else size for size in sizes)
        return cut_of_view(name, _whole(shapes, shape), shape, dim, [tuple(section) for section in sections])

    @cached_property
    def _maps(self) -> Mapping[str, Any]:
        """AutoTP's maps, by pattern."""
        maps = self._info.get("affine_map", {})
        if maps.get("version", MAP_VERSION) > MAP_VERSION:
            raise UnsupportedError(f"AutoTP's maps have the version {maps['version']}, which zckpt does not know")
        params: Mapping[str, Any] = maps.get("params", {})
        return params

    @cached_property
    def _patterns(self) -> Mapping[str, _Patterns]:
        return {key: _Patterns(self._info.get(key, ())) for key in (*REPLICATED, ROWS, TWO_PARTS)}

    @cached_property
    def _parts(self) -> list[tuple[Mapping[str, Any], _Patterns]]:
        return [(entry, _Patterns(entry["patterns"])) for entry in self._info.get(PARTS, ())]

    @cached_property
    def _widths(self) -> list[tuple[Any, _Patterns]]:
        return [(widths, _Patterns([pattern])) for pattern, widths in self._info.get(WIDTHS, {}).items()]


class _Patterns:
    """Regular expressions that match the beginnings of names. Raises UnsupportedError for one that might take very
    long."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names, self._others = set(), []
        for pattern in patterns:
            name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
            if pattern == _only(name):
                self._names.add(name)
                continue
            self._others.append(re.compile(pattern))
            if len(pattern) > EXPRESSION_LENGTH_MAX or _COSTLY.search(pattern):
                raise UnsupportedError(
                    f"the pattern {pattern!r} is not one of names, classes and up to two repetitions", hint=HINT
                )
        if len(self._others) > EXPRESSIONS_MAX:
            raise UnsupportedError(f"there are more than {EXPRESSIONS_MAX} patterns", hint=HINT)

    def match(self, name: str) -> bool:
        return name in self._names or any(pattern.match(name) for pattern in self._others)


def _only(name: str) -> str:
    """Returns the pattern that matches only this parameter, as AutoTP writes it."""
    return rf"^{re.escape(name)}$"


def _by_map(name: str, cut_map: Mapping[str, Any], shapes: Sequence[Shape]) -> Cut | None:
    view, shards = tuple(cut_map["logical_shape"]), [tuple(rank["shard_shape"]) for rank in cut_map["ranks"].values()]
    pieces = [piece for rank in cut_map["ranks"].values() for piece in rank["pieces"]]
    if pieces and all(len(piece["locations"]) == len(shards) for piece in pieces):
        return None
    cut_dims = (dim for dim, size in enumerate(view) if any(shard[dim] != size for shard in shards))
    return cut_by_map(name, _whole(shapes, view), next(cut_dims, 0), cut_map)


def _whole(shapes: Sequence[Shape], view: Shape) -> Shape:
    """Returns the shape of a whole parameter. ``shapes``: those of its local tensors. ``view``: the shape of the view
    that is cut."""
    same = len(view) == len(shapes[0])
    return view if same else (sum(shape[0] for shape in shapes), *shapes[0][1:])
