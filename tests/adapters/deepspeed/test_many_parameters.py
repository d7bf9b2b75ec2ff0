"""The cost of the state of an optimizer grows in proportion to the number of parameters, and no faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zckpt.adapters import optimizer
from zckpt.adapters.local_tensors import LocalTensor
from zckpt.adapters.unwrapped import Unwrapped
from zckpt.engines.group import RankGroup
from zckpt.geometry import all_of


class Name(str):
    """The name of a parameter. ``used`` counts how often names are hashed and compared, and how often numbers are
    compared."""

    used = 0
    __slots__ = ()

    def __hash__(self) -> int:
        Name.used += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Name.used += 1
        return super().__eq__(other)


class Number(float):
    """A number whose comparisons ``Name.used`` counts."""

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Name.used += 1
        return super().__eq__(other)


class FusedAdam(torch.optim.SGD):
    """An optimizer with the name of one that keeps the step count of a whole param group in the state of one tensor."""


class PerParameter(torch.optim.SGD):
    """An optimizer that keeps a different number for each parameter."""


def uses(kind: type[torch.optim.SGD], count: int, *, known: bool) -> int:
    """Returns how many operations on names and numbers it takes to write and restore the tree of an optimizer over
    ``count`` parameters. If ``known`` is not set, the parameters had other names when they were written."""

    def live(prefix: str) -> tuple[Any, Unwrapped]:
        parameters: dict[str, torch.nn.Parameter] = {
            Name(f"{prefix}{n}"): torch.nn.Parameter(torch.zeros(1)) for n in range(count)
        }
        made = kind(list(parameters.values()), lr=0.1)
        for n, parameter in enumerate(parameters.values()):
            last = {"step": 3} if n == count - 1 else {}
            values = last if kind is FusedAdam else {"scale": Number(n)}
            made.state[parameter] = {"exp_avg": torch.zeros(1), **values}
        alone = RankGroup(None, 0, (0,))
        local_tensors = {name: LocalTensor(all_of(weight.shape), alone) for name, weight in parameters.items()}
        return made, Unwrapped(made, parameters, local_tensors)

    Name.used = 0
    made, wrapper = live("p")
    tree = optimizer.capture(made, wrapper.flats)
    # A tree that was read has new strings, and not the objects that were written.
    for key in ("param_groups", "states"):
        for entry in tree[key]:
            entry["params"] = [Name(str(name)) for name in entry["params"]]
    other, wrapper = live("p" if known else "q")
    names = {name for flat in wrapper.flats for name in flat.names}
    unknown = set() if known else names
    saved = optimizer.Saved(tree)
    restoring = optimizer.OptimizerRestoring(saved, other, wrapper.flats, unknown)
    assert not restoring.problems({"exp_avg": names})
    restoring.restore()
    if known:
        assert len(optimizer.capture(other, wrapper.flats)["states"]) == len(tree["states"])
    return Name.used


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("kind", [FusedAdam, PerParameter])
def test_the_cost_grows_with_the_number_of_parameters(kind: type[torch.optim.SGD], known: bool, count: int) -> None:
    half, whole = uses(kind, count // 2, known=known), uses(kind, count, known=known)
    assert count < whole < 2.1 * half
    assert whole < 100 * count
