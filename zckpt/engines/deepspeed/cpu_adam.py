"""The bias correction that DeepSpeed's Adam for the CPU keeps in C++, out of Python's reach.

``Adam_Optimizer`` (csrc/includes/cpu_adam.h) holds one step number, one pair of betas and the running fp32 products
beta1^t and beta2^t for *all* tensors it updates. A step that follows the last one multiplies the products; any other
step or pair of betas computes ``pow(beta, step)``. The two differ in the last bit, so an optimizer that starts anew at
step N does not continue bit for bit. Calling it with every step from 1 to N does: at step 1 product and power are both
beta, whatever was before. The tensors may be empty: the products are all that is wanted.

This takes the betas to have been the same all along. Where a scheduler changes them at every step, every step computes
powers, and so must the next one. A scheduler that has changed them and then stopped leaves products that nobody knows:
there the next steps may differ in the last bit.

Flats in host memory alone are updated by such a kernel. On a device, FusedAdam computes powers at every step, and keeps
nothing.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines.deepspeed.optimizer import counts_together, inner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.engines.deepspeed.flats import Flat

NEGLIGIBLE = 2.0**-26
"""From here down 1 - beta^t is 1 in fp32, so the products no longer matter, only the step number does."""


def replay(optimizer: Any, flats: Sequence[Flat], betas_vary: bool) -> None:
    """Brings the hidden state, if there is any, to where training up to the flats' ``step`` would have left it.

    ``betas_vary``: a scheduler gives the optimizer other betas at every step.
    """
    in_host_memory = [flat for flat in flats if flat.master.device.type == "cpu"]
    kernel = _kernel(optimizer) if in_host_memory else None
    if kernel is None:
        return
    if betas_vary:
        kernel(0, 0.0, 0.0)  # so that the next step finds other betas than its own
        return
    # What one optimizer step of the engine amounts to: a call per flat, of which only changes of step or betas count.
    calls = [call for call, _ in groupby(_last_calls(optimizer, in_host_memory))]
    rounds = max((step for step, _ in calls), default=0)
    if all(max(betas) ** step < NEGLIGIBLE for step, betas in calls):
        rounds = min(rounds, 1)
    for before_end in reversed(range(rounds)):
        for step, betas in calls:
            if step > before_end:
                kernel(step - before_end, *betas)


def _last_calls(optimizer: Any, flats: Sequence[Flat]) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Step and betas of the last step's calls, flat by flat."""
    for group, members in groupby(flats, lambda flat: flat.group):
        states = [optimizer.state.get(flat.master, {}) for flat in members]
        steps = [state["step"] for state in states if type(state.get("step")) is int]
        if counts_together(optimizer, group):
            steps = [max(steps, default=0)] * len(steps)
        for step in steps:
            yield step, tuple(optimizer.param_groups[group]["betas"])


def _kernel(optimizer: Any) -> Any:
    """A function of step, beta1 and beta2 that calls the C++ Adam behind ``optimizer`` on nothing; None without one."""
    optimizer = inner(optimizer) or optimizer
    empty = [torch.empty(0) for _ in range(4)]
    kinds = {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("deepspeed.ops.adam.")}
    if "DeepSpeedCPUAdam" in kinds:
        op, opt_id = optimizer.ds_opt_adam, optimizer.opt_id
        return lambda step, beta1, beta2: op.adam_update(opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, *empty)
    if "FusedAdam" in kinds:
        op, mode, flag = optimizer.multi_tensor_adam, optimizer.adam_w_mode, torch.zeros(1, dtype=torch.int32)
        lists = [[tensor] for tensor in empty]
        return lambda step, beta1, beta2: op(65536, flag, lists, 0.0, beta1, beta2, 1e-8, step, mode, 1, 0.0)
    return None
