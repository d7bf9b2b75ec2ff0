"""The definition of the engine that ``EngineContract`` tests: the engine, its ranks, and a checkpoint that they have
written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import zckpt
from zckpt.engines import group_of
from zckpt.plan.inventory import FileRange, Fragment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zckpt.engines.contract import Restoring
    from zckpt.geometry import Span

BEFORE, AFTER = 3, 2
"""The number of training steps before the checkpoint is written, and the number of steps after that."""

Run = Callable[..., list[Any]]
"""The type of the fixture ``run``."""


class Written(NamedTuple):
    """A checkpoint, and what each rank held: before the write, after the write, and ``AFTER`` steps later."""

    path: str
    held: list[list[Any]]


class EngineDefinition:
    """The engine and its ranks. A test class that derives from ``EngineContract`` defines them."""

    ranks = 1
    """The number of ranks that train, write and restore."""
    other_ranks: tuple[int, ...] = ()
    """Other numbers of ranks into which a checkpoint of ``ranks`` ranks is restored too."""

    @classmethod
    def make(cls, seed: int) -> Any:
        """Returns a new engine on this rank. ``seed`` decides the values of all trained tensors, and the engine's
        random generators."""
        raise NotImplementedError

    @classmethod
    def train(cls, engine: Any, steps: int) -> None:
        """Does ``steps`` training steps. The data of a step depend only on the rank, on the number of steps that the
        engine has taken, and on its random generators."""
        raise NotImplementedError

    @classmethod
    def held(cls, engine: Any) -> Mapping[Any, Any]:
        """Returns all tensors and plain values of this rank that decide how the training goes on. They are read without
        zckpt, because the tests compare them before and after its calls. May be collective."""
        raise NotImplementedError

    @classmethod
    def backward(cls, engine: Any) -> None:
        """Does a forward and a backward pass, which leave gradients in the engine that no optimizer step has used
        yet."""
        raise NotImplementedError

    @classmethod
    def generators(cls, engine: Any) -> Mapping[str, Any]:
        """Returns the states of the random generators that depend on ``seed`` and on the rank. ``held`` has them
        too."""
        raise NotImplementedError

    @classmethod
    def make_resized(cls, seed: int) -> Any:
        """Returns an engine like that of ``make``, but one of the trained weights has another shape, and there is an
        additional trained weight."""
        raise NotImplementedError

    @classmethod
    def make_unlike(cls, seed: int) -> Any:
        """Returns an engine with the same tensors as that of ``make``, into which the non-tensor state of ``make`` does
        not fit. For instance, it has another scheduler."""
        raise NotImplementedError

    @classmethod
    def _defines(cls, name: str) -> bool:
        return any(name in vars(base) for base in cls.__mro__[: cls.__mro__.index(EngineDefinition)])

    @classmethod
    def _needs(cls, name: str) -> None:
        """Skips a test if the class does not define this method."""
        if not cls._defines(name):
            pytest.skip(f"{cls.__name__} does not define {name}()")

    @pytest.fixture(scope="class", name="run")
    @classmethod
    def _run(cls) -> Run:
        """Returns the function that starts ranks. ``run(function, ranks, *arguments)`` calls a function on so many
        ranks, with ``torch.distributed`` initialised if there are several, and returns a list of their results.
        Functions and results can be pickled. This one runs a single rank, in the process of the test."""

        def run_here(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
            assert ranks == 1, "a fixture `run` has to start the ranks"
            return [function(*arguments)]

        return run_here

    @pytest.fixture(scope="class", name="written")
    @classmethod
    def _written(cls, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Written:
        """Writes a checkpoint once for all tests of the class."""
        path = str(tmp_path_factory.mktemp("run") / "c")
        return Written(path, run(cls._write, cls.ranks, path))

    @classmethod
    def _write(cls, path: str) -> list[Any]:
        engine = cls.make(0)
        cls.train(engine, BEFORE)
        held = [frozen(cls.held(engine))]
        zckpt.write(engine, path, client_state={"epoch": 3})
        held.append(frozen(cls.held(engine)))
        cls.train(engine, AFTER)
        return [*held, frozen(cls.held(engine))]


def frozen(value: Any) -> Any:
    """Returns a copy of ``value`` as plain values. Two copies are equal only if the values are equal bit for bit."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return str(data.dtype), tuple(data.shape), data.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return ("BytesIO", value.getvalue()) if isinstance(value, BytesIO) else repr(value)


def content(path: str) -> dict[str, Any]:
    """Returns what a checkpoint contains of an engine, independent of the ranks that wrote it: every tensor by key, and
    the state."""
    checkpoint = zckpt.open(path)
    frozen_content: dict[str, Any] = frozen({**checkpoint.load(), "": checkpoint.state["engine"]})
    return frozen_content


def place_of(data: torch.Tensor | FileRange | None) -> str | int:
    """Returns the path of the swap file, or the address of the tensor's storage."""
    assert data is not None
    return data.path if isinstance(data, FileRange) else data.untyped_storage().data_ptr()


def found_problems(restoring: Restoring) -> bool:
    """Returns whether the state cannot be restored."""
    try:
        return bool(restoring.problems())
    except zckpt.FormatError:
        return True


def keys_of(names: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{part}/{name}" for part, names_of_part in names.items() for name in names_of_part}


def range_of(fragment: Fragment) -> tuple[str, Span]:
    """Returns the key and the elements of a fragment."""
    return fragment.key, fragment.span


def rank_of(engine: Any) -> int:
    return torch.distributed.get_rank(group_of(engine)) if torch.distributed.is_initialized() else 0


def group_size(engine: Any) -> int:
    return torch.distributed.get_world_size(group_of(engine)) if torch.distributed.is_initialized() else 1
