"""The ``EngineAdapter`` of ``ReferenceEngine``. There is no framework to work around, so it shows what every adapter
has to do, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zckpt.engines import rng
from zckpt.engines.contract import Batch, EngineAdapter, UsingMethod
from zckpt.engines.hooks import call_before
from zckpt.engines.tensors import dtype_name, holdings
from zckpt.errors import FormatError, UnsupportedError
from zckpt.format.names import Tier
from zckpt.geometry import all_of
from zckpt.plan.inventory import BUFFER, GRADIENT, MASTER, PARAM, Fragment, Holding, Inventory
from zckpt.transfer.devices import devices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator

    from torch.distributed import ProcessGroup

    from zckpt.engines.contract import Selection, Stored
    from zckpt.testing.engine import ReferenceEngine


class ReferenceAdapter(EngineAdapter):
    """The adapter of one ReferenceEngine on one rank. ``EngineAdapter`` describes each method."""

    trains = True
    trees = ("counters", "optimizer")

    engine: ReferenceEngine

    @staticmethod
    def process_group(engine: ReferenceEngine) -> ProcessGroup | None:
        return engine.group

    @property
    def step(self) -> int:
        return self.engine.steps

    @property
    def description(self) -> dict[str, str]:
        return {"framework": "zckpt.testing", "mode": "each parameter cut in equal shares", "optimizer": "Adam"}

    @property
    def devices(self) -> frozenset[torch.device]:
        state = (tensor for tensors in self.engine.tensors.values() for tensor in tensors.values())
        return frozenset({self.engine.device, *devices_of(state)})

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.engine.tensors)

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        if self.engine.gradients and not drop_gradients:
            raise UnsupportedError("the engine holds gradients that no optimizer step has used yet", hint="call step()")

    def refuse_lazy(self) -> None:
        pass

    def inventory(self, parts: Collection[str] | None) -> Inventory:
        unknown = sorted(set(parts or ()) - set(self.parts))
        if unknown:
            raise ValueError(f"the engine has no part {', '.join(unknown)}; it has {', '.join(self.parts)}")
        fragments = (
            self._needed() if parts is None else (fragment for fragment in self.fragments() if fragment.part in parts)
        )
        # No rank has elements of an empty tensor, so rank 0 alone writes it.
        return Inventory(
            tuple(
                fragment
                for fragment in fragments
                if fragment.span.numel or (0 in fragment.shape and self.engine.rank == 0)
            )
        )

    def sample(self) -> Mapping[str, bytes]:
        return {"": f"seed {self.engine.seed}, step {self.engine.steps}".encode()}

    def memory(self) -> Iterator[Holding]:
        for part, tensors in {**self.engine.tensors, GRADIENT: self.engine.gradients}.items():
            for name, tensor in tensors.items():
                yield from holdings(part, name, tensor)

    def state(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "counters": {"steps": engine.steps},
            "optimizer": {"learning_rate": engine.learning_rate, "beta_powers": engine.beta_powers},
        }

    def rank_state(self) -> dict[str, Any]:
        return {"generator": rng.to_bytes(self.engine.generator.get_state())}

    def before_change(self, action: Callable[[], None]) -> None:
        call_before(action, [(self.engine, "step")])

    def uses(self) -> tuple[UsingMethod, ...]:
        return UsingMethod(self.engine, "backward", {PARAM, BUFFER, GRADIENT}), UsingMethod(self.engine, "step")

    def wanted(self, stored: Mapping[str, Mapping[str, Stored]]) -> tuple[Fragment, ...]:
        return tuple(fragment._replace(data=None) for fragment in self._needed())

    def unexpected(self, stored: Mapping[str, Collection[str]]) -> list[str]:
        tensors = self.engine.tensors
        return [
            f"{part}/{name}" for part, names in stored.items() for name in names if name not in tensors.get(part, ())
        ]

    def restoring(self, selection: Selection) -> ReferenceRestoring:
        return ReferenceRestoring(self, selection)

    def _needed(self) -> Iterator[Fragment]:
        """Yields the fragments that a resume needs: all except the weights that are derived from masters."""
        masters = self.engine.tensors[MASTER]
        return (fragment for fragment in self.fragments() if fragment.part != PARAM or fragment.name not in masters)

    def fragments(self) -> Iterator[Fragment]:
        """Yields all fragments of this rank, in the order of their memory. If the rank has no element of a tensor,
        yields a fragment without elements."""
        engine = self.engine
        for part, tensors in engine.tensors.items():
            for name, data in tensors.items():
                whole = part == BUFFER
                span = all_of(data.shape) if whole else all_of(engine.shapes[name]).clip(*engine.ranges[name])
                tier = Tier.DEVICE if data.device == engine.device else Tier.HOST
                dtype = dtype_name(data.dtype, part, name)
                copy = engine.rank if whole else 0
                yield Fragment(part, name, dtype, span, tier, copy, data.view(-1))


class ReferenceRestoring:
    """One restore into a ReferenceEngine on one rank. ``Restoring`` describes each method."""

    def __init__(self, adapter: ReferenceAdapter, selection: Selection) -> None:
        self._adapter, self._engine, self._selection = adapter, adapter.engine, selection

    def problems(self) -> list[str]:
        state = self._selection.state
        if "counters" in state:
            _member(state, "counters", "steps", int)
        if "optimizer" not in state:
            return []
        _member(state, "optimizer", "learning_rate", float)
        powers = (_member(state, "optimizer", "beta_powers", torch.Tensor), self._engine.beta_powers)
        stored, live = (f"{power.dtype} {list(power.shape)}" for power in powers)
        return [] if stored == live else [f"beta_powers: {stored} in the checkpoint, {live} in the engine"]

    def fill(self) -> Generator[Batch, None, None]:
        live = {fragment.key: fragment.data for fragment in self._adapter.fragments()}
        yield Batch(tuple(fragment._replace(data=live[fragment.key]) for fragment in self._selection.wanted))

    def set_state(self) -> None:
        engine, state, rank_state = self._engine, self._selection.state, self._selection.rank_state
        if "counters" in state:
            engine.steps = _member(state, "counters", "steps", int)
        if "optimizer" in state:
            if not self._selection.keeps_settings:
                engine.learning_rate = _member(state, "optimizer", "learning_rate", float)
            engine.beta_powers.copy_(_member(state, "optimizer", "beta_powers", torch.Tensor))
        if rank_state is not None and self._selection.rng:
            engine.generator.set_state(rng.to_tensor(rank_state.get("generator")))
        engine.derive_weights()
        engine.gradients = {}

    def finish(self) -> None:
        pass


def _member(state: Mapping[str, Any], tree: str, key: str, kind: type) -> Any:
    """Returns a value of a tree of the state. Raises FormatError if it is missing or has another type."""
    members = state.get(tree)
    if not isinstance(members, Mapping) or not isinstance(members.get(key), kind):
        raise FormatError(f"state: {tree}.{key} is missing or not of type {kind.__name__}")
    return members[key]
