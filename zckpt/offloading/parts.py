"""The parts of a state that can be moved out of memory: their names, and the order in which training uses them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from zckpt.plan.inventory import GRADIENT, MASTER, PARAM, RESERVED_PARTS
from zckpt.plan.select import several

if TYPE_CHECKING:
    from collections.abc import Collection

MOMENTS = "optim_states"
"""The name by which DeepSpeed means all moments together."""
DEEPSPEED = {"hp_params": MASTER, "lp_params": PARAM, "lp_grads": GRADIENT, "contiguous_grad_buffer": GRADIENT}
"""The other names that DeepSpeed's ``engine.offload_states`` has for parts."""
_IN_USE = (PARAM, GRADIENT, MASTER)


def in_order(parts: Iterable[str]) -> tuple[str, ...]:
    """Returns the parts in the order in which a step of training first uses them. The moments come last."""
    return tuple(sorted(parts, key=lambda part: (_IN_USE.index(part) if part in _IN_USE else len(_IN_USE), part)))


def movable(parts: Iterable[str]) -> tuple[str, ...]:
    """Returns the parts of an engine that can be moved, and the gradients."""
    return in_order({*parts, GRADIENT} - (RESERVED_PARTS - {MASTER, PARAM}))


def asked_for(parts: Collection[str] | None) -> list[str] | None:
    """Returns the names that a caller has given: one name, several, or members of DeepSpeed's
    ``OffloadStateTypeEnum``. Returns None for None."""
    named: Any = parts
    if isinstance(parts, Iterable) and not isinstance(parts, str):
        named = [part.value if isinstance(part, Enum) else part for part in parts]
    names = several(named)
    return None if names is None else [*names]


def chosen(asked: Collection[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """Returns the parts among ``known`` that are asked for by zckpt's names or by DeepSpeed's names. None asks for all.
    Raises ValueError, which lists the known names, for any other name."""
    if asked is None:
        return in_order(known)
    always = {MASTER, PARAM, GRADIENT, MOMENTS, *DEEPSPEED}
    unknown = sorted({*map(str, asked)} - always - {*known})
    if unknown:
        names = [*in_order({*known, MASTER, PARAM, GRADIENT}), MOMENTS, *DEEPSPEED]
        raise ValueError(
            f"there is no part {', '.join(unknown)} that can be offloaded; these can: {', '.join(names)}. "
            f"Moments exist from the first step on; {MOMENTS} names all of them at any time"
        )
    named = {DEEPSPEED.get(part, part) for part in asked}
    return in_order(part for part in known if part in named or (MOMENTS in named and part not in _IN_USE))


def next_in_use(parts: Collection[str], out: Collection[str], count: int) -> tuple[str, ...]:
    """Returns the first ``count`` parts among ``out`` that training uses after ``parts``."""
    order = in_order({*parts, *out})
    last = max((order.index(part) for part in parts), default=-1)
    return tuple(part for part in (*order[last + 1 :], *order[: last + 1]) if part in out and part not in parts)[:count]
