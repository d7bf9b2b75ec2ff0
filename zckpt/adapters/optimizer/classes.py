"""Which classes of optimizers count steps together, can go on from one another, and what their settings mean."""

from __future__ import annotations

from typing import Any

TORCH_CLASSES = frozenset({"Adam", "AdamW"})
DEEPSPEED_CLASSES = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
INTERCHANGEABLE = DEEPSPEED_CLASSES | TORCH_CLASSES
"""The classes of optimizers that have the same state and do the same step, if they treat the weight decay alike: those
of DeepSpeed, which chooses between them by the device to which the optimizer is offloaded, and those of torch."""

KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""The settings of torch's optimizers that choose how a step is computed, and not what it does. No restore gives
them the values that were saved."""

COUNTING_TOGETHER = frozenset({"FusedAdam"})
"""The classes of optimizers that count the steps of all tensors of a param group in one state only: that of the last
tensor that was updated."""

COUNTED = frozenset({"step", "k", "d", "d_max", "d_numerator", "weight_sum", "lr_max", "scheduled_lr"})
"""The entries of param groups that optimizers change themselves while they train: those of pytorch_optimizer,
D-Adaptation, Prodigy and schedule-free ones. They are no settings."""


def inner(optimizer: Any) -> Any:
    """Returns the optimizer to which Muon leaves the parameters that are not matrices. Returns None for any other
    optimizer."""
    return getattr(optimizer, "aux_optimizer", None)


def class_name(optimizer: Any) -> str:
    """Returns the name of the class of an optimizer."""
    return str(getattr(optimizer, "class_name", type(optimizer).__name__))


def decouples(optimizer: Any) -> bool | None:
    """Returns whether an optimizer of a class in ``INTERCHANGEABLE`` subtracts the weight decay from the weights, as
    AdamW does, or adds it to the gradients. Returns None for other optimizers, if there is no weight decay, and if this
    is not known, as from DeepSpeed's files."""
    name, decaying = class_name(optimizer), [group for group in optimizer.param_groups if group.get("weight_decay")]
    if name not in INTERCHANGEABLE or not decaying:
        return None
    if name not in TORCH_CLASSES:
        mode = getattr(optimizer, "adam_w_mode", None)
        return None if mode is None else bool(mode)
    # Before torch 2.8, the param groups of AdamW do not say so.
    return all(group.get("decoupled_weight_decay", name == "AdamW") for group in decaying)


def counts_together(optimizer: Any, group: int) -> bool:
    """Returns whether one state has the ``step`` for several tensors of a param group. This is so only at stage 0,
    because the other ZeRO stages let a group have only one tensor at a time."""
    kind = class_name(inner(optimizer) or optimizer)
    return kind in COUNTING_TOGETHER and len(optimizer.param_groups[group]["params"]) > 1
