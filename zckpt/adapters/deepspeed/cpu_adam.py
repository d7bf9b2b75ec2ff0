"""The bias correction that DeepSpeed's Adam for the CPU keeps in C++, where Python cannot read it.

``Adam_Optimizer`` (csrc/includes/cpu_adam.h) keeps one step number, one pair of betas, and the running fp32 products
beta1^t and beta2^t. It keeps them once for *all* tensors that it updates. A call with the step that follows the last
one multiplies the products by the betas. A call with any other step, or with other betas, computes ``pow(beta, step)``.
The two results differ in the last bit, so an optimizer that is new at step N does not continue bit for bit. To reach
the same products, the kernel is called with every step from 1 to N: at step 1, the product and the power are both equal
to beta, whatever the kernel has kept before. These calls may be made with empty tensors, because only the products are
needed.

This assumes that the betas have always been the same. If a scheduler changes the betas at every step, every step
computes powers, and so the next step must do the same. If a scheduler has changed the betas and then stopped, the
products are not known. Then the next steps may differ in the last bit.

Such a kernel updates only flat buffers in host memory. On a device, FusedAdam computes powers at every step and keeps
no products.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from zckpt.adapters.optimizer import counts_together, inner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zckpt.adapters.flats import FlatBuffer

NEGLIGIBLE = 2.0**-26
"""If beta^t is less than this, 1 - beta^t is 1 in fp32. Then the values of beta^t no longer change any result, and only
the step number counts."""


def replay(optimizer: Any, flats: Sequence[FlatBuffer], betas_vary: bool) -> None:
    """Brings the hidden state to what it would be after training up to the ``step`` of each flat buffer. Does nothing
    if the optimizer has no hidden state. ``betas_vary``: whether a scheduler gives the optimizer other betas at every
    step."""
    in_host_memory = [flat for flat in flats if flat.master.device.type == "cpu"]
    kernel = _kernel(optimizer) if in_host_memory else None
    if kernel is None:
        return
    if betas_vary:
        kernel(0, 0.0, 0.0)  # The next step then sees that the betas have changed, and computes powers.
        return
    # One optimizer step of the engine calls the kernel once for each flat buffer. A call with the same step and betas
    # as the call before it changes nothing, so it is left out.
    calls = [call for call, _ in groupby(_last_calls(optimizer, in_host_memory))]
    rounds = max((step for step, _ in calls), default=0)
    if all(max(betas) ** step < NEGLIGIBLE for step, betas in calls):
        rounds = min(rounds, 1)
    for later_steps in reversed(range(rounds)):
        for step, betas in calls:
            if step > later_steps:
                kernel(step - later_steps, *betas)


def _last_calls(optimizer: Any, flats: Sequence[FlatBuffer]) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Yields the step and the betas with which the last optimizer step has called the kernel for each flat buffer."""
    for group, members in groupby(flats, lambda flat: flat.group):
        states = [optimizer.state.get(flat.master, {}) for flat in members]
        steps = [state["step"] for state in states if type(state.get("step")) is int]
        if counts_together(optimizer, group):
            steps = [max(steps, default=0)] * len(steps)
        for step in steps:
            yield step, tuple(optimizer.param_groups[group]["betas"])


def _kernel(optimizer: Any) -> Any:
    """Returns a function of step, beta1 and beta2 that calls the C++ Adam behind ``optimizer`` with empty tensors.
    Returns None if there is no C++ Adam."""
    optimizer = inner(optimizer) or optimizer
    empty = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in range(4)]
    classes = {base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("deepspeed.ops.adam.")}
    if "DeepSpeedCPUAdam" in classes:
        op, opt_id = optimizer.ds_opt_adam, optimizer.opt_id
        return lambda step, beta1, beta2: op.adam_update(opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, *empty)
    if "FusedAdam" in classes:
        op, mode = optimizer.multi_tensor_adam, optimizer.adam_w_mode
        flag = torch.zeros(1, dtype=torch.int32, device="cpu")
        lists = [[tensor] for tensor in empty]
        return lambda step, beta1, beta2: op(65536, flag, lists, 0.0, beta1, beta2, 1e-8, step, mode, 1, 0.0)
    return None
