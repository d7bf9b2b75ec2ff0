"""The ``EngineAdapter`` of a ``TrainState``: a model and its optimizer in one process, in ``DistributedDataParallel``,
and with FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zckpt.adapters import optimizer
from zckpt.adapters.module_adapter import ModuleAdapter, Named
from zckpt.adapters.module_restoring import ModuleRestoring
from zckpt.adapters.pytorch.optimizers import Optimizers
from zckpt.adapters.pytorch.parameters import (
    Parameters,
    drop_unsharded_gradients,
    local_tensors_of,
    reshard,
    unsharded_gradients,
)
from zckpt.adapters.scheduler import unsupported_scheduler
from zckpt.adapters.trees import COUNTERS, counters_of
from zckpt.engines import rng
from zckpt.engines.contract import UsingMethod
from zckpt.engines.hooks import call_before
from zckpt.engines.shards import is_sharded
from zckpt.engines.tensors import holdings, local_of, persistent_buffers, unsaveable, unwrapped
from zckpt.errors import UnsupportedError
from zckpt.plan.inventory import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from zckpt.adapters.extra_state import Gathered
    from zckpt.adapters.local_tensors import LocalTensor
    from zckpt.engines.contract import Selection
    from zckpt.plan.inventory import Holding

SUPPORTED = "supported: one process, DistributedDataParallel, and FSDP2 (torch.distributed.fsdp.fully_shard)"


class TorchAdapter(ModuleAdapter):
    """Reads and restores one TrainState on one rank. ``EngineAdapter`` documents its methods."""

    @staticmethod
    def process_group(engine: Any) -> ProcessGroup | None:
        group = getattr(engine.model, "process_group", None)
        if not (dist.is_initialized() and isinstance(group, dist.ProcessGroup)):
            return None
        return None if group.size() == dist.get_world_size() else group

    @property
    def trees(self) -> tuple[str, ...]:
        return ("counters", *(("optimizer", "scheduler") if self.trains else ()))

    @property
    def step(self) -> int:
        return int(self.engine.step)

    def set_step(self, step: int) -> None:
        self.engine.step = step

    @property
    def description(self) -> dict[str, str]:
        sharded = [weight for weight in self.parameters[0].values() if is_sharded(weight)]
        mode = "replicated" if self.group.size > 1 else "one process"
        if sharded:
            mode = f"sharded over {sharded[0].device_mesh}"  # type: ignore[attr-defined]
        return {
            "framework": f"torch {torch.__version__}",
            "mode": mode,
            "optimizer": optimizer.class_name(self.kind.optimizer) if self.trains else "none",
        }

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        reasons = [*self._fsdp1()]
        if not reasons:
            unsaved = self.extra.unsaved  # The hooks of a model may gather weights, so no rank may fail before this.
            reasons = [*self._unsupported()] or ([] if leave_out else unsaved)
        if reasons:
            raise UnsupportedError(f"zckpt does not support this model: {'; '.join(reasons)}", hint=SUPPORTED)
        if drop_gradients:
            return
        if self.engine.has_gradients() or next(unsharded_gradients(self.module), None) is not None:
            raise UnsupportedError(
                "the optimizer has gradients that no step has used yet",
                hint="do this right after optimizer.step(); if a GradScaler has skipped that step, call "
                'optimizer.zero_grad() before; pending_gradients="drop" writes without these gradients',
            )

    def _fsdp1(self) -> Iterator[str]:
        """Yields a reason if the model uses FSDP1, as it does on all ranks or on none."""
        for name, module in self.engine.model.named_modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                yield (
                    f"{name or 'the model'} is a FullyShardedDataParallel (FSDP1): use "
                    "torch.distributed.fsdp.fully_shard, which PyTorch recommends in its place"
                )
                return

    def _unsupported(self) -> Iterator[str]:
        """Yields the reasons why the model or its optimizer cannot be saved and restored completely."""
        try:
            local_tensors = self._local_tensors
        except ValueError as error:
            yield str(error)
            return
        weights = ((name, local_of(weight)) for name, weight in self.parameters[0].items())
        unsaved = [*unsaveable(chain(weights, self.buffers[0].items()))]
        yield from unsaved or Parameters.unsupported(self._optimizers, self.parameters[0], local_tensors)
        for name, buffer in persistent_buffers(self.module)[0].items():
            if local_of(buffer).shape != buffer.shape:
                yield f"{name}, which is a buffer that is cut"
                return
        yield from unsupported_scheduler(self.scheduler)

    def refuse_lazy(self) -> None:
        pass

    def sample(self) -> Mapping[str, bytes]:
        # No rank has whole weights of a model that is sharded.
        return {"": f"{self.engine.number}".encode()} if self.engine.number else super().sample()

    def memory(self) -> Iterator[Holding]:
        yield from super().memory()
        for gradient in unsharded_gradients(self.module):
            yield from holdings(GRADIENT, "unsharded gradient", gradient)

    def state(self) -> dict[str, Any]:
        trees = {
            "counters": {name: self.step if name == "global_steps" else 0 for name in COUNTERS},
            **self.tree_of_extra_state(),
        }
        return trees | (self.trees_of_optimizer() if self.trains else {})

    def rank_state(self) -> dict[str, Any]:
        bound = optimizer.capture_bound(self.kind.optimizer, self.kind.flats) if self.trains else []
        return {"rng": rng.capture(self.device), "optimizer": bound}

    def before_change(self, action: Callable[[], None]) -> None:
        call_before(action, [(each, "step") for each in self.engine.optimizers])

    def uses(self) -> Iterator[UsingMethod]:
        yield from self.uses_of_state([self.engine.model, self.module], self.engine.optimizers)
        for each in self.engine.optimizers:
            yield UsingMethod(each, "zero_grad", {GRADIENT})

    def restoring(self, selection: Selection) -> TorchRestoring:
        return TorchRestoring(self, selection)

    @property
    def device(self) -> torch.device:
        weight = next(iter(self.parameters[0].values()), None)
        return torch.device("cpu") if weight is None else local_of(weight).device

    @property
    def scheduler(self) -> Any:
        return self.engine.scheduler

    @property
    def module(self) -> torch.nn.Module:
        return unwrapped(self.engine.model)

    @cached_property
    def kind(self) -> Parameters:
        return Parameters(self._optimizers, self.parameters[0], self._local_tensors)

    @cached_property
    def _local_tensors(self) -> dict[str, LocalTensor]:
        return local_tensors_of(self.parameters[0], self.group)

    @cached_property
    def _optimizers(self) -> Optimizers | None:
        return Optimizers(self.engine.optimizers) if self.engine.optimizers else None

    @cached_property
    def _named(self) -> tuple[Named[torch.nn.Parameter], Named[torch.Tensor]]:
        reshard(self.module)
        return super()._named

    @cached_property
    def buffers(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tensors, aliases = super().buffers
        return {name: local_of(tensor) for name, tensor in tensors.items()}, aliases


class TorchRestoring(ModuleRestoring):
    """Puts one ``Selection`` into one TrainState on one rank. ``Restoring`` documents its methods."""

    def _set_more_state(self) -> None:
        drop_unsharded_gradients(self._adapter.module)
        if "counters" in self._selection.state:
            self._engine.restored(counters_of(self._selection.state)["global_steps"])

    @property
    def _gathered(self) -> Gathered:
        return nullcontext  # No module of a plain model gathers its parameters.
