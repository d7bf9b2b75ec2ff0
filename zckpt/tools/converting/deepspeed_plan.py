"""Plans from a checkpoint, as trees, the files of a folder in DeepSpeed's own format, for any stage and world size.

The functions of deepspeed_flats.py know where DeepSpeed keeps each parameter. The scalars of each flat buffer are
looked up as in a restore. Where DeepSpeed's trees have a tensor, these trees have a ``View`` (torch_file.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from zckpt.adapters import optimizer
from zckpt.adapters.deepspeed.setup import DTYPES, Setup
from zckpt.adapters.flats import cut_alone, partition_numel
from zckpt.adapters.trees import counters_of, subtree
from zckpt.engines.composed import class_of, is_decomposed
from zckpt.engines.contract import without_left_out
from zckpt.errors import MismatchError, UnsupportedError, first_few
from zckpt.format import names
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.inventory import BUFFER, MASTER, PARAM
from zckpt.tools.converting.deepspeed_flats import flats, natural_order, offsets_of, round_robin
from zckpt.tools.converting.deepspeed_folder import STOCK
from zckpt.tools.converting.deepspeed_scaler import SavedScaler
from zckpt.tools.exporting.plan import Extent
from zckpt.tools.exporting.torch_file import Instance, Storage, View, torch_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.adapters.flats import FlatBuffer
    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.checkpoint.reading.loader import Loader
    from zckpt.tools.exporting.plan import OutputFile

DEEPSPEED_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout is written. The files name it as the version that wrote them."""


@dataclass(frozen=True)
class DeepSpeedFolderPlan:
    """Plans the files of a folder as trees. The members raise what ``to_deepspeed`` raises for a checkpoint that does
    not fit."""

    checkpoint: Loader
    stage: int | None
    """The ZeRO stage of the engines that will load the folder. None means the stage of the engine that wrote the
    checkpoint."""
    world_size: int | None
    """The number of ranks that will load the folder. None means the number that wrote the checkpoint."""
    otherwise: ClassVar[str] = "convert it for the stage and the number of ranks of the run"
    """What the errors about optimizer state that does not fit advise the user to do."""

    def __post_init__(self) -> None:
        if self.stage not in (None, 0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if self.world_size is not None and self.world_size < 1:
            raise ValueError(f"world_size must be 1 or more, got {self.world_size!r}")

    @cached_property
    def source(self) -> Setup:
        """The settings of the engine that wrote the checkpoint."""
        engine = self._engine
        if "deepspeed" not in engine and engine.get("optimizer") is not None:
            raise UnsupportedError(
                "this checkpoint was written by PyTorch alone; only the state of a training run with DeepSpeed can "
                "become a folder in DeepSpeed's format",
                file=self.checkpoint.path,
                hint="restore it into an engine of DeepSpeed first, by zckpt.restore(engine, path); then "
                "zckpt.detach(engine).save_checkpoint(...) writes DeepSpeed's own format, and zckpt.write(engine, ...) "
                "a checkpoint that can be converted",
            )
        if "deepspeed" not in engine or engine.get("optimizer") is None or MASTER not in self.checkpoint.parts:
            raise UnsupportedError(
                "only the state of a training run with DeepSpeed can become a folder in DeepSpeed's format; this "
                f"checkpoint has the parts: {', '.join(self.checkpoint.parts) or 'none'}",
                file=self.checkpoint.path,
                hint="restore it into an engine and write that with zckpt.write, or export the weights",
            )
        return Setup.of(engine["deepspeed"])

    @cached_property
    def setup(self) -> Setup:
        """The settings of the engines that will load the folder."""
        if self.source.divided:
            raise UnsupportedError(
                "the state of an engine with AutoEP, or with experts or pipeline stages on several ranks, cannot "
                "become a folder in DeepSpeed's format",
                file=self.checkpoint.path,
                hint="make a Universal Checkpoint of it: to='universal' (--to universal)",
            )
        return self.source if self.stage is None else replace(self.source, stage=self.stage)

    @property
    def target(self) -> str:
        """What the state has to fit, for people."""
        return f"ZeRO stage {self.setup.stage} on {self.ranks} ranks"

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that will load the folder."""
        return self.world_size or self.checkpoint.manifest.world_size

    def files(self) -> Iterator[OutputFile]:
        """Yields the plan of each file, whose tensors are those of ``infos``. A file is planned when it is asked
        for."""
        setup = self.setup
        for rank in range(self.ranks if setup.stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if setup.stage == 3 else ""
            yield torch_file(f"{prefix}mp_rank_00_model_states.pt", self._model_states(rank))
        prefix = "bf16_" if setup.dtype == "bfloat16" else ""
        for rank in range(self.ranks if setup.stage else 0):
            yield torch_file(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", self._optim_states(rank))

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """All tensors of the checkpoint by key, and the copies of buffers that single ranks have, by names that are not
        keys."""
        contents = self.checkpoint.contents
        return {**contents, **{name: contents[name.partition("\n")[0]] for name in self.copies}}

    @cached_property
    def copies(self) -> dict[str, int]:
        """The number ``copy`` of each copy of a buffer that a single rank has, by the name that it has in ``infos``."""
        if not self._same_ranks:
            return {}
        infos = [info for info in self.checkpoint.contents.values() if info.part == BUFFER]
        return {_copy(info.key, piece.rank): piece.copy for info in infos for piece in info.pieces if piece.copy}

    def missing(self) -> tuple[str, ...]:
        """Returns a phrase for each thing that the folder lacks."""
        checkpoint, setup, phrases = self.checkpoint, self.setup, []
        first = checkpoint.rank_state(0) or {}
        if first.get("rng") is not None:
            phrases.append("the state of the random number generators: DeepSpeed's format has no place for it")
        if self._saved.optimizer_class in optimizer.DEEPSPEED_CLASSES:
            phrases.append(
                "the running products that DeepSpeed's Adam for the CPU keeps in C++: DeepSpeed computes them again, "
                "so its updates on the CPU may differ in the last bit from those of a run that never stopped"
            )
        if self._engine.get("data_sampler") is not None:
            phrases.append("the state of the curriculum's sampler")
        if any(file.tier is Tier.NVME for file in checkpoint.manifest.files):
            phrases.append(
                "the offload to NVMe: DeepSpeed loads no such engine right; load the folder with the optimizer on the "
                "device or in CPU memory"
            )
        buffers = [info for info in checkpoint.contents.values() if info.part == BUFFER]
        rank_local = [info.key for info in buffers if len({piece.copy for piece in info.pieces}) > 1]
        if rank_local and (setup.stage < 3 or not self._same_ranks):
            phrases.append(f"the values that ranks other than 0 have of {first_few(rank_local, 3)}")
        if (setup.stage < 3 or not self._same_ranks) and self._any_rank_has(names.CLIENT_STATE):
            phrases.append("the client_state of ranks other than 0")
        if self._any_rank_has(names.CLIENT_RANK_STATE):
            phrases.append("what each rank has of its own: rank_state, and registered objects (client_rank_state)")
        reserved = sorted(STOCK.intersection(map(str, self._client_state(0))))
        if reserved:
            phrases.append(f"the entries {', '.join(reserved)} of client_state: DeepSpeed uses these keys itself")
        if setup.stage and self._scaler.assumed:
            phrases.append(f"{', '.join(self._scaler.assumed)} of the loss scaler: they get DeepSpeed's defaults")
        return tuple(phrases)

    # Trees

    def _model_states(self, rank: int) -> dict[str, Any]:
        """Returns the tree of the file of model states of ``rank``."""
        engine, setup, extra = self._engine, self.setup, self.checkpoint.extra_state
        counters = counters_of(engine)
        scheduler = engine.get("scheduler")
        frozen = {name: self._shapes[name] for name in self._masterless}
        return {
            "module": OrderedDict(self._module(rank)),
            "buffer_names": [name for name in (*self._named(BUFFER), *self._aliases(BUFFER)) if name not in extra],
            "optimizer": None if setup.stage else self._stage_0(),
            "param_shapes": self._param_shapes() if setup.stage else None,
            "frozen_param_shapes": OrderedDict(_sizes(frozen)) if setup.stage >= 2 else None,
            "shared_params": self._aliases(PARAM) if setup.stage else None,
            "frozen_param_fragments": OrderedDict(self._frozen(rank)) if setup.stage >= 2 else None,
            "lr_scheduler": None if scheduler is None else without_left_out(subtree(scheduler, "state")),
            "data_sampler": None,
            "random_ltd": None,
            **{name: counters[name] for name in ("skipped_steps", "global_steps", "global_samples")},
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self._config(),
            "ds_version": DEEPSPEED_VERSION,
            **{key: value for key, value in self._client_state(rank).items() if key not in STOCK},
        }

    def _config(self) -> dict[str, Any]:
        """Returns the settings on which the files depend, for readers other than DeepSpeed. DeepSpeed uses the
        configuration of its own engine."""
        setup = self.setup
        return {
            "zero_optimization": {
                "stage": setup.stage,
                "sub_group_size": setup.sub_group_size,
                "round_robin_gradients": setup.round_robin_gradients,
                "parameter_alignment": setup.parameter_alignment,
                **({"offload_optimizer": {"device": "cpu"}} if setup.cpu_offload else {}),
            },
            "gradient_clipping": setup.gradient_clipping,
            "data_types": {"grad_accum_dtype": next(k for k, v in DTYPES.items() if v == setup.grad_accum_dtype)},
        }

    def _optim_states(self, rank: int) -> dict[str, Any]:
        """Returns the tree of the file of optimizer states of ``rank``."""
        setup, flats = self.setup, self._flats(rank)
        masters = [self._storage(MASTER, flat) for flat in flats]
        inner = self._optimizer_state(flats, rank)
        state: dict[str, Any] = {} if setup.bf16_optimizer else self._scaler.in_zero()
        if setup.stage == 3:
            state |= {
                "zero_stage": 3,
                "partition_count": self.ranks,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": [View(master, (master.numel,)) for master in masters],
            }
        else:
            layouts = [offsets_of([self._shapes[name] for name in group], setup) for group in self._groups]
            ends = [end for *_, end in layouts]
            counts = [
                min(max(end - rank * master.numel, 0), master.numel) for master, end in zip(masters, ends, strict=True)
            ]
            state |= {
                "zero_stage": setup.stage,
                "clip_grad": setup.gradient_clipping,
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": [
                    View(master, (count,)) for master, count in zip(masters, counts, strict=True)
                ],
                "group_paddings": [master.numel - count for master, count in zip(masters, counts, strict=True)],
                "param_alignment_paddings": [paddings for _, paddings, _ in layouts],
                "partition_count": [self.ranks] * len(flats),
                "ds_version": DEEPSPEED_VERSION,
                "param_slice_mappings": [self._slices(flat) for flat in flats],
            }
        return {"optimizer_state_dict": state, "ds_config": self._config(), "ds_version": DEEPSPEED_VERSION}

    def _stage_0(self) -> dict[str, Any]:
        """Returns the state of the optimizer and that of its wrapper, if there is one."""
        flats = self._flats(0)
        inner = self._optimizer_state(flats, 0)
        if self._wrapping == "none":
            return inner
        masters: list[list[View]] = [[] for _ in self._groups]
        for flat in flats:
            masters[flat.group].append(View(self._storage(MASTER, flat), tuple(flat.master.shape)))
        if self._wrapping == "parameter":
            return {**self._scaler.at_stage_0(), "optimizer_state_dict": inner, "fp32_groups": masters}
        return {
            **(self._scaler.at_stage_0() if self.setup.dtype == "float16" else {}),
            "optimizer_state_dict": inner,
            "fp32_groups_flat": [views[0] if views else View(Storage(torch.float32, 0), (0,)) for views in masters],
            "clip_grad": self.setup.gradient_clipping,
        }

    def _optimizer_state(self, flats: Sequence[FlatBuffer], rank: int) -> dict[str, Any]:
        """Returns what ``torch.optim.Optimizer.state_dict`` would return on one rank. Raises MismatchError if a restore
        would raise it."""
        saved, reasons = self._saved_of(rank), list[str]()
        numbers, members = self._numbers(flats)
        states: dict[int, dict[str, Any]] = {}
        for number, flat in zip(numbers, flats, strict=True):
            group = self._groups[flat.group]
            counts_together = self._wrapping == "none" and self._is_adam and len(group) > 1
            state = saved.state(flat, saved.together(group) if counts_together else None)
            if isinstance(state, str):
                reasons.append(state)
                continue
            for key, value in state.values.items():
                if is_decomposed(value):
                    raise UnsupportedError(
                        f"{key} of {first_few(flat.names, 1)} is a {class_of(value)}, which a folder in DeepSpeed's "
                        "format could only have as an object of that class", file=self.checkpoint.path,
                        hint="restore the checkpoint into an engine and call its save_checkpoint",
                    )  # fmt: skip
            moments = {part: View(self._storage(part, flat), flat.moment_shape(part)) for part in state.moments}
            if state.values or moments:
                # An object that is in a tree twice is one object after it is read back. Two flat buffers must not count
                # their steps in the same tensor, so each gets a copy.
                states[number] = {**deepcopy(state.values), **moments}
        groups = []
        for number, (group, numbers_of_group) in enumerate(zip(self._groups, members, strict=True)):
            settings, more_reasons = saved.settings(group, ()) if group else (saved.groups[number], [])
            reasons += more_reasons
            groups.append({**settings, "params": numbers_of_group})
        if reasons:
            raise MismatchError(
                f"the checkpoint does not fit {self.target}: {first_few(reasons, 5)}", file=self.checkpoint.path,
                hint=self.otherwise,
            )  # fmt: skip
        return {"state": states, "param_groups": groups}

    def _numbers(self, flats: Sequence[FlatBuffer]) -> tuple[list[int], list[list[int]]]:
        """Returns the numbers that torch's ``state_dict`` has for the flat buffers, and the numbers of each param
        group. If the optimizer has frozen parameters too, they are counted as well."""
        if self._wrapping == "none" and self.setup.groups is not None:
            groups = self.setup.groups
            numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
            return [numbers[flat.names[0]] for flat in flats], [[numbers[name] for name in group] for group in groups]
        if self._wrapping == "group":
            return [flat.group for flat in flats], [[number] for number in range(len(self._groups))]
        members: list[list[int]] = [[] for _ in self._groups]
        for number, flat in enumerate(flats):
            members[flat.group].append(number)
        return list(range(len(flats))), members

    def _module(self, rank: int) -> Iterator[tuple[str, View]]:
        """Yields the names and tensors of the module's state dict. At stage 3 its parameters have no elements, because
        the elements are in the other files."""
        weights = {**dict.fromkeys(self._named(MASTER), MASTER), **dict.fromkeys(self._masterless, PARAM)}
        views = {name: self._weight(part, name) for name, part in weights.items()}
        for name in self._named(BUFFER):
            info = self.checkpoint.contents[f"{BUFFER}/{name}"]
            copy_name = _copy(info.key, rank)
            views[name] = _whole(copy_name if copy_name in self.copies else info.key, info.dtype, info.shape)
        yield from views.items()
        for alias, name in self.checkpoint.manifest.aliases.items():
            if name in views:
                yield alias, views[name]

    def _weight(self, part: str, name: str) -> View:
        """Returns a weight in the dtype that the model computes with. DeepSpeed too rounds master weights to this
        dtype."""
        info = self.checkpoint.contents[f"{part}/{name}"]
        dtype = info.dtype if part == PARAM else getattr(torch, self.setup.other_dtypes.get(name, self.setup.dtype))
        if self.setup.stage == 3:
            return View(Storage(dtype, 0), (0,))
        return _whole(info.key, dtype, info.shape)

    def _frozen(self, rank: int) -> Iterator[tuple[str, View]]:
        """Yields what a rank has of each parameter without a master weight. At stage 3 that is its partition, with the
        padding."""
        for name in self._masterless:
            info = self.checkpoint.contents[f"{PARAM}/{name}"]
            if self.setup.stage == 2:
                yield name, _whole(info.key, info.dtype, info.shape)
                continue
            parameter_range = cut_alone(name, all_of(info.shape), rank, self.ranks)
            numel = partition_numel(math.prod(info.shape), self.ranks)
            yield name, View(Storage(info.dtype, numel, {0: Extent(info.key, parameter_range.span)}), (numel,))

    def _param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        """Returns for each flat buffer the shapes of its parameters, in the order in which they lie in it."""
        return [
            OrderedDict(
                _sizes({parameter_range.name: parameter_range.span.grid.shape for parameter_range in flat.ranges})
            )
            for flat in self._flats(0)
        ]

    def _slices(self, flat: FlatBuffer) -> OrderedDict[str, Instance]:
        """Returns for each parameter which elements of a flat buffer of stage 1 or 2 are this rank's part of it."""
        module, name = "deepspeed.utils.tensor_fragment", "fragment_address"
        slices: OrderedDict[str, Instance] = OrderedDict()
        for parameter_range in flat.ranges:
            numel = parameter_range.span.numel
            if numel > 0:
                slices[parameter_range.name] = Instance(module, name, {"numel": numel, "start": parameter_range.offset})
        return slices

    def _storage(self, part: str, flat: FlatBuffer) -> Storage:
        """Returns the storage of the master weights of a flat buffer, or of one of its moments. Raises MismatchError if
        the checkpoint does not have all of it."""
        shape = tuple(flat.master.shape) if part == MASTER else flat.moment_shape(part)
        extents, dtypes = {}, set()
        for parameter_range in flat.wider.get(part, flat.ranges):
            key = f"{part}/{parameter_range.name}"
            if key not in self.checkpoint.contents:
                raise MismatchError("the checkpoint does not have all of the optimizer's state", key=key)
            dtypes.add(self.checkpoint.contents[key].dtype)
            if parameter_range.span.numel:
                extents[parameter_range.offset] = Extent(key, parameter_range.span)
        return Storage(next(iter(dtypes), torch.float32), math.prod(shape), extents)

    # What the checkpoint has

    @cached_property
    def _engine(self) -> Mapping[str, Any]:
        """The trees of the engine's state. The result is empty if the checkpoint has none."""
        engine = (self.checkpoint.state or {}).get("engine") if isinstance(self.checkpoint.state, dict) else None
        return engine if isinstance(engine, dict) else {}

    @cached_property
    def _scaler(self) -> SavedScaler:
        return SavedScaler(self._engine.get("scaler"))

    @cached_property
    def _same_ranks(self) -> bool:
        """Whether the folder is for the number of ranks that wrote the checkpoint."""
        return self.ranks == self.checkpoint.manifest.world_size

    @cached_property
    def _saved(self) -> optimizer.Saved:
        return optimizer.Saved(self._engine["optimizer"])

    def _saved_of(self, rank: int) -> optimizer.Saved:
        """Returns the optimizer's tree, together with the values that only the flat buffers of one rank have, if there
        are any."""
        tree = self._engine["optimizer"]
        if not (self._same_ranks and optimizer.Saved.has_bound(tree)):
            return self._saved
        return optimizer.Saved(tree, (self.checkpoint.rank_state(rank) or {}).get("optimizer"))

    def _client_state(self, rank: int) -> Mapping[str, Any]:
        """Returns the ``client_state`` of a rank."""
        rank_state = self.checkpoint.rank_state(rank) if self.setup.stage == 3 and self._same_ranks and rank else None
        client_state = {**self.checkpoint.state, **(rank_state or {})}.get(names.CLIENT_STATE)
        return client_state if isinstance(client_state, dict) else {}

    def _any_rank_has(self, key: str) -> bool:
        """Returns whether the tree of state of any rank has this key. A checkpoint that was converted has no tree of
        rank 0."""
        trees = (self.checkpoint.rank_state(rank, lazy=True) for rank in range(self.checkpoint.manifest.world_size))
        return any(isinstance(tree, dict) and key in tree for tree in trees)

    def _named(self, part: str) -> list[str]:
        """Returns the names of all tensors in a part."""
        return [info.name for info in self.checkpoint.contents.values() if info.part == part]

    @cached_property
    def _masterless(self) -> list[str]:
        """The names of the parameters that have no master weight."""
        trained = set(self._named(MASTER))
        return [name for name in self._named(PARAM) if name not in trained]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by name."""
        return {info.name: info.shape for info in self.checkpoint.contents.values() if info.part in (MASTER, PARAM)}

    def _aliases(self, part: str) -> dict[str, str]:
        """Returns for each other name of a tied buffer, or of a tied parameter, the name under which it is stored."""
        stored = set(self._named(BUFFER)) if part == BUFFER else self._shapes.keys()
        return {alias: name for alias, name in self.checkpoint.manifest.aliases.items() if name in stored}

    @cached_property
    def _groups(self) -> list[list[str]]:
        """The names of each param group, in the order in which DeepSpeed will keep them."""
        ranks = self.checkpoint.manifest.world_size
        groups = [natural_order(group["params"], self.source, ranks) for group in self._saved.groups]
        unknown = [name for group in groups for name in group if name not in self._shapes]
        if unknown:
            raise MismatchError(f"the checkpoint does not have the weights of {first_few(unknown, 3)}")
        if self.setup.reorders:
            groups = [[group[n] for n in round_robin(range(len(group)), self.ranks)] for group in groups]
        return groups

    @property
    def _is_adam(self) -> bool:
        return (self._saved.inner_class or self._saved.optimizer_class) in optimizer.DEEPSPEED_CLASSES

    @property
    def _wrapping(self) -> str:
        """What one tensor of master weights covers in DeepSpeed. From stage 1 on it is "partition". At stage 0 it is
        "group" or "parameter", or "none" if the parameters themselves are the master weights."""
        if self.setup.stage:
            return "partition"
        if self.setup.dtype == "float32":
            return "none"
        return "group" if self._saved.optimizer_class in optimizer.DEEPSPEED_CLASSES else "parameter"

    def _flats(self, rank: int) -> list[FlatBuffer]:
        muon = [
            bool(group.get("use_muon")) and not (self.setup.cpu_offload or self.setup.bf16_optimizer)
            for group in self._saved.groups
        ]
        flattened = self._wrapping == "group"
        return flats(self._groups, self._shapes, self.setup, self.ranks, rank, muon=muon, flattened=flattened)


def _whole(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
    extent = Extent(name, all_of(shape))
    return View(Storage(dtype, extent.span.numel, {0: extent}), shape)


def _copy(key: str, rank: int) -> str:
    """Returns the name in ``DeepSpeedFolderPlan.infos`` of a rank's own copy of a tensor: the key, a line break, which
    no key contains, and the rank."""
    return f"{key}\n{rank}"


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Size]]:
    return ((name, torch.Size(shape)) for name, shape in shapes.items())
