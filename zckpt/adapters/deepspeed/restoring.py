"""Restores a checkpoint into a DeepSpeed engine. This is the ``Restoring`` of DeepSpeed's adapter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zckpt.adapters.deepspeed import cpu_adam, data_sampler, scaler
from zckpt.adapters.module_restoring import ModuleRestoring
from zckpt.adapters.trees import counters_of, subtree
from zckpt.engines import rng

if TYPE_CHECKING:
    from zckpt.adapters.extra_state import Gathered


class DeepSpeedRestoring(ModuleRestoring):
    """Puts one ``Selection`` into one DeepSpeed engine on one rank. ``Restoring`` documents its methods."""

    def problems(self) -> list[str]:
        state = self._selection.state
        if "scaler" in state:
            scaler.check(state["scaler"])
        reasons = super().problems()
        if state.get("data_sampler") is not None:
            data_sampler.check(state["data_sampler"])
        elif "data_sampler" in state and self._selection.strict:
            reasons.append("data_sampler: none in the checkpoint, though the engine learns by a curriculum")
        return reasons

    def _set_more_state(self) -> None:
        engine, state, rank_state = self._engine, self._selection.state, self._selection.rank_state
        if "optimizer" in state:
            betas_vary = bool(getattr(engine.lr_scheduler, "cycle_momentum", False))
            cpu_adam.replay(self._kind.optimizer, self._kind.flats, betas_vary)
        if "scaler" in state:
            scaler.restore(state["scaler"], engine.optimizer)
        if state.get("data_sampler") is not None:
            data_sampler.restore(state["data_sampler"], data_sampler.sampler_of(engine))
        if "counters" in state:
            for name, value in counters_of(state).items():
                setattr(engine, name, value)
        # The restore has dropped all gradients, so the next micro step must be the first one of an optimizer step. The
        # count may be in the middle of a step: if no counters were restored, it is the engine's own, and if the writer
        # dropped gradients, it is the one that was saved.
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        engine._unmanaged_backward_count = 0
        if rank_state is not None and self._selection.rng:
            # A checkpoint of another framework has no such tree.
            tracked = subtree(rank_state, "rng_tracker") if "rng_tracker" in rank_state else {}
            if tracked:
                rng_tracker().set_states({name: rng.to_tensor(state) for name, state in tracked.items()})

    @property
    def _gathered(self) -> Gathered:
        gathered: Gathered = sys.modules["deepspeed"].zero.GatheredParameters
        return gathered


def rng_tracker() -> Any:
    """Returns the tracker of deepspeed.checkpointing for random number generators. Dropout inside its fork() uses these
    generators. Mostly there are none."""
    return sys.modules["deepspeed"].checkpointing.get_cuda_rng_tracker()
