"""The files of a folder in DeepSpeed's own format, as trees, planned from a checkpoint for any stage and world size.

Where DeepSpeed keeps each parameter, the functions of deepspeed_flats.py say; what each flat's scalars are is looked up
as in a restore. The trees have ``View`` where DeepSpeed's have tensors (torch_file.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from zckpt.converting.deepspeed_flats import flats, natural_order, offsets_of, partition, round_robin
from zckpt.converting.deepspeed_folder import STOCK
from zckpt.converting.torch_file import Instance, Source, Storage, TorchFile, View
from zckpt.engines.deepspeed import optimizer
from zckpt.engines.deepspeed.restoring import counters_of, subtree
from zckpt.engines.deepspeed.setup import Setup
from zckpt.errors import MismatchError, UnsupportedError, first_few
from zckpt.format import names
from zckpt.state.inventory import BUFFER, MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zckpt.engines.deepspeed.flats import Flat
    from zckpt.listing.contents import TensorInfo
    from zckpt.reading.checkpoint import Checkpoint

DEEPSPEED_VERSION = "0.19.8"
"""Whose layout is written, and which the files name."""
SCALERS = "deepspeed.runtime.fp16.loss_scaler"
HYSTERESIS = 2
"""DeepSpeed's default for ``fp16.hysteresis``."""


@dataclass(frozen=True)
class FolderPlan:
    """The files of a folder as trees. Raises what ``to_deepspeed`` raises of a checkpoint that does not fit."""

    checkpoint: Checkpoint
    stage: int | None
    world_size: int | None

    @cached_property
    def source(self) -> Setup:
        engine = self._engine
        if "deepspeed" not in engine or engine.get("optimizer") is None or MASTER not in self.checkpoint.parts:
            raise UnsupportedError(
                "only the state of a training run with DeepSpeed becomes a folder in its format; this checkpoint has "
                f"the parts {', '.join(self.checkpoint.parts) or 'of nothing'}",
                file=self.checkpoint.path,
                hint="restore it into an engine and write that, or export the weights",
            )
        return Setup.of(engine["deepspeed"])

    @cached_property
    def setup(self) -> Setup:
        """Of the engines that will load the folder."""
        stage = self.source.stage if self.stage is None else self.stage
        if stage not in range(4):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
        return replace(self.source, stage=stage)

    @cached_property
    def ranks(self) -> int:
        ranks = self.checkpoint.world_size if self.world_size is None else self.world_size
        if ranks < 1:
            raise ValueError(f"world_size must be 1 or more, got {ranks!r}")
        return ranks

    def files(self) -> Iterator[tuple[str, TorchFile]]:
        """Each file with its name, planned when it is asked for."""
        setup = self.setup
        for rank in range(self.ranks if setup.stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if setup.stage == 3 else ""
            yield f"{prefix}mp_rank_00_model_states.pt", TorchFile.of(self._model_states(rank))
        prefix = "bf16_" if setup.dtype == "bfloat16" else ""
        for rank in range(self.ranks if setup.stage else 0):
            file = TorchFile.of(self._optim_states(rank))
            yield f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", file

    def missing(self) -> tuple[str, ...]:
        """What the folder does not have."""
        checkpoint, setup, found = self.checkpoint, self.setup, []
        first = checkpoint.rank_state(0) or {}
        if first.get("rng") is not None:
            found.append("the state of the random number generators: DeepSpeed's format has no place for it")
        if self._saved.optimizer_class in optimizer.INTERCHANGEABLE:
            found.append(
                "the running products that DeepSpeed's Adam for the CPU keeps in C++: DeepSpeed computes them anew, so "
                "that what it updates on the CPU may differ in the last bit from a run that never stopped"
            )
        local = [key for key, info in checkpoint.items() if info.part == BUFFER and len(_copies(info)) > 1]
        if local and (setup.stage < 3 or not self._same_ranks):
            kept = "rank 0's" if setup.stage < 3 else "rank 0's, or that of the same rank,"
            found.append(f"values of ranks of their own of {first_few(local, 3)}: {kept} is kept")
        if names.CLIENT_STATE in first and (setup.stage < 3 or not self._same_ranks):
            found.append("client_state of ranks other than 0")
        reserved = sorted(STOCK.intersection(map(str, self._client_state(0))))
        if reserved:
            found.append(f"client_state of the keys {', '.join(reserved)}, which DeepSpeed uses itself")
        if self._hysteresis_is_assumed:
            found.append(
                f"the loss scaler's hysteresis, which only ZeRO has: DeepSpeed's default, {HYSTERESIS}, is there"
            )
        return tuple(found)

    # Trees

    def _model_states(self, rank: int) -> dict[str, Any]:
        engine, setup = self._engine, self.setup
        counters = counters_of(engine)
        scheduler = engine.get("scheduler")
        frozen = {name: self._shapes[name] for name in self._masterless}
        return {
            "module": OrderedDict(self._module(rank)),
            "buffer_names": [*self._named(BUFFER), *self._aliases(BUFFER)],
            "optimizer": None if setup.stage else self._stage_0(),
            "param_shapes": self._param_shapes() if setup.stage else None,
            "frozen_param_shapes": OrderedDict(_sizes(frozen)) if setup.stage >= 2 else None,
            "shared_params": self._aliases(PARAM) if setup.stage else None,
            "frozen_param_fragments": OrderedDict(self._frozen(rank)) if setup.stage >= 2 else None,
            "lr_scheduler": None if scheduler is None else dict(subtree(scheduler, "state")),
            "data_sampler": None,
            "random_ltd": None,
            **{name: counters[name] for name in ("skipped_steps", "global_steps", "global_samples")},
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": DEEPSPEED_VERSION,
            **{key: value for key, value in self._client_state(rank).items() if key not in STOCK},
        }

    def _optim_states(self, rank: int) -> dict[str, Any]:
        setup, flats = self.setup, self._flats(rank)
        masters = [self._storage(MASTER, flat) for flat in flats]
        inner = self._optimizer_state(flats, rank)
        state: dict[str, Any] = {} if setup.bf16_optimizer else self._zero_scaler()
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
            lean = [min(max(end - rank * one.numel, 0), one.numel) for one, end in zip(masters, ends, strict=True)]
            state |= {
                "zero_stage": setup.stage,
                "clip_grad": setup.gradient_clipping,
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": [
                    View(master, (count,)) for master, count in zip(masters, lean, strict=True)
                ],
                "group_paddings": [master.numel - count for master, count in zip(masters, lean, strict=True)],
                "param_alignment_paddings": [paddings for _, paddings, _ in layouts],
                "partition_count": [self.ranks] * len(flats),
                "ds_version": DEEPSPEED_VERSION,
                "param_slice_mappings": [self._slices(flat) for flat in flats],
            }
        return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": DEEPSPEED_VERSION}

    def _stage_0(self) -> dict[str, Any]:
        """The state of the optimizer, and of its wrapper if there is one."""
        flats = self._flats(0)
        inner = self._optimizer_state(flats, 0)
        if self._wrapping == "none":
            return inner
        masters: list[list[View]] = [[] for _ in self._groups]
        for flat in flats:
            masters[flat.group].append(View(self._storage(MASTER, flat), tuple(flat.master.shape)))
        if self._wrapping == "parameter":
            return {**self._stage_0_scaler(), "optimizer_state_dict": inner, "fp32_groups": masters}
        return {
            **(self._stage_0_scaler() if self.setup.dtype == "float16" else {}),
            "optimizer_state_dict": inner,
            "fp32_groups_flat": [own[0] if own else View(Storage(torch.float32, 0), (0,)) for own in masters],
            "clip_grad": self.setup.gradient_clipping,
        }

    def _optimizer_state(self, flats: Sequence[Flat], rank: int) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict`` of one rank. Raises MismatchError as a restore would."""
        saved, against = self._saved_of(rank), list[str]()
        numbers, members = self._numbers(flats)
        states: dict[int, dict[str, Any]] = {}
        for number, flat in zip(numbers, flats, strict=True):
            group = self._groups[flat.group]
            counts_together = self._wrapping == "none" and self._is_adam and len(group) > 1
            state, problems = saved.state(flat, saved.together(group) if counts_together else None)
            against += problems
            moments = {part: View(self._storage(part, flat), flat.moment_shape(part)) for part in state.moments}
            if state.values or moments:
                # What is one object in a tree is one object when it is read back: no two flats may count in one tensor.
                states[number] = {**deepcopy(state.values), **moments}
        groups = []
        for number, (group, own) in enumerate(zip(self._groups, members, strict=True)):
            settings, problems = saved.settings(group, ()) if group else (saved.groups[number], [])
            against += problems
            groups.append({**settings, "params": own})
        if against:
            raise MismatchError(
                f"the checkpoint does not fit ZeRO stage {self.setup.stage} on {self.ranks} ranks: "
                + first_few(against, 5),
                file=self.checkpoint.path,
                hint="convert it for the stage and the number of ranks of the run",
            )
        return {"state": states, "param_groups": groups}

    def _numbers(self, flats: Sequence[Flat]) -> tuple[list[int], list[list[int]]]:
        """The numbers by which torch's ``state_dict`` calls the flats, and those of each param group. Where frozen
        parameters stand in the optimizer too, they are counted."""
        if self._wrapping == "none" and self.setup.groups is not None:
            named = {name: n for n, name in enumerate(name for group in self.setup.groups for name in group)}
            return [named[flat.names[0]] for flat in flats], [[named[name] for name in g] for g in self.setup.groups]
        if self._wrapping == "group":
            return [flat.group for flat in flats], [[number] for number in range(len(self._groups))]
        members: list[list[int]] = [[] for _ in self._groups]
        for number, flat in enumerate(flats):
            members[flat.group].append(number)
        return list(range(len(flats))), members

    def _module(self, rank: int) -> Iterator[tuple[str, View]]:
        """The module's state dict. Stage 3 has parameters without elements there: they are in the other files."""
        weights = {**dict.fromkeys(self._named(MASTER), MASTER), **dict.fromkeys(self._masterless, PARAM)}
        found = {name: self._weight(part, name) for name, part in weights.items()}
        for name in self._named(BUFFER):
            info = self.checkpoint[f"{BUFFER}/{name}"]
            found[name] = _whole(info.key, info.dtype, info.shape, rank if self._same_ranks else None)
        yield from found.items()
        for alias, name in self.checkpoint.aliases.items():
            if name in found:
                yield alias, found[name]

    def _weight(self, part: str, name: str) -> View:
        """In the dtype that the model computes with: DeepSpeed rounds masters to it, too."""
        info = self.checkpoint[f"{part}/{name}"]
        dtype = info.dtype if part == PARAM else getattr(torch, self.setup.other_dtypes.get(name, self.setup.dtype))
        if self.setup.stage == 3:
            return View(Storage(dtype, 0), (0,))
        return _whole(info.key, dtype, info.shape)

    def _frozen(self, rank: int) -> Iterator[tuple[str, View]]:
        """What a rank has of each parameter without a master: at stage 3 its partition, padding and all."""
        for name in self._masterless:
            info = self.checkpoint[f"{PARAM}/{name}"]
            if self.setup.stage == 2:
                yield name, _whole(info.key, info.dtype, info.shape)
                continue
            slot, length = partition(name, info.shape, self.ranks, rank)
            yield name, View(Storage(info.dtype, length, (Source(info.key, slot.start, slot.stop, 0),)), (length,))

    def _param_shapes(self) -> list[OrderedDict[str, torch.Size]]:
        """By flat, in the order in which the parameters lie there."""
        return [OrderedDict(_sizes({slot.name: slot.shape for slot in flat.slots})) for flat in self._flats(0)]

    def _slices(self, flat: Flat) -> OrderedDict[str, Instance]:
        """Where in a flat of stages 1 and 2 this rank's part of each parameter is."""
        name = "deepspeed.utils.tensor_fragment", "fragment_address"
        own = (slot for slot in flat.slots if slot.start < slot.stop)
        return OrderedDict(
            (slot.name, Instance(*name, {"numel": slot.stop - slot.start, "start": slot.offset})) for slot in own
        )

    def _storage(self, part: str, flat: Flat) -> Storage:
        """A flat's masters, or one of its moments. Raises MismatchError where the checkpoint has not all of it."""
        shape = tuple(flat.master.shape) if part == MASTER else flat.moment_shape(part)
        sources, dtypes = [], set()
        for slot in flat.wider.get(part, flat.slots):
            key = f"{part}/{slot.name}"
            if key not in self.checkpoint:
                raise MismatchError("the checkpoint does not have all of the optimizer's state", key=key)
            dtypes.add(self.checkpoint[key].dtype)
            if slot.start < slot.stop:
                sources.append(Source(key, slot.start, slot.stop, slot.offset))
        dtype = next(iter(dtypes), torch.float32)
        return Storage(dtype, math.prod(shape), tuple(sources))

    # The loss scaler

    def _zero_scaler(self) -> dict[str, Any]:
        values = self._scaler_values
        name = "DynamicLossScaler" if values["dynamic"] else "LossScaler"
        wrapper = (self._engine.get("scaler") or {}).get("wrapper", {})
        return {
            "loss_scaler": Instance(SCALERS, name, values),
            "dynamic_loss_scale": values["dynamic"],
            "overflow": bool(wrapper.get("overflow", False)),
        }

    def _stage_0_scaler(self) -> dict[str, Any]:
        values = self._scaler_values
        found = {"dynamic_loss_scale": values["dynamic"], "cur_scale": values["cur_scale"]}
        found["cur_iter"] = values.get("cur_iter", 0)
        if values["dynamic"]:
            found |= {key: values[key] for key in ("last_overflow_iter", "scale_factor", "scale_window")}
        return found

    @cached_property
    def _scaler_values(self) -> dict[str, Any]:
        """The attributes of ZeRO's loss scaler. Without ZeRO, DeepSpeed has some of them under other names."""
        saved = self._engine.get("scaler")
        if saved is None:  # Nothing is scaled in bf16 and fp32.
            return {"cur_scale": 1.0, "dynamic": False}
        values = dict(subtree(saved, "values"))
        if "dynamic" not in values:
            values = {
                **{key: values.get(key) for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor")},
                "scale_window": values.get("scale_window"),
                "min_scale": values.get("min_loss_scale"),
                "dynamic": bool(values.get("dynamic_loss_scale")),
                "delayed_shift": HYSTERESIS,
                "cur_hysteresis": HYSTERESIS,
                "consecutive_hysteresis": False,
                "raise_error_at_min_scale": True,
            }
        return {**values, "dtype": torch.float16} if values["dynamic"] else values

    @property
    def _hysteresis_is_assumed(self) -> bool:
        saved = self._engine.get("scaler")
        return saved is not None and "dynamic" not in saved["values"] and self.setup.stage > 0

    # What the checkpoint has

    @cached_property
    def _engine(self) -> Mapping[str, Any]:
        engine = (self.checkpoint.state or {}).get("engine") if isinstance(self.checkpoint.state, dict) else None
        return engine if isinstance(engine, dict) else {}

    @cached_property
    def _same_ranks(self) -> bool:
        return self.ranks == self.checkpoint.world_size

    @cached_property
    def _saved(self) -> optimizer.Saved:
        return optimizer.Saved(self._engine["optimizer"])

    def _saved_of(self, rank: int) -> optimizer.Saved:
        """With what is bound to the flats of one rank, if there is anything of the kind."""
        tree = self._engine["optimizer"]
        if not (self._same_ranks and optimizer.Saved.has_bound(tree)):
            return self._saved
        return optimizer.Saved(tree, (self.checkpoint.rank_state(rank) or {}).get("optimizer"))

    def _client_state(self, rank: int) -> Mapping[str, Any]:
        own = self.checkpoint.rank_state(rank) if self.setup.stage == 3 and self._same_ranks and rank else None
        found = {**self.checkpoint.state, **(own or {})}.get(names.CLIENT_STATE)
        return found if isinstance(found, dict) else {}

    def _named(self, part: str) -> list[str]:
        return [info.name for info in self.checkpoint.values() if info.part == part]

    @cached_property
    def _masterless(self) -> list[str]:
        trained = set(self._named(MASTER))
        return [name for name in self._named(PARAM) if name not in trained]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for info in self.checkpoint.values() if info.part in (MASTER, PARAM)}

    def _aliases(self, part: str) -> dict[str, str]:
        """The further names of tied buffers, or of tied parameters."""
        of = set(self._named(BUFFER)) if part == BUFFER else self._shapes.keys()
        return {alias: name for alias, name in self.checkpoint.aliases.items() if name in of}

    @cached_property
    def _groups(self) -> list[list[str]]:
        """The names of each param group, in the order in which DeepSpeed will keep them."""
        ranks = self.checkpoint.world_size
        given = [natural_order(group["params"], self.source, ranks) for group in self._saved.groups]
        unknown = [name for group in given for name in group if name not in self._shapes]
        if unknown:
            raise MismatchError(f"the checkpoint does not have the weights of {first_few(unknown, 3)}")
        if self.setup.reorders:
            given = [[group[n] for n in round_robin(range(len(group)), self.ranks)] for group in given]
        return given

    @property
    def _is_adam(self) -> bool:
        return (self._saved.inner_class or self._saved.optimizer_class) in optimizer.INTERCHANGEABLE

    @property
    def _wrapping(self) -> str:
        """What DeepSpeed has one master for: a "partition", or at stage 0 a "group" or a "parameter"; "none" where the
        parameters are the masters."""
        if self.setup.stage:
            return "partition"
        if self.setup.dtype == "float32":
            return "none"
        return "group" if self._saved.optimizer_class in optimizer.INTERCHANGEABLE else "parameter"

    def _flats(self, rank: int) -> list[Flat]:
        muon = [
            bool(group.get("use_muon")) and not (self.setup.cpu_offload or self.setup.bf16_optimizer)
            for group in self._saved.groups
        ]
        flattened = self._wrapping == "group"
        return flats(self._groups, self._shapes, self.setup, self.ranks, rank, muon=muon, flattened=flattened)


def _whole(key: str, dtype: torch.dtype, shape: tuple[int, ...], rank: int | None = None) -> View:
    numel = math.prod(shape)
    return View(Storage(dtype, numel, (Source(key, 0, numel, 0, rank),)), shape)


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Size]]:
    return ((name, torch.Size(shape)) for name, shape in shapes.items())


def _copies(info: TensorInfo) -> set[int]:
    return {piece.copy for piece in info.pieces}
