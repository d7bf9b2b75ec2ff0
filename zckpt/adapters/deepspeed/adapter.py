"""The ``EngineAdapter`` of DeepSpeed engines: everything that does not depend on the ZeRO stage. Other files have what
is specific to each stage."""

from __future__ import annotations

import sys
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters import optimizer
from zckpt.adapters.deepspeed import data_sampler, refuse, scaler
from zckpt.adapters.deepspeed.experts import AutoExperts, MoeExperts, auto_experts_of
from zckpt.adapters.deepspeed.group import process_group
from zckpt.adapters.deepspeed.local_tensors import local_tensors_of, tensor_parallel_ranks
from zckpt.adapters.deepspeed.pipeline_stage import PipelineStage
from zckpt.adapters.deepspeed.restoring import DeepSpeedRestoring, rng_tracker
from zckpt.adapters.deepspeed.setup import Setup, parallelism
from zckpt.adapters.deepspeed.wrapper import kind_of
from zckpt.adapters.deepspeed.zero12 import uses_muon
from zckpt.adapters.module_adapter import ModuleAdapter
from zckpt.adapters.trees import COUNTERS
from zckpt.adapters.unwrapped import Unwrapped
from zckpt.engines import rng
from zckpt.engines.contract import UsingMethod
from zckpt.engines.group import ranks_of
from zckpt.engines.hooks import call_before
from zckpt.engines.tensors import unwrapped
from zckpt.errors import UnsupportedError
from zckpt.plan.inventory import BUFFER, GRADIENT, PARAM
from zckpt.transfer.memory import why_no_memory
from zckpt.transfer.torch_dtypes import torch_name
from zckpt.transfer.values_digest import values_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from zckpt.adapters.kind import Kind
    from zckpt.adapters.local_tensors import LocalTensor
    from zckpt.engines.contract import Selection


class DeepSpeedAdapter(ModuleAdapter):
    """Reads and restores one DeepSpeed engine on one rank. ``EngineAdapter`` documents its methods."""

    @staticmethod
    def process_group(engine: Any) -> ProcessGroup | None:
        return process_group(engine)

    @property
    def trees(self) -> tuple[str, ...]:
        of_loader = ("data_sampler",) if data_sampler.sampler_of(self.engine) is not None else ()
        return ("counters", *of_loader, *(("optimizer", "scaler", "scheduler") if self.trains else ()))

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    @property
    def names_differ(self) -> bool:
        return self.experts.divided or self._stage.divided

    def global_name(self, name: str) -> str:
        return self._auto_experts.names.get(name) or self.experts.global_name(name)

    def counterpart(self, name: str) -> str:
        return "" if self._stage.has_elsewhere(name) else self.experts.counterpart(name)

    @property
    def description(self) -> dict[str, str]:
        return {
            "framework": f"DeepSpeed {sys.modules['deepspeed'].__version__}",
            "torch": str(torch.__version__),
            "mode": f"ZeRO stage {int(self.engine.zero_optimization_stage())}",
            **self._parallelism,
            "optimizer": optimizer.class_name(self.kind.optimizer) if self.trains else "none",
        }

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        reasons = refuse.unsupported(self.engine, self) or ([] if leave_out else self.extra.unsaved)
        if reasons:
            raise UnsupportedError(
                f"zckpt does not support this DeepSpeed engine: {'; '.join(reasons)}", hint=refuse.SUPPORTED
            )
        # If backward passes change the optimizer's state too, it already contains these gradients, and dropping them
        # would not undo this.
        droppable = self._kind_class.changes_only_in_step(self.engine.optimizer)
        if drop_gradients and droppable:
            return
        for gradients in refuse.pending_gradients(self.engine):
            hint = "do this at a gradient accumulation boundary, right after the engine.step() that ends it"
            alternative = ', or pass pending_gradients="drop" to write without these gradients' if droppable else ""
            raise UnsupportedError(f"the engine holds {gradients}", hint=hint + alternative)

    def refuse_lazy(self) -> None:
        if not self._kind_class.changes_only_in_step(self.engine.optimizer):
            raise UnsupportedError(
                "snapshot='lazy': before DeepSpeed 0.19, Muon updates its momentum while the gradients are reduced",
                hint="write with snapshot='copy', or upgrade DeepSpeed",
            )

    def state(self) -> dict[str, Any]:
        trees: dict[str, Any] = {
            "counters": {name: int(getattr(self.engine, name)) for name in COUNTERS},
            "deepspeed": self._setup().tree(),
            **self.tree_of_extra_state(),
        }
        sampler = data_sampler.sampler_of(self.engine)
        if sampler is not None:
            trees["data_sampler"] = data_sampler.capture(sampler)
        if not self.trains:
            return trees
        return trees | self.trees_of_optimizer() | {"scaler": scaler.capture(self.engine.optimizer)}

    def sample(self) -> Mapping[str, bytes]:
        # With ZeRO-3, no rank has whole weights, but DeepSpeed numbers the parameters of a job alike on every rank.
        numbers = [
            weight.ds_id for weight in self.parameters[0].values() if weight.requires_grad and hasattr(weight, "ds_id")
        ]
        if numbers:
            return {"": repr(numbers[:1]).encode()}
        sample = dict(super().sample())
        if not all(local.same_borders for local in self.local_tensors.values()):
            # ZeRO cuts the replicas of a weight into partitions with other borders. A write cannot compare these
            # partitions, so it compares the weights.
            for name, local in self.local_tensors.items():
                weight = self.parameters[0][name]
                if weight.requires_grad and local.partition_replicated and why_no_memory(weight) is None:
                    sample[self.elements_here(name)] = values_digest(weight.detach())
        return sample

    def elements_here(self, name: str) -> str:
        span = self.local_tensors[name].span
        return name if span.numel == span.grid.numel else f"{name} from element {span.start} on"

    def rank_state(self) -> dict[str, Any]:
        tracked = rng_tracker().get_states()
        return {
            "rng": rng.capture(self.device),
            "rng_tracker": {name: rng.to_bytes(state) for name, state in tracked.items()},
            "optimizer": optimizer.capture_bound(self.kind.optimizer, self.kind.flats),
        }

    def after_write(self) -> None:
        self._kind_class.after_write(self.engine.optimizer)

    def before_change(self, action: Callable[[], None]) -> None:
        steps = [(self.engine.optimizer, "step")] if self.trains else []
        call_before(action, [*steps, (self.engine, "offload_states"), (self.engine, "reload_states")])

    def uses(self) -> Iterator[UsingMethod]:
        engine = self.engine
        weights = {PARAM, BUFFER}
        yield UsingMethod(engine, "forward", weights)
        yield UsingMethod(engine, "save_16bit_model", weights)
        yield UsingMethod(engine, "_zero3_consolidated_16bit_state_dict", weights, "module_state_dict")
        optimizers = [engine.optimizer, self.kind.optimizer] if self.trains else []
        yield from self.uses_of_state([engine.module], optimizers)
        # Muon combines its momentum with the gradients while they are reduced.
        moment = {"momentum_buffer"} if self.trains and uses_muon(self.kind.optimizer) else set()
        for method in ("backward", "_backward_prologue"):  # DeepSpeed calls the second for loss.backward()
            if hasattr(engine, method):
                yield UsingMethod(engine, method, {PARAM, GRADIENT} | moment, "backward")
        yield UsingMethod(engine, "zero_grad", {GRADIENT})
        for method in ("step", "offload_states", "reload_states"):
            yield UsingMethod(engine, method)
        # All stages of a pipeline call these, before one of them waits for what another one computes.
        for method in ("train_batch", "eval_batch"):
            if hasattr(engine, method):
                yield UsingMethod(engine, method)
        for method in ("save_checkpoint", "load_checkpoint"):
            if not isinstance(vars(engine).get(method), partial):  # zckpt.attach replaces both with zckpt's own
                yield UsingMethod(engine, method)

    def restoring(self, selection: Selection) -> DeepSpeedRestoring:
        return DeepSpeedRestoring(self, selection)

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.device)

    @property
    def scheduler(self) -> Any:
        return self.engine.lr_scheduler

    @property
    def module(self) -> torch.nn.Module:
        return unwrapped(self.engine.module)

    @property
    def _kind_class(self) -> type[Kind]:
        kind = kind_of(self.engine)
        assert kind is not None, "refuse_unsupported comes first"
        return kind

    @cached_property
    def kind(self) -> Kind:
        return self._kind_class(self.engine.optimizer, self.parameters[0], self.local_tensors)

    @cached_property
    def local_tensors(self) -> dict[str, LocalTensor]:
        """The local tensors of all parameters. Raises what ``local_tensors_of`` raises."""
        shapes = self._kind_class.shapes(self.engine.optimizer, self.parameters[0])
        parameters, experts = self.parameters[0], (self.experts, self._auto_experts)
        return local_tensors_of(self.engine, parameters, shapes, self._stage, *experts)

    @cached_property
    def _stage(self) -> PipelineStage:
        return PipelineStage(self.module)

    @property
    def _parallelism(self) -> dict[str, str]:
        sequence = getattr(self.engine, "seq_parallel_group", None)
        return parallelism(
            tensor=tensor_parallel_ranks(self.engine).size,
            pipeline=self._stage.count,
            experts=max((group.size() for group in (self.engine.expert_parallel_group or {}).values()), default=1),
            sequence=1 if sequence is None else len(ranks_of(sequence)),
        )

    @cached_property
    def experts(self) -> MoeExperts:
        """The experts that this rank has."""
        return MoeExperts(self.engine, self.module)

    @cached_property
    def _auto_experts(self) -> AutoExperts:
        """The tensors of the layers of AutoEP."""
        return auto_experts_of(self.engine, self.module)

    def _setup(self) -> Setup:
        engine, zero = self.engine, self.engine._config.zero_config
        dtype, grad_accum_dtype = engine.get_data_types()
        return Setup(
            stage=int(engine.zero_optimization_stage()),
            dtype=torch_name(dtype),
            grad_accum_dtype=torch_name(grad_accum_dtype),
            gradient_clipping=float(engine.gradient_clipping()),
            sub_group_size=int(zero.sub_group_size),
            round_robin_gradients=bool(zero.round_robin_gradients),
            parameter_alignment=bool(getattr(zero, "parameter_alignment", False)),  # DeepSpeed has it since 0.19.
            cpu_offload=bool(engine.zero_cpu_offload()),
            other_dtypes={name: torch_name(p.dtype) for name, p in self.parameters[0].items() if p.dtype != dtype},
            groups=self._groups(),
            divided=self.names_differ or self._auto_experts.any,
            own_names=self._auto_experts.own_names,
        )

    def _groups(self) -> list[list[str]] | None:
        """Returns the value of ``Setup.groups``: the names of the parameters of each param group, or None unless the
        optimizer works on the model's own parameters."""
        if self._kind_class is not Unwrapped:
            return None
        names = {id(parameter): name for name, parameter in self.parameters[0].items()}
        groups = ([id(parameter) for parameter in group["params"]] for group in self.engine.optimizer.param_groups)
        return [[names[parameter_id] for parameter_id in group if parameter_id in names] for group in groups]
