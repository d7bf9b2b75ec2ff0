"""Turns a state dict that was read from files into a ``Source``.

If it has a model and its optimizer by the names of the parameters, as ``get_state_dict`` of PyTorch, FSDP1's full state
dicts and torchtitan have them, it becomes what ``zckpt.write`` writes for a ``TrainState``. Any other state dict
becomes what ``zckpt.write_state_dict`` writes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zckpt.adapters import optimizer
from zckpt.adapters.flats import FlatBuffer, ParameterRange, moments
from zckpt.adapters.trees import COUNTERS
from zckpt.checkpoint.writing.collect import fingerprint
from zckpt.engines.state_dict import OWN, PATHS, RANKS, STATE_DICT, STREAMS, Path, packed_paths
from zckpt.engines.tensors import dtype_name
from zckpt.errors import FormatError, UnsupportedError, first_few
from zckpt.geometry import all_of
from zckpt.plan.inventory import MASTER, PARAM, FileRange, Fragment
from zckpt.tools.converting.restricted_pickle import load
from zckpt.tools.converting.source import RankPart, Source
from zckpt.transfer.stored import in_order, stored_range, with_values
from zckpt.transfer.values_digest import values_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zckpt.geometry import Span
    from zckpt.tools.converting.source import FileState

_ADAM = frozenset({
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
})  # fmt: skip
"""Settings that only the param groups of Adam and AdamW have, of torch's optimizers."""
_ADAM_STATES = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_STEPS = ("step",), ("global_step",), ("global_steps",), ("train_state", "step")
"""The places where training scripts keep the number of steps."""
_RNG = "the random number generators of the ranks"
_SCHEDULER = "the class of the scheduler: zckpt.restore does not check it"
_OPTIMIZER = "the class of the optimizer: zckpt.restore does not check it"
_BUFFERS = "which of the tensors that are not trained are buffers: all of them are in the part param"
_LAYOUT = (
    "DCP describes a tensor wrongly if FSDP2 cuts what tensor parallelism has cut, and the number of rows cannot be "
    "divided: save the state with zckpt.write or zckpt.write_state_dict"
)


class Shard(NamedTuple):
    """A part of a tensor as it is in a file."""

    rank: int
    """The rank that has it."""
    span: Span
    """The elements of the tensor. There may be none."""
    sizes: tuple[int, ...]
    """The shape of the part."""
    data: torch.Tensor | FileRange
    """The part itself, or the range of a file that ``torch.save`` has written for it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose values are in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Shard, ...]
    """Its parts. Together they have each element once."""

    @property
    def divided(self) -> bool:
        """Whether its elements are in several chunks."""
        return sum(chunk.span.numel > 0 for chunk in self.chunks) > 1

    def elements(self, name: str, chunk: Shard) -> torch.Tensor:
        """Returns the elements of a chunk in a 1-D tensor, which has no memory unless it is small or was not stored in
        order. ``name``: the name of the tensor, for errors. Raises FormatError if the file has something else, and the
        errors of ``load``."""
        data, file = chunk.data, None
        if isinstance(data, FileRange):
            data, file = load(data.path, data), data.path
        if not isinstance(data, torch.Tensor):
            raise FormatError(f"there is no tensor in the place of {name}", file=file, key=name)
        if tuple(data.shape) != chunk.sizes or data.dtype != self.dtype:
            raise FormatError(
                f"{name} is said to have a chunk of {list(chunk.sizes)} in {self.dtype}, and the file has "
                f"{list(data.shape)} in {data.dtype}",
                file=file, key=name, hint=_LAYOUT,
            )  # fmt: skip
        return in_order(data.detach()).view(-1)

    def whole(self, name: str) -> torch.Tensor:
        """Returns the tensor, unless it is ``divided``, in its shape. The values may still be in the file."""
        chunk = max(self.chunks, key=lambda chunk: chunk.span.numel)
        return self.elements(name, chunk).view(self.shape)


@dataclass
class Leaves:
    """The leaves of a state dict in files, by name."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """The plain values."""
    paths: dict[str, Path] = field(default_factory=dict)
    """The path of each leaf."""
    ranks: int = 1
    """The number of ranks that have written the files."""

    def whole(self, name: str) -> Any:
        """Returns the value of a leaf: a plain value, or a tensor that is not ``divided``."""
        return self.tensors[name].whole(name) if name in self.tensors else self.values[name]

    def add(self, other: Leaves, prefix: Path = ()) -> None:
        """Adds the leaves of another file, whose paths get a prefix. Raises FormatError for a name that is there
        already."""
        for name, path in other.paths.items():
            new_path = (*prefix, *path)
            new_name = ".".join(map(str, new_path)) if prefix else name
            if new_name in self.paths:
                raise FormatError(f"two files have {new_name}", key=new_name)
            self.paths[new_name] = new_path
            if name in other.tensors:
                self.tensors[new_name] = other.tensors[name]
            else:
                self.values[new_name] = other.values[name]
        self.ranks = max(self.ranks, other.ranks)


def source_of(leaves: Leaves, path: str, what: str, files: Mapping[str, FileState]) -> Source:
    """Returns the source of a state dict. ``what``: a description of its files, for people. Raises FormatError,
    UnsupportedError and StorageError."""
    if not leaves.tensors:
        raise FormatError("it has no tensors", file=path)
    streams = [name for name, value in leaves.values.items() if isinstance(value, BytesIO)]
    leaves.values.update({name: leaves.values[name].getvalue() for name in streams})
    training, why = _Training.of(leaves)
    if training is not None:
        return training.source(path, what, files)
    aliases = dict(_same_places(leaves.tensors))
    tensors = [(PARAM, name, name) for name in leaves.tensors if name not in aliases]
    tree = {PATHS: packed_paths(leaves.paths.values()), RANKS: {}, OWN: [], STREAMS: streams}
    missing = () if why is None else (f"a training state that zckpt.restore resumes: {why}",)
    return Source(
        path, f"{what}, a state dict", leaves.ranks, 0, aliases, {STATE_DICT: tree}, leaves.values,
        {"framework": "torch of an unknown version", "mode": "a state dict", "optimizer": "none"}, missing, files,
        lambda rank: _rank_part(leaves, tensors, rank, {}),
    )  # fmt: skip


def _rank_part(leaves: Leaves, tensors: Iterable[tuple[str, str, str]], rank: int, tree: Mapping[str, Any]) -> RankPart:
    """Returns what one rank has. ``tensors``: the part, the name and the leaf of each tensor."""
    fragments = []
    for part, name, leaf in tensors:
        tensor = leaves.tensors[leaf]
        for chunk in tensor.chunks:
            if chunk.rank == rank:
                data, dtype = tensor.elements(leaf, chunk), dtype_name(tensor.dtype, leaf)
                if chunk.span.numel or (0 in tensor.shape and chunk is tensor.chunks[0]):
                    fragments.append(Fragment(part, name, dtype, chunk.span, data=data))
    return RankPart(fragments, {}, tree)


def _same_places(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    """Yields the name of each tensor that is the same range of a file as one before it, and the name of that one."""
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        data = tensor.chunks[0].data
        place = stored_range(data) if isinstance(data, torch.Tensor) and data.is_contiguous() else None
        if place is not None and place.nbytes:
            same = first.setdefault((place, tensor.dtype, tensor.shape), name)
            if same != name:
                yield name, same


@dataclass
class _Training:
    """A model and its optimizer in a state dict."""

    leaves: Leaves
    model: dict[str, str]
    """The leaf of each weight and buffer, by its name in the model."""
    groups: list[dict[str, Any]]
    """The param groups of the optimizer."""
    states: dict[str, dict[str, str]]
    """The leaves of the optimizer's state by the name of the parameter and by key."""
    prefix: Path
    """The path of the model."""
    rest: list[str] = field(default_factory=list)
    """The leaves that belong neither to the model nor to the optimizer."""

    @classmethod
    def of(cls, leaves: Leaves) -> tuple[_Training | None, str | None]:
        """Returns the training state in a state dict. If it has an optimizer and cannot be a training state all the
        same, the result is None, and a phrase that says why."""
        optimizers = _optimizers(leaves)
        if not optimizers:
            return None, None
        if len(optimizers) > 1:
            return None, "it has several optimizers"
        ((path, (groups, states, used)),) = optimizers.items()
        trained = _trained(groups, states)
        if len(set(trained)) != len(trained) or not states.keys() <= set(trained):
            return None, "the param groups of the optimizer do not have each of its parameters once"
        modules: dict[Path, dict[str, str]] = defaultdict(dict)
        for name, leaf_path in leaves.paths.items():
            if name in leaves.tensors and name not in used:
                modules[leaf_path[:-1]][str(leaf_path[-1])] = name
        fits = [prefix for prefix, names in modules.items() if names.keys() >= set(trained)]
        beside = (*path[:-1], "model")
        if not trained or not fits or (len(fits) > 1 and beside not in fits):
            return None, "the optimizer has other names of parameters than the model"
        prefix = fits[0] if len(fits) == 1 else beside
        model = modules[prefix]
        of_model = set(model.values())
        rest = [name for name in leaves.paths if name not in used and name not in of_model]
        divided = [name for name in rest if name in leaves.tensors and leaves.tensors[name].divided]
        divided += [
            leaf
            for name, state in states.items()
            for leaf in state.values()
            if leaf in leaves.tensors
            and leaves.tensors[leaf].divided
            and leaves.tensors[leaf].shape != leaves.tensors[model[name]].shape
        ]
        if divided:
            return None, f"{first_few(divided, 3)} is divided, and no part of a model"
        return cls(leaves, model, groups, states, prefix, rest), None

    def source(self, path: str, what: str, files: Mapping[str, FileState]) -> Source:
        tree, of_moments = self._optimizer()
        trained = dict.fromkeys(_trained(self.groups, self.states))
        aliases = dict(self._tied(set(trained)))
        untrained = [name for name in self.model if name not in trained and name not in aliases]
        tensors = [(MASTER, name, self.model[name]) for name in trained]
        parts = dict.fromkeys(part for part, *_ in of_moments)
        tensors += [row for part in parts for row in of_moments if row[0] == part]
        tensors += [(PARAM, name, self.model[name]) for name in untrained]
        missing = [_RNG] + [_OPTIMIZER] * (tree["class"] is None) + [_BUFFERS] * bool(untrained)
        scheduler, client_state = self._others()
        missing += [_SCHEDULER] * (scheduler is not None)
        if self.prefix:
            extra = [name for name in self.rest if self.leaves.paths[name][:-1] == self.prefix]
            missing += [f"{name}, which a module has added to its state_dict: it is no tensor" for name in extra]
        step = self._step(tree)
        state = {
            "counters": {name: step if name == "global_steps" else 0 for name in COUNTERS}, "optimizer": tree,
            "scheduler": None if scheduler is None else {"class": None, "state": scheduler},
        }  # fmt: skip
        description = {
            "framework": "torch of an unknown version", "mode": what, "optimizer": tree["class"] or "unknown"
        }  # fmt: skip
        return Source(
            path, f"{what}, a training state", self.leaves.ranks, step, aliases, state, client_state, description,
            tuple(missing), files, lambda rank: _rank_part(self.leaves, tensors, rank, tree),
        )  # fmt: skip

    def _optimizer(self) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
        """Returns what ``optimizer.capture`` returns for the live optimizer, and the part, the name and the leaf of
        each moment."""
        leaves, flats, of_moments = self.leaves, [], []
        live_states: dict[torch.Tensor, dict[str, Any]] = {}
        for number, group in enumerate(self.groups):
            for name in _trained([group], self.states):
                weight = leaves.tensors[self.model[name]]
                master = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                flat = FlatBuffer(number, (ParameterRange(name, all_of(weight.shape), 0),), master, whole=True)
                state = {key: self._of_state(leaf, weight) for key, leaf in self.states.get(name, {}).items()}
                of_moments += [(part, name, self.states[name][part]) for part in moments(flat, state)]
                state = {key: value if key in moments(flat, state) else _read(value) for key, value in state.items()}
                live_states[master] = state
                flats.append(flat)
        kind = self._class()
        live: Any = type(kind or "unknown", (), {})()
        live.param_groups, live.state = self.groups, live_states
        return {**optimizer.capture(live, flats), "class": kind}, of_moments

    def _of_state(self, leaf: str, weight: StoredTensor) -> Any:
        """Returns an entry of the optimizer's state. What has the shape of the weight has no values."""
        tensor = self.leaves.tensors.get(leaf)
        if tensor is not None and tensor.shape == weight.shape and len(tensor.shape):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return self.leaves.whole(leaf)

    def _class(self) -> str | None:
        """Returns the class of the optimizer if its settings tell it. Adam and AdamW of torch do."""
        of_adam = all(group.keys() >= _ADAM for group in self.groups)
        if not of_adam or not all(_ADAM_STATES.issuperset(state) for state in self.states.values()):
            return None
        decoupled = {bool(group["decoupled_weight_decay"]) for group in self.groups}
        return None if len(decoupled) > 1 else "AdamW" if True in decoupled else "Adam"

    def _tied(self, trained: set[str]) -> Iterator[tuple[str, str]]:
        """Yields the name of each tensor that is not trained and equals one that is, and the name of that one. A tied
        weight is stored under all of its names, and the optimizer has one of them."""
        leaves, of_shape = self.leaves, defaultdict(list)
        for name in trained:
            of_shape[_outline(leaves.tensors[self.model[name]])].append(name)
        for name, leaf in self.model.items():
            if name not in trained and 0 not in leaves.tensors[leaf].shape:
                for other in sorted(of_shape.get(_outline(leaves.tensors[leaf]), ())):
                    if self._equal(leaf, self.model[other]):
                        yield name, other
                        break

    def _equal(self, one: str, other: str) -> bool:
        pair = self.leaves.tensors[one], self.leaves.tensors[other]
        return all(
            values_digest(pair[0].elements(one, a)) == values_digest(pair[1].elements(other, b))
            for a, b in zip(*(tensor.chunks for tensor in pair), strict=True)
        )

    def _others(self) -> tuple[Any, dict[str, Any]]:
        """Returns the state of the scheduler, or None if there is none, and everything else as nested maps."""
        leaves, rest = self.leaves, dict[Path, Any]()
        for name in self.rest:
            if not (self.prefix and leaves.paths[name][:-1] == self.prefix):
                rest[leaves.paths[name]] = leaves.whole(name)
        counted = {path[:-1] for path in rest if path[-1] == "last_epoch" and (*path[:-1], "_step_count") in rest}
        outer = [path for path in counted if path and not any(path[:n] in counted for n in range(len(path)))]
        if len(outer) != 1:
            return None, _nested(rest)
        size = len(outer[0])
        scheduler = {path[size:]: value for path, value in rest.items() if path[:size] == outer[0]}
        return _nested(scheduler), _nested({path: value for path, value in rest.items() if path[:size] != outer[0]})

    def _step(self, tree: Mapping[str, Any]) -> int:
        steps = [entry["values"].get("step") for entry in tree["states"]]
        if not any(step is not None for step in steps):
            by_path = {path: name for name, path in self.leaves.paths.items()}
            names = [by_path[path] for path in _STEPS if path in by_path and by_path[path] in self.rest]
            steps = [self.leaves.whole(name) for name in names[:1]]
        return max((int(step) for step in steps if step is not None), default=0)


def _trained(groups: Iterable[Mapping[str, Any]], states: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parameters of an optimizer. A param group also has frozen ones, which have no state."""
    return [name for group in groups for name in group["params"] if not states or name in states]


def _outline(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tuple(chunk.span for chunk in tensor.chunks)


def _read(value: Any) -> Any:
    return with_values(value) if isinstance(value, torch.Tensor) else value


_Optimizer = tuple[list[dict[str, Any]], dict[str, dict[str, str]], set[str]]
"""The param groups of an optimizer, the leaves of its states, and all of its leaves."""


def _optimizers(leaves: Leaves) -> dict[Path, _Optimizer]:
    """Returns the optimizers of a state dict whose states are kept by the names of parameters, by path. Below this path
    are ``param_groups`` and ``state``, as in the ``state_dict`` of an optimizer, or with
    ``flatten_optimizer_state_dict`` the entries ``param_groups.<parameter>.<key>`` and ``state.<parameter>.<key>``."""
    settings: dict[Path, dict[Any, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    states: dict[Path, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name, path in leaves.paths.items():
        kind, number, key = path[-3:] if len(path) > 2 else (None, None, None)
        if kind == "param_groups" and type(number) is int:
            settings[path[:-3]][number][str(key)] = name
        elif kind == "state" and type(number) is str:
            states[path[:-3]][number][str(key)] = name
        elif isinstance(path[-1], str) and path[-1].startswith(("param_groups.", "state.")) and path[-1].count(".") > 1:
            kind, _, below = path[-1].partition(".")
            number, _, key = below.rpartition(".")
            (settings if kind == "param_groups" else states)[path[:-1]][number][key] = name
    found: dict[Path, _Optimizer] = {}
    for path, of_groups in settings.items():
        groups = _groups(leaves, of_groups)
        if groups is not None:
            of_path = {name: dict(of_name) for name, of_name in states.get(path, {}).items()}
            used = {leaf for of in (*of_groups.values(), *of_path.values()) for leaf in of.values()}
            found[path] = groups, of_path, used
    return found


def _groups(leaves: Leaves, of_groups: Mapping[Any, Mapping[str, str]]) -> list[dict[str, Any]] | None:
    """Returns param groups with the names of their parameters, or None if they have no names. Parameters of which each
    has its own settings are in one group if their settings are equal."""
    values = {number: {key: _setting(leaves, leaf) for key, leaf in of.items()} for number, of in of_groups.items()}
    if all(type(number) is int for number in values):
        if sorted(values) != list(range(len(values))):
            return None
        groups = [values[number] for number in range(len(values))]
        named = all(
            isinstance(group.get("params"), list) and all(isinstance(name, str) for name in group["params"])
            for group in groups
        )
        return groups if named else None
    equal: dict[bytes, dict[str, Any]] = {}
    for name, settings in values.items():
        equal.setdefault(fingerprint(settings), {**settings, "params": []})["params"].append(name)
    return list(equal.values())


def _setting(leaves: Leaves, leaf: str) -> Any:
    """Returns a setting of a param group, which may be a tensor, such as a learning rate."""
    if leaf in leaves.tensors and leaves.tensors[leaf].divided:
        raise UnsupportedError(f"{leaf} is a setting of an optimizer, and a tensor that is divided")
    return _read(leaves.whole(leaf))


class _Map(dict[Any, Any]):
    """A map around leaves. A leaf that is a map is none of these."""


def _nested(leaves: Mapping[Path, Any]) -> Any:
    """Returns leaves as nested maps and lists. Raises FormatError for paths that cannot belong to one state dict."""
    root = _Map()
    for path, value in leaves.items():
        place: Any = root
        for key in path[:-1]:
            place = place.setdefault(key, _Map())
            if type(place) is not _Map:
                raise FormatError(f"{path} is below a leaf")
        if path[-1] in place:
            raise FormatError(f"two leaves have the path {path}")
        place[path[-1]] = value
    return _listed(root)


def _listed(tree: _Map) -> Any:
    """Returns a tree with a list in the place of each map whose keys are indices of a list."""
    items = {key: _listed(value) if type(value) is _Map else value for key, value in tree.items()}
    if items and all(type(key) is int for key in items):
        return [items[key] for key in sorted(items)]
    return items
