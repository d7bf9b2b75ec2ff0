"""Reads a folder in DeepSpeed's own format, or a Universal Checkpoint, as a ``Source``. The result is what
``zckpt.write`` would have written from the engine that saved the folder, as far as the files contain it. It is made by
the same functions."""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters import optimizer
from zckpt.adapters.deepspeed.setup import DTYPES, Setup, parallelism
from zckpt.adapters.flats import cut_alone, moments
from zckpt.checkpoint.writing.collect import fingerprint
from zckpt.engines.tensors import dtype_name, plain_name
from zckpt.errors import FormatError, StateError, UnsupportedError
from zckpt.format import names
from zckpt.format.limits import WORLD_SIZE_MAX
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.inventory import BUFFER, EXTRA_STATE, MASTER, PARAM, Fragment
from zckpt.plan.replicas import Share
from zckpt.tools.converting import deepspeed_values, stage_0_names
from zckpt.tools.converting.deepspeed_cuts import INFO, Cuts
from zckpt.tools.converting.deepspeed_division import Division, RunRanks, ranks_of, stages_of
from zckpt.tools.converting.deepspeed_experts import Experts
from zckpt.tools.converting.deepspeed_folder import Coordinates, DeepSpeedFolder, of_type
from zckpt.tools.converting.deepspeed_layers import PipelineLayers
from zckpt.tools.converting.deepspeed_model_states import ModelStates
from zckpt.tools.converting.deepspeed_run import Run
from zckpt.tools.converting.source import RankPart, Source, file_states, values_of
from zckpt.tools.converting.stacked import Stacked
from zckpt.transfer.stored import in_order
from zckpt.transfer.torch_dtypes import torch_name
from zckpt.transfer.values_digest import values_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.adapters.local_tensors import LocalTensor
    from zckpt.tools.converting.deepspeed_values import FlatValues

_MICRO_STEPS = "the counter micro_steps: it is 0, as it is after engine.load_checkpoint"
_RNG = "the random number generators of the ranks"
_SCHEDULER = "the class of the scheduler: zckpt.restore does not check it"
_OPTIMIZER = "the class of the optimizer: zckpt.restore does not check it"
_SCALER = "the values of the loss scaler that DeepSpeed does not save: zckpt.restore leaves those of the engine"
_HIDDEN = "the hidden state of DeepSpeed's Adam for the CPU: zckpt.restore computes it from the number of steps"
_BUFFERS = "the buffers of all ranks but the first, if their values differ"


def read_deepspeed(path: str) -> Source:
    """Reads the folder at ``path``. Raises UnsupportedError for state that zckpt cannot store. Raises MissingFileError,
    FormatError and StorageError."""
    return _Reader(DeepSpeedFolder(path)).source()


class _Reader:
    """Reads one folder. What the conversion of every rank needs is read once and kept."""

    def __init__(self, folder: DeepSpeedFolder) -> None:
        # Each step needs what the steps before it have found out: the experts, the ranks that hold each of them, the
        # layers of a pipeline, the names and shapes of all parameters, and at last how these are divided.
        self._folder = folder
        self._files = file_states(folder.path)
        first = Coordinates(0, 0)
        self._run = Run(folder)
        self._model = self._run.model
        self._file = folder.model_path(first)
        """The path of the file with these model states."""
        with values_of(self._file):
            self._run.refuse_unsupported()
            data_ranks, model_ranks = ranks_of(self._model)
        folder.check_ranks(data_ranks, model_ranks, sum(file.nbytes for file in self._files.values()))
        self._experts = self._read_experts() if "num_experts" in self._model else None
        with values_of(self._file):
            self._ranks = RunRanks(self._model, self._experts)
            cuts = Cuts(self._model.get(INFO), self._ranks.tensor_ranks)
        self._layers = self._read_layers() if self._model["module"] is None else None
        with values_of(self._file):
            self._first = self._states(first)
        shapes = []
        for coordinates in self._of_model_ranks():
            with values_of(folder.model_path(coordinates)):
                shapes.append(self._states(coordinates).shapes)
        with values_of(self._file):
            self._division = Division(self._ranks, cuts, self._experts, self._run.stage, shapes)

    def _of_model_ranks(self) -> list[Coordinates]:
        """Returns the coordinates of the first rank of each rank of model parallelism."""
        return [Coordinates(0, model_rank) for model_rank in range(ranks_of(self._model)[1])]

    def _saved_model(self, coordinates: Coordinates) -> dict[str, Any]:
        """Returns the content of the file with the model states of a rank."""
        return self._model if self._folder.model_path(coordinates) == self._file else self._folder.model(coordinates)

    def _read_experts(self) -> Experts:
        """Returns the experts of all ranks."""
        folder = self._folder
        with values_of(self._file):
            data_ranks, model_ranks = ranks_of(self._model)
            saved = self._run.zero or (self._run.universal if folder.universal else self._model.get("optimizer"))
            stage_ranks = data_ranks * model_ranks // stages_of(self._model)
            experts = Experts(folder, self._model, self._run.groups(saved or {}), stage_ranks)
        for coordinates in self._of_model_ranks():
            with values_of(folder.model_path(coordinates)):
                experts.add(coordinates.model_rank, self._saved_model(coordinates))
        return experts

    def _states(self, coordinates: Coordinates) -> ModelStates:
        """Returns the model states of a rank."""
        own_file = self._folder.partitions_weights
        return self._states_of_file(coordinates if own_file else self._ranks.alike(coordinates))

    @lru_cache(maxsize=1)  # noqa: B019, because there is one reader for each conversion
    def _states_of_file(self, coordinates: Coordinates) -> ModelStates:
        """Returns the same for the first rank that has the same ones. Only the last result is kept, because those of
        all ranks might take too much memory."""
        folder, experts = self._folder, self._experts
        saved = self._saved_model(coordinates)
        if saved["global_steps"] != self._model["global_steps"]:
            steps = f"{saved['global_steps']} and {self._model['global_steps']}"
            raise FormatError(
                f"this file and that of rank 0 are of different steps: {steps}", file=folder.model_path(coordinates),
                hint="put the files of one step into a folder of their own",
            )  # fmt: skip
        if self._layers is not None:
            more, flat_names = self._layers.tensors(coordinates.model_rank), self._flat_names(coordinates)
            return ModelStates(saved, partitions_weights=False, more=more, flat_names=flat_names)
        if experts is None:
            return ModelStates(saved, partitions_weights=folder.partitions_weights)
        expert_rank = self._ranks.expert_rank(coordinates)
        states = ModelStates(
            saved, partitions_weights=folder.partitions_weights,
            more=experts.tensors(expert_rank, coordinates.model_rank, saved),
            name_of=lambda name: experts.global_name(plain_name(name), expert_rank),
        )  # fmt: skip
        experts.check_ep_rank(saved, self._ranks.rank_in_stage(coordinates))
        return states

    def _read_layers(self) -> PipelineLayers:
        """Returns the layers of a pipeline."""
        ranks, names_of_stages = self._ranks, []
        for stage in range(ranks.stages):
            coordinates = Coordinates(0, stage * ranks.tensor_ranks)
            with values_of(self._folder.model_path(coordinates)):
                saved = self._folder.model(coordinates)
                states = ModelStates(saved, partitions_weights=False)
                trained = self._flat_names(coordinates) or states.flat_shapes
                names_of_stages.append({*chain(*trained), *states.buffer_names})
        with values_of(self._file):
            return PipelineLayers(self._folder, names_of_stages, ranks.tensor_ranks)

    @lru_cache(maxsize=WORLD_SIZE_MAX)  # noqa: B019, because there is one reader for each conversion
    def _flat_names(self, coordinates: Coordinates) -> list[list[str]]:
        """Returns the names of the parameters of each flat buffer of a stage of a pipeline, if it was without ZeRO. In
        bf16, its optimizer is partitioned too. The result is empty with ZeRO, and then the model states have them."""
        if self._model.get("param_shapes") is not None:
            return []
        if not self._folder.has_optimizer_files:
            raise UnsupportedError(
                "it was written by a pipeline without ZeRO, and does not tell which parameters each stage has",
                hint=stage_0_names.HINT,
            )
        names: list[dict[str, None]] = []
        for data_rank in range(self._ranks.data_ranks):
            zero = self._folder.zero(Coordinates(data_rank, coordinates.model_rank))
            mappings = of_type(zero, "param_slice_mappings", list)
            names = names or [{} for _ in mappings]
            for of_flat, mapping in zip(names, mappings, strict=True):
                of_flat.update(dict.fromkeys(map(plain_name, mapping)))
        return list(map(list, names))

    def source(self) -> Source:
        first = self.rank(0)
        with values_of(self._file):
            return self._source(first)

    @cached_property
    def _representatives(self) -> list[Coordinates]:
        """One rank of each set of ranks that hold the same local tensors (``RunRanks.alike``), or rank 0 alone if all
        ranks have tensors of the same names."""
        ranks = self._ranks
        first_ones = map(ranks.alike, map(ranks.coordinates, range(ranks.world_size if ranks.names_differ else 1)))
        return list(dict.fromkeys(first_ones))

    @cached_property
    def _joined(self) -> tuple[dict[str, Any], dict[Coordinates, bytes]]:
        """The optimizer's tree of all ranks, if these have tensors of other names, and the digest of the tree of each
        of ``_representatives``."""
        trees = []
        for coordinates in self._representatives:
            with values_of(self._folder.optimizer_path(coordinates)):
                trees.append(self._read_optimizer(coordinates)[1])
        digests = dict(zip(self._representatives, map(fingerprint, trees), strict=True))
        return optimizer.joined(trees, leave_out=False) if all(trees) else {}, digests

    def _of_modules(self) -> tuple[dict[str, str], list[str], list[str], list[str]]:
        """Returns of the modules of all ranks: the aliases, the names of extra state, those of values that are no
        tensors, and those of buffers that are not in the files."""
        aliases: dict[str, str] = {}
        names: tuple[dict[str, None], ...] = ({}, {}, {})
        for coordinates in self._representatives:
            with values_of(self._folder.model_path(coordinates)):
                states = self._states(coordinates)
                aliases = states.aliases | aliases
                for known, more in zip(names, (states.extra, states.other_values, states.lost_buffers), strict=True):
                    known.update(dict.fromkeys(more))
        extra, others, lost = map(list, names)
        return aliases, sorted(extra), others, lost

    def _source(self, first: RankPart) -> Source:
        folder, model = self._folder, self._model
        setup = self._setup()
        state: dict[str, Any] = {"counters": self._run.counters(), "deepspeed": setup.tree()}
        aliases, extra, others, lost = self._of_modules()
        if extra:
            state[EXTRA_STATE] = extra
        client_state, missing = self._first.client_state, [_MICRO_STEPS, _RNG]
        optimizer_class = None
        if first.optimizer:
            optimizer_class = first.optimizer["class"]
            scheduler, saved = self._run.scheduler(), self._run.scaler_tree(self._first.weights)
            state |= {"optimizer": first.optimizer, "scaler": saved, "scheduler": scheduler}
            missing += [_OPTIMIZER] if optimizer_class is None else []
            missing += [_HIDDEN] if optimizer_class is None or optimizer_class in optimizer.DEEPSPEED_CLASSES else []
            missing += [_SCHEDULER] if scheduler is not None and scheduler["class"] is None else []
            missing += [_SCALER] if saved is not None else []
        if self._first.buffers and not folder.partitions_weights and self._ranks.world_size > 1:
            missing.append(_BUFFERS)
        missing += [f"{name}, which a module has added to its state_dict: it is no tensor" for name in others]
        missing += [f"{BUFFER}/{name}: DeepSpeed did not save it" for name in lost]
        missing += [f"{PARAM}/{name}: DeepSpeed had it on NVMe and did not save it" for name in sorted(self._not_saved)]
        what = "Universal Checkpoint" if folder.universal else "DeepSpeed checkpoint"
        mode = f"ZeRO stage {setup.stage}"
        expert_ranks = 1 if self._experts is None else self._experts.ranks
        divided = parallelism(tensor=self._ranks.tensor_ranks, pipeline=self._ranks.stages, experts=expert_ranks)
        description = {
            "framework": f"DeepSpeed {model.get('ds_version', 'of an unknown version')}", "mode": mode, **divided,
            "optimizer": "none" if not first.optimizer else optimizer_class or "unknown",
        }  # fmt: skip
        return Source(
            folder.path, f"{what}, {mode}", self._ranks.world_size, state["counters"]["global_steps"],
            aliases, state, client_state, description, tuple(missing), self._files, self.rank,
        )  # fmt: skip

    def rank(self, rank: int) -> RankPart:
        """Reads what one rank has."""
        folder, division, ranks = self._folder, self._division, self._ranks
        coordinates = ranks.coordinates(rank)
        with values_of(folder.model_path(coordinates)):
            states = self._states(coordinates)
            local_tensors = division.local_tensors(coordinates, states.shapes)
        with values_of(folder.optimizer_path(coordinates)):
            flat_values, tree, bound = self._read_optimizer(coordinates)
            if self._experts is not None:
                expert_rank, model_rank = ranks.expert_rank(coordinates), coordinates.model_rank
                self._experts.check_values(flat_values, states.weights, local_tensors, expert_rank, model_rank)
            if ranks.names_differ:
                joined, digests = self._joined
                if fingerprint(tree) != digests[ranks.alike(coordinates)]:
                    raise StateError(
                        f"the optimizer of rank {rank} has other settings or scalars than that of a rank with the same "
                        "parameters", key="optimizer", rank=rank,
                    )  # fmt: skip
                tree = joined
            in_flats = division.whole_tensors(coordinates, states.shapes) if folder.universal else local_tensors
            of_flats = self._of_flats(flat_values, in_flats)
            # The same ranks hold the two halves of a tensor of AutoEP.
            stored = {local.stored_as or name: local for name, local in in_flats.items()}
            held = [(fragment, stored[fragment.name]) for fragment in of_flats]
        with values_of(folder.model_path(coordinates)):
            trained = {name for values in flat_values for name in values.flat.names}
            if self._experts is not None:
                for reason in self._experts.auto.unsupported(trained):
                    raise UnsupportedError(reason)
            held += self._frozen(states, local_tensors, trained)
            fragments = [fragment for fragment, local in held if local.writes_partition]
            replicas = [
                (_elements(local, fragment), fragment) for fragment, local in held if local.partition_replicated
            ]
            first_client_state, client_state = self._first.client_state, states.client_state
            own_file = ranks.alike(coordinates) == coordinates or folder.partitions_weights
            if own_file:
                fragments += self._own_buffers(states, rank)
        rank_state: dict[str, Any] = {"optimizer": bound} if bound else {}
        if rank and own_file and fingerprint(client_state) != fingerprint(first_client_state):
            rank_state[names.CLIENT_STATE] = client_state
        return RankPart(fragments, rank_state, tree, replicas, ranks.name_of(coordinates))

    def _saved_optimizer(self, coordinates: Coordinates) -> Mapping[str, Any] | None:
        """Returns what was saved of the optimizer of a rank, or None if there is no optimizer."""
        if self._folder.universal:
            return self._run.universal
        if self._folder.has_optimizer_files:
            return self._run.zero if coordinates == Coordinates(0, 0) else self._folder.zero(coordinates)
        if self._experts is not None:
            return self._folder.expert_optimizer(self._ranks.expert_rank(coordinates), coordinates.model_rank)
        saved = self._states(coordinates).saved
        return None if saved.get("optimizer") is None else of_type(saved, "optimizer", dict)

    def _read_optimizer(
        self, coordinates: Coordinates
    ) -> tuple[list[FlatValues], dict[str, Any], list[dict[str, Any]]]:
        """Returns the flat buffers of a rank, and what ``optimizer.capture`` and ``optimizer.capture_bound`` return for
        its optimizer."""
        saved = self._saved_optimizer(coordinates)
        if saved is None:
            return [], {}, []
        flat_values, groups = list(self._flats(saved, coordinates)), self._run.groups(saved)
        optimizer_class, inner_class = self._run.optimizer_class(groups)
        live: Any = type(optimizer_class or "unknown", (), {})()
        live.param_groups, live.state = groups, {values.flat.master: values.state for values in flat_values}
        if inner_class is not None:
            live.aux_optimizer = type(inner_class, (), {})()
        flats = [values.flat for values in flat_values]
        tree = {**optimizer.capture(live, flats), "class": optimizer_class}
        return flat_values, tree, optimizer.capture_bound(live, flats)

    def _flats(self, saved: Mapping[str, Any], coordinates: Coordinates) -> Iterator[FlatValues]:
        """Yields the flat buffers of a rank. ``saved``: what was saved of its optimizer."""
        folder, division, states = self._folder, self._division, self._states(coordinates)
        local_tensors = division.local_tensors(coordinates, states.shapes)
        if folder.universal:
            inner = saved.get("optimizer_state_dict")
            step = inner["state"].get(0, {}).get("step") if isinstance(inner, dict) else None
            whole_tensors = division.whole_tensors(coordinates, states.shapes)
            own_name = str if self._experts is None else self._experts.own_name
            yield from deepspeed_values.universal(
                folder, self._run.groups(saved), states.flat_shapes, whole_tensors, own_name, step
            )
        elif self._run.stage == 3:
            rank = self._ranks.rank(coordinates) if division.tells_order else None
            yield from deepspeed_values.stage_3(saved, states.flat_shapes, local_tensors, folder, rank)
        elif self._run.stage:
            offload = self._run.offloads("optimizer")
            yield from deepspeed_values.stages_1_and_2(saved, states.flat_shapes, local_tensors, offload=offload)
        else:
            names_of_groups = self._names_at_stage_0(self._ranks.alike(coordinates))
            yield from deepspeed_values.stage_0(saved, states.weights, names_of_groups, local_tensors)

    @lru_cache(maxsize=WORLD_SIZE_MAX)  # noqa: B019, because there is one reader for each conversion
    def _names_at_stage_0(self, coordinates: Coordinates) -> list[list[str]]:
        """Returns the names of the parameters of each param group of an optimizer of stage 0."""
        saved, weights = self._saved_optimizer(coordinates), self._states(coordinates).weights
        experts = set() if self._experts is None else set(filter(self._experts.is_expert, weights))
        return [] if saved is None else deepspeed_values.names_at_stage_0(saved, weights, experts)

    def _of_flats(self, flat_values: list[FlatValues], local_tensors: Mapping[str, LocalTensor]) -> Iterator[Fragment]:
        """Yields the fragments of the master weights and moments of one rank, part by part."""
        parts = {MASTER: None}
        for values in flat_values:
            parts |= dict.fromkeys([*values.flat.files, *moments(values.flat, values.state)])
        tier = Tier.HOST if self._run.offloads("optimizer") else Tier.DEVICE
        for part in parts:
            for values in flat_values:
                data = values.data(part)
                if isinstance(data, Stacked):
                    fragments = values.flat.fragments(part, values.dtype(part), tier=tier)
                    yield from data.fill(fragments, local_tensors[values.flat.names[0]].span)
                    continue
                if isinstance(data, torch.Tensor):
                    data = in_order(data)
                if data is not None:
                    yield from values.flat.fragments(part, values.dtype(part), data, tier)

    def _frozen(
        self, states: ModelStates, local_tensors: Mapping[str, LocalTensor], trained: set[str]
    ) -> Iterator[tuple[Fragment, LocalTensor]]:
        """Yields this rank's elements of the weights that have no master weights, and the local tensors that they
        belong to. ``trained``: the names of the parameters that have master weights."""
        tier = Tier.HOST if self._run.offloads("param") else Tier.DEVICE
        partitioned = self._folder.partitions_weights
        for name, data in (states.frozen_fragments if partitioned else states.weights).items():
            local = local_tensors[name]
            held, owners = local.span, local.owners
            if name in trained or name in self._not_saved:
                continue
            if partitioned:
                span, first = cut_alone(name, held, owners.rank, owners.size).span, 0
            else:
                span = Share(owners.rank, owners.size).of(held)
                first = span.start - held.start
            if span.numel or (owners.rank == 0 and not held.grid.numel):
                dtype = dtype_name(data.dtype, PARAM, name)
                fragment = Fragment(PARAM, local.stored_as or name, dtype, span, tier)
                if isinstance(data, Stacked):
                    yield from ((filled, local) for filled in data.fill([fragment], held))
                    continue
                elements = in_order(data.detach()).view(-1)[first : first + span.numel]
                yield fragment._replace(data=elements), local

    def _own_buffers(self, states: ModelStates, rank: int) -> Iterator[Fragment]:
        """Yields a fragment for each buffer on rank 0. On another rank, yields a fragment for each buffer whose values
        differ from those of rank 0."""
        for name, buffer in states.buffers.items():
            data = in_order(buffer.detach()).view(-1)
            first_digest = self._first.buffer_digests.get(name)
            if rank == 0 or first_digest is None or values_digest(data) != first_digest:
                dtype = dtype_name(data.dtype, BUFFER, name)
                if data.numel() or rank == 0:
                    yield Fragment(BUFFER, name, dtype, all_of(buffer.shape), copy=rank, data=data)

    def _setup(self) -> Setup:
        """Returns the settings, as an adapter does for a live engine. They are those that were saved."""
        config, model = self._run.config, self._model
        zero = config.get("zero_optimization")
        zero = zero if isinstance(zero, dict) else {}
        dtypes = {name: torch_name(weight.dtype) for name, weight in self._first.weights.items()}
        dtype = next((name for name in dtypes.values() if name in DTYPES.values()), "float32")
        accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
        saved = model.get("optimizer")
        unwrapped = isinstance(saved, dict) and "optimizer_state_dict" not in saved and self._run.stage == 0
        # In bf16, the optimizer of a pipeline without ZeRO is partitioned as at stage 1.
        stage = 0 if self._layers is not None and model.get("param_shapes") is None else self._run.stage
        return Setup(
            stage=stage, dtype=dtype, grad_accum_dtype=DTYPES.get(str(accumulated), dtype),
            gradient_clipping=float(config.get("gradient_clipping", 1.0)),  # 1.0 is DeepSpeed's own default.
            sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
            round_robin_gradients=bool(zero.get("round_robin_gradients", False)),
            parameter_alignment=bool(zero.get("parameter_alignment", False)),
            cpu_offload=self._run.offloads("optimizer") and zero["offload_optimizer"]["device"] == "cpu",
            other_dtypes={name: other for name, other in dtypes.items() if other != dtype},
            groups=self._names_at_stage_0(Coordinates(0, 0)) if saved and unwrapped else None,
            divided=self._ranks.names_differ or (self._experts is not None and self._experts.auto.any),
            own_names={} if self._experts is None else self._experts.auto.own_names,
        )  # fmt: skip

    @cached_property
    def _not_saved(self) -> set[str]:
        """The names of the frozen weights whose values are not in the files."""
        return self._first.not_saved(self._ranks.data_ranks)


def _elements(local: LocalTensor, fragment: Fragment) -> str:
    """Returns the name of the elements that a local tensor holds, for people. ``fragment``: a part of them."""
    whole = local.span.numel == local.span.grid.numel
    return fragment.key if whole else f"{fragment.key} from element {local.span.start} on"
