"""Reads a folder in DeepSpeed's own format, or a Universal Checkpoint, as a ``Source``. The result is what
``zckpt.write`` would have written from the engine that saved the folder, as far as the files contain it. It is made by
the same functions."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zckpt.converting import deepspeed_values
from zckpt.converting.deepspeed_folder import STOCK, DeepSpeedFolder, of_type
from zckpt.converting.source import RankPart, Source, file_states, values_of
from zckpt.engines import optimizer
from zckpt.engines.deepspeed import scaler
from zckpt.engines.deepspeed.setup import DTYPES, Setup
from zckpt.engines.flats import cut_alone, moments
from zckpt.engines.group import RankGroup
from zckpt.engines.tensors import dtype_name, plain_name
from zckpt.errors import FormatError, UnsupportedError
from zckpt.format import names
from zckpt.format.limits import NDIM_MAX, TENSOR_BYTES_MAX, WORLD_SIZE_MAX
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.replicas import Share
from zckpt.state.inventory import BUFFER, EXTRA_STATE, MASTER, PARAM, Fragment, unconverted
from zckpt.transfer.stored import in_order, stored_range, values_digest
from zckpt.transfer.torch_dtypes import torch_name
from zckpt.writing.collect import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.converting.deepspeed_values import FlatValues, Shapes

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
        self._folder = folder
        self._files = file_states(folder.path)
        self._model = folder.model(0)
        """The model states of rank 0. Below stage 3 they are those of all ranks."""
        self._file = folder.model_path(0)
        """The path of the file with these model states."""
        with values_of(self._file):
            self._world_size = of_type(self._model, "dp_world_size", int)
            if not 1 <= self._world_size <= WORLD_SIZE_MAX:
                raise FormatError(f"it says that the run had {self._world_size} ranks")
            self._refuse_unsupported()
        folder.check_ranks(self._world_size, sum(file.nbytes for file in self._files.values()))
        config = self._model.get("ds_config")
        self._config: Mapping[str, Any] = config if isinstance(config, dict) else {}

    def source(self) -> Source:
        first = self.rank(0)
        with values_of(self._file):
            return self._source(first)

    def _source(self, first: RankPart) -> Source:
        folder, model = self._folder, self._model
        state: dict[str, Any] = {"counters": self._counters(), "deepspeed": self._setup().tree()}
        if self._extra:
            state[EXTRA_STATE] = sorted(self._extra)
        client_state, missing = self._client_state(model), [_MICRO_STEPS, _RNG]
        optimizer_class = None
        if first.optimizer:
            optimizer_class = first.optimizer["class"]
            scheduler, saved = self._scheduler(), self._scaler()
            state |= {"optimizer": first.optimizer, "scaler": saved, "scheduler": scheduler}
            missing += [_OPTIMIZER] if optimizer_class is None else []
            missing += [_HIDDEN] if optimizer_class is None or optimizer_class in optimizer.DEEPSPEED_CLASSES else []
            missing += [_SCHEDULER] if scheduler is not None and scheduler["class"] is None else []
            missing += [_SCALER] if saved is not None else []
        if self._buffers(model) and not folder.partitions_weights and self._world_size > 1:
            missing.append(_BUFFERS)
        values = [name for name, value in model["module"].items() if not isinstance(value, torch.Tensor)]
        missing += [f"{name}, which a module has added to its state_dict: it is no tensor" for name in values]
        missing += [f"{PARAM}/{name}: DeepSpeed had it on NVMe and did not save it" for name in self._not_saved]
        what = "Universal Checkpoint" if folder.universal else "DeepSpeed checkpoint"
        mode = f"ZeRO stage {self._stage}"
        description = {
            "framework": f"DeepSpeed {model.get('ds_version', 'of an unknown version')}", "mode": mode,
            "optimizer": "none" if not first.optimizer else optimizer_class or "unknown",
        }  # fmt: skip
        return Source(
            folder.path, f"{what}, {mode}", self._world_size, state["counters"]["global_steps"], self._aliases, state,
            client_state, description, tuple(missing), self._files, self.rank,
        )  # fmt: skip

    def rank(self, rank: int) -> RankPart:
        """Reads what one rank has."""
        folder = self._folder
        model = self._model if rank == 0 or not folder.partitions_weights else folder.model(rank)
        if model["global_steps"] != self._model["global_steps"]:
            steps = f"{model['global_steps']} and {self._model['global_steps']}"
            raise FormatError(
                f"the files of ranks {rank} and 0 are of different steps: {steps}", file=folder.path,
                hint="put the files of one step into a folder of their own",
            )  # fmt: skip
        group = RankGroup(None, rank, tuple(range(self._world_size)))
        zero = self._zero if rank == 0 or self._zero is None else folder.zero(rank)
        with values_of(folder.optimizer_path(rank)):
            flat_values = list(self._flats(zero, group))
            tree, bound = self._optimizer(flat_values, self._groups(zero))
            fragments = list(self._of_flats(flat_values))
        with values_of(folder.model_path(rank)):
            fragments += self._frozen(model, group, {name for values in flat_values for name in values.flat.names})
            fragments += self._own_buffers(model, rank)
            client_state = self._client_state(model)
        rank_state: dict[str, Any] = {"optimizer": bound} if bound else {}
        first_client_state = self._client_state(self._model)
        if rank and folder.partitions_weights and fingerprint(client_state) != fingerprint(first_client_state):
            rank_state[names.CLIENT_STATE] = client_state
        return RankPart(fragments, rank_state, tree)

    def _flats(self, zero: Mapping[str, Any] | None, group: RankGroup) -> Iterator[FlatValues]:
        """Yields the flat buffers of one rank. ``zero``: the content of the rank's file of optimizer states, or None if
        there is no such file."""
        folder, model, rank = self._folder, self._model, group.rank
        if folder.universal:
            settings, shapes = self._universal, self._shapes
            groups = self._groups(zero) or []
            inner = settings.get("optimizer_state_dict")
            step = inner["state"].get(0, {}).get("step") if isinstance(inner, dict) else None
            yield from deepspeed_values.universal(folder, groups, shapes, group, step)
        elif zero is not None:
            if self._stage == 3:
                yield from deepspeed_values.stage_3(zero, self._shapes, group, folder)
            else:
                yield from deepspeed_values.stages_1_and_2(
                    zero, self._shapes, rank, offload=self._offloads("optimizer")
                )
        elif model.get("optimizer") is not None:
            saved = of_type(model, "optimizer", dict)
            yield from deepspeed_values.stage_0(saved, self._weights, self._names_at_stage_0, group)

    def _optimizer(
        self, flat_values: list[FlatValues], groups: list[dict[str, Any]] | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns what ``optimizer.capture`` and ``optimizer.capture_bound`` return for a live optimizer."""
        if groups is None:
            return {}, []
        optimizer_class, inner_class = self._optimizer_class(groups)
        live: Any = type(optimizer_class or "unknown", (), {})()
        live.param_groups, live.state = groups, {values.flat.master: values.state for values in flat_values}
        if inner_class is not None:
            live.aux_optimizer = type(inner_class, (), {})()
        flats = [values.flat for values in flat_values]
        return {**optimizer.capture(live, flats), "class": optimizer_class}, optimizer.capture_bound(live, flats)

    def _of_flats(self, flat_values: list[FlatValues]) -> Iterator[Fragment]:
        """Yields the fragments of the master weights and moments of one rank, part by part."""
        parts = {MASTER: None}
        for values in flat_values:
            parts |= dict.fromkeys([*values.flat.files, *moments(values.flat, values.state)])
        tier = Tier.HOST if self._offloads("optimizer") else Tier.DEVICE
        for part in parts:
            for values in flat_values:
                data = values.data(part)
                if isinstance(data, torch.Tensor):
                    data = in_order(data)
                if data is not None:
                    yield from values.flat.fragments(part, values.dtype(part), data, tier)

    def _frozen(self, model: Mapping[str, Any], group: RankGroup, trained: set[str]) -> Iterator[Fragment]:
        """Yields this rank's elements of the weights that have no master weights. ``trained``: the names of the
        parameters that have master weights."""
        tier = Tier.HOST if self._offloads("param") else Tier.DEVICE
        if self._folder.partitions_weights:
            shapes = model.get("frozen_param_shapes") or {}
            for name, data in (model.get("frozen_param_fragments") or {}).items():
                parameter_range = cut_alone(plain_name(name), all_of(_shape(shapes[name])), group.rank, group.size)
                first_name, span = parameter_range.name, parameter_range.span
                if first_name not in self._not_saved and (span.numel or (group.rank == 0 and not span.grid.numel)):
                    elements = in_order(data.detach()).view(-1)[: span.numel]
                    dtype = dtype_name(data.dtype, f"{PARAM}/{first_name}")
                    yield Fragment(PARAM, first_name, dtype, span, tier, data=elements)
            return
        for name in self._parameters:
            weight = self._module[name]
            span = Share(group.rank, group.size).of(all_of(weight.shape))
            if name not in trained and (span.numel or (group.rank == 0 and not weight.numel())):
                dtype = dtype_name(weight.dtype, f"{PARAM}/{name}")
                elements = in_order(weight).view(-1)[span.start : span.stop]
                yield Fragment(PARAM, name, dtype, span, tier, data=elements)

    def _own_buffers(self, model: Mapping[str, Any], rank: int) -> Iterator[Fragment]:
        """Yields a fragment for each buffer on rank 0. On another rank, yields a fragment for each buffer whose values
        differ from those of rank 0."""
        if rank and not self._folder.partitions_weights:
            return
        for name, buffer in self._buffers(model).items():
            data = in_order(buffer.detach()).view(-1)
            first_digest = self._first_buffers.get(name)
            if rank == 0 or first_digest is None or values_digest(data) != first_digest:
                dtype = dtype_name(data.dtype, f"{BUFFER}/{name}")
                if data.numel() or rank == 0:
                    yield Fragment(BUFFER, name, dtype, all_of(buffer.shape), copy=rank, data=data)

    def _counters(self) -> dict[str, int]:
        keys = ("global_steps", "global_samples", "skipped_steps")
        return {**{key: of_type(self._model, key, int) for key in keys}, "micro_steps": 0}

    def _setup(self) -> Setup:
        """Returns what ``setup_of`` returns for a live engine. It is made from the configuration that was saved."""
        config, model = self._config, self._model
        zero = config.get("zero_optimization")
        zero = zero if isinstance(zero, dict) else {}
        dtypes = {name: torch_name(self._module[name].dtype) for name in self._parameters}
        dtype = next((name for name in dtypes.values() if name in DTYPES.values()), "float32")
        accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
        saved = model.get("optimizer")
        unwrapped = isinstance(saved, dict) and "optimizer_state_dict" not in saved
        return Setup(
            stage=self._stage, dtype=dtype, grad_accum_dtype=DTYPES.get(str(accumulated), dtype),
            gradient_clipping=float(config.get("gradient_clipping", 1.0)),  # 1.0 is DeepSpeed's own default.
            sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
            round_robin_gradients=bool(zero.get("round_robin_gradients", False)),
            parameter_alignment=bool(zero.get("parameter_alignment", False)),
            cpu_offload=self._offloads("optimizer") and zero["offload_optimizer"]["device"] == "cpu",
            other_dtypes={name: other for name, other in dtypes.items() if other != dtype},
            groups=self._names_at_stage_0 if saved and unwrapped else None,
        )  # fmt: skip

    def _scheduler(self) -> dict[str, Any] | None:
        """Returns the tree of the scheduler, as it is in the state of an engine, or None if there is no scheduler."""
        saved = self._model.get("lr_scheduler")
        settings = self._config.get("scheduler")
        scheduler_class = settings.get("type") if isinstance(settings, dict) else None
        return None if saved is None else {"class": scheduler_class, "state": saved}

    def _scaler(self) -> dict[str, Any] | None:
        """Returns what ``scaler.capture`` returns for a live loss scaler."""
        weights = (self._module[name] for name in self._parameters)
        if not any(weight.dtype == torch.float16 for weight in weights):
            return None
        if self._zero is None and not self._folder.universal:
            saved = of_type(self._model, "optimizer", dict)
            plain_values = {
                key: value for key, value in saved.items() if isinstance(value, scaler.PLAIN) and key != "clip_grad"
            }
            dynamic = "dynamic" if plain_values.get("dynamic_loss_scale") else "static"
            return {"class": f"LossScaleConfig({dynamic})", "values": plain_values, "wrapper": {}}
        saved = self._universal if self._folder.universal else self._zero or {}
        saved_scaler = saved.get("loss_scaler")
        attributes = vars(saved_scaler) if saved_scaler else {}
        values = {key: value for key, value in attributes.items() if isinstance(value, scaler.PLAIN)}
        wrapper = {"overflow": bool(saved.get("overflow"))}
        return {"class": type(saved_scaler).__name__, "values": values, "wrapper": wrapper}

    def _client_state(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries that the caller of ``save_checkpoint`` has added to the model states."""
        return {key: value for key, value in model.items() if key not in STOCK}

    def _buffers(self, model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the persistent buffers, and what modules have added to their ``state_dict``, by name."""
        persistent = {name: tensor for name, tensor in _tensors(model).items() if name in self._buffer_names}
        return {name: tensor for name, tensor in persistent.items() if name not in self._aliases}

    @cached_property
    def _buffer_names(self) -> frozenset[str]:
        """The names of all tensors that belong to the part ``buffer``."""
        return self._extra.union(map(plain_name, self._model.get("buffer_names") or ()))

    @cached_property
    def _extra(self) -> frozenset[str]:
        """The names of the tensors that modules have added to their ``state_dict`` by themselves, as far as the files
        tell them from frozen weights. At stage 3 weights have no elements here, and no weight has a name that begins
        with that of another one. The others are in the part ``param``, where a restore finds them too."""
        shapes = [*(self._model.get("param_shapes") or ()), self._model.get("frozen_param_shapes") or {}]
        known = {*chain.from_iterable(shapes), *(self._model.get("buffer_names") or ())}
        others = self._module.keys() - map(plain_name, known)
        return frozenset(
            name
            for name in others
            if name.split(".")[-1] == "_extra_state"
            or not unconverted([name.rpartition(".")[0]]).isdisjoint(self._module)
            or (self._folder.partitions_weights and self._module[name].numel())
        )

    @cached_property
    def _module(self) -> dict[str, torch.Tensor]:
        """The weights and buffers by name. At stage 3 the weights have no elements here, because each rank has a part
        of them in another file."""
        return _tensors(self._model)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """For each other name of a tied weight or buffer, the name under which it is stored."""
        shared = self._model.get("shared_params") or {} if self._folder.partitions_weights else {}
        aliases = {plain_name(name): plain_name(first) for name, first in shared.items()}
        places: dict[tuple[Any, ...], str] = {}
        for name, tensor in self._module.items():
            # A restore needs the extra state under each of its names.
            if tensor.numel() and name not in self._extra:
                place = (stored_range(tensor) or tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                if places.setdefault(place, name) != name:
                    aliases[name] = places[place]
        return aliases

    @cached_property
    def _parameters(self) -> list[str]:
        """The names of all parameters, in the order of the module."""
        return [name for name in self._module if name not in self._buffer_names and name not in self._aliases]

    @cached_property
    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights of all parameters by name."""
        return {name: self._module[name] for name in self._parameters}

    @cached_property
    def _names_at_stage_0(self) -> list[list[str]]:
        """The names of the parameters of each param group. They are searched once for all ranks."""
        return deepspeed_values.names_at_stage_0(of_type(self._model, "optimizer", dict), self._weights)

    @cached_property
    def _shapes(self) -> Shapes:
        """For each flat buffer, the shapes of its parameters by name."""
        saved = of_type(self._model, "param_shapes", list)
        return [{plain_name(name): _shape(shape) for name, shape in shapes.items()} for shapes in saved]

    @cached_property
    def _first_buffers(self) -> dict[str, bytes]:
        """The digests of rank 0's buffers, by the names of the buffers."""
        return {name: values_digest(buffer) for name, buffer in self._buffers(self._model).items()}

    @cached_property
    def _not_saved(self) -> set[str]:
        """The names of the frozen weights whose values are not in the files."""
        shapes = self._model.get("frozen_param_shapes") or {}
        if not self._folder.partitions_weights:
            return set()
        group = RankGroup(None, 0, tuple(range(self._world_size)))
        return {
            plain_name(name)
            for name, data in (self._model.get("frozen_param_fragments") or {}).items()
            if data.numel() < cut_alone(name, all_of(_shape(shapes[name])), group.rank, group.size).span.stop
        }

    @cached_property
    def _zero(self) -> Mapping[str, Any] | None:
        """The content of the file of optimizer states of rank 0, or None if there are no such files."""
        return self._folder.zero(0) if self._folder.has_optimizer_files else None

    @cached_property
    def _universal(self) -> Mapping[str, Any]:
        """The state of the optimizer that a Universal Checkpoint has in one file for all parameters."""
        state = self._folder.universal_file("optimizer_state.pt")
        if not isinstance(state, dict):
            raise FormatError(
                "its file zero/optimizer_state.pt is missing, or is not one of DeepSpeed's", file=self._folder.path,
                hint="run DeepSpeed's ds_to_universal.py again, or convert the checkpoint that it was made from",
            )  # fmt: skip
        return state

    @cached_property
    def _stage(self) -> int:
        """The ZeRO stage of the run that saved the folder."""
        if self._folder.partitions_weights:
            return 3
        if self._folder.universal:
            return _number(self._universal.get("zero_stage"), 1)
        if self._zero is None:
            return 0
        return _number(self._zero.get("zero_stage"), 1)  # BF16_Optimizer has stage 1, but does not save this number.

    def _groups(self, zero: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
        """Returns the param groups of the optimizer, or None if there is no optimizer."""
        if self._folder.universal:
            saved: Any = self._universal
        elif zero is not None:
            saved = zero.get("optimizer_state_dict" if self._stage == 3 else "base_optimizer_state")
        else:
            saved = self._model.get("optimizer")
            saved = None if saved is None else saved.get("optimizer_state_dict", saved)
        return None if saved is None else list(of_type(saved, "param_groups", list))

    def _optimizer_class(self, groups: list[dict[str, Any]]) -> tuple[str | None, str | None]:
        """Returns the class of the optimizer, which DeepSpeed chooses by its configuration, and the class of the
        optimizer inside Muon. The first one is None if it is not known, as for an optimizer that the training script
        has made itself. The second one is None if there is no optimizer inside."""
        settings = self._config.get("optimizer")
        if not isinstance(settings, dict) or not isinstance(settings.get("type"), str):
            return None, None
        options = settings.get("params") or {}
        on_cpu, configured = self._offloads("optimizer"), settings["type"].lower()
        adam = "DeepSpeedCPUAdam" if on_cpu else "FusedAdam"
        if configured in ("adam", "adamw"):
            if options.get("torch_adam"):
                return ("AdamW" if configured == "adamw" or options.get("adam_w_mode", True) else "Adam"), None
            return (adam if all("bias_correction" in group for group in groups) else None), None
        if configured == "muon":
            return "MuonWithAuxAdam", adam if any(not group.get("use_muon") for group in groups) else None
        classes = {
            "adagrad": "DeepSpeedCPUAdagrad" if on_cpu else "Adagrad", "lamb": "FusedLamb",
            "lion": "DeepSpeedCPULion" if on_cpu else "FusedLion",
        }  # fmt: skip
        return classes.get(configured, settings["type"]), None

    def _offloads(self, what: str) -> bool:
        """Returns whether the run had offloaded ``what``, which is "optimizer" or "param", to host memory or NVMe."""
        zero = self._config.get("zero_optimization")
        settings = zero.get(f"offload_{what}") if isinstance(zero, dict) else None
        return isinstance(settings, dict) and settings.get("device") in ("cpu", "nvme")

    def _refuse_unsupported(self) -> None:
        """Raises UnsupportedError if the run used a feature of DeepSpeed that zckpt does not support."""
        model = self._model
        features = [
            f"model parallelism ({model.get('mp_world_size')} ranks)" if model.get("mp_world_size", 1) != 1 else "",
            "pipeline parallelism" if not isinstance(model["module"], dict) else "",
            "a mixture of experts (deepspeed.moe)" if "num_experts" in model else "",
            "random_ltd" if model.get("random_ltd") is not None else "",
            "curriculum learning (data_sampler)" if model.get("data_sampler") is not None else "",
        ]
        if any(features):
            raise UnsupportedError(
                f"it was written by a run with {', '.join(filter(None, features))}, which zckpt does not support"
            )


def _tensors(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns all tensors in the module's state dict, by the names that zckpt uses."""
    return {plain_name(name): tensor for name, tensor in model["module"].items() if isinstance(tensor, torch.Tensor)}


def _shape(saved: Any) -> tuple[int, ...]:
    """Returns a saved shape of a parameter. Raises FormatError if no tensor can have it."""
    if len(saved) > NDIM_MAX or not all(type(size) is int and 0 <= size <= TENSOR_BYTES_MAX for size in saved):
        raise FormatError("it has a shape that no tensor can have")
    return tuple(saved)


def _number(value: Any, default: int) -> int:
    """Returns the number of a member of one of DeepSpeed's enums, or ``default`` if ``value`` has no number."""
    return next((item for item in (*getattr(value, "args", ()), value) if type(item) is int), default)
