"""What every adapter of a training engine has to do: a test class for it derives from ``EngineContract``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import zckpt
from zckpt.engines import adapt, group_of
from zckpt.engines.contract import Selection
from zckpt.plan.reshard import Span
from zckpt.reading.checkpoint import Want
from zckpt.state.inventory import BUFFER, MASTER, PARAM, Fragment
from zckpt.storage.schemes import open_store
from zckpt.transfer.devices import synchronize

if TYPE_CHECKING:
    from collections.abc import Iterator

BEFORE, AFTER = 3, 2
TURN_SECONDS = 60
"""How long a rank waits for the others to do what they have to do alone."""

Run = Callable[..., list[Any]]


class Written(NamedTuple):
    """A checkpoint, and on each rank what was held before its write, after it, and ``AFTER`` steps later."""

    path: str
    held: list[list[Any]]


class EngineContract:
    """Derive a test class from it, in a module that can be imported, and define ``make``, ``train`` and ``held``:

        class TestMyEngine(EngineContract):
            @classmethod
            def make(cls, seed): return MyEngine(seed=seed)
            @classmethod
            def train(cls, engine, steps): engine.train(steps)
            @classmethod
            def held(cls, engine): return engine.state_dict()

    They are called on each rank. With one rank, all of it runs in the test's process. For more, override ``run``.
    """

    ranks = 1
    """How many ranks train, write and restore."""
    other_ranks: tuple[int, ...] = ()
    """Other numbers of ranks, into which a checkpoint of ``ranks`` is restored too."""

    @classmethod
    def make(cls, seed: int) -> Any:
        """A new engine on this rank. ``seed`` decides the values of what it trains, and its random generators."""
        raise NotImplementedError

    @classmethod
    def train(cls, engine: Any, steps: int) -> None:
        """Trains so many steps. What data a step sees is decided by the rank, the number of steps that the engine has
        taken, and its random generators."""
        raise NotImplementedError

    @classmethod
    def held(cls, engine: Any) -> Mapping[Any, Any]:
        """All that this rank holds and that decides how training goes on: tensors and plain values, found without
        zckpt. May be collective."""
        raise NotImplementedError

    @classmethod
    def spoil(cls, engine: Any) -> None:
        """Has the engine do something after which it cannot be written, such as a backward pass without its step."""
        pytest.skip("the engine can always be written")

    @pytest.fixture(scope="class", name="run")
    @classmethod
    def _run(cls) -> Run:
        """``run(function, ranks, *arguments)`` calls a function on so many ranks, with ``torch.distributed``
        initialised where these are several, and returns their results. Functions and results can be pickled."""

        def here(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
            assert ranks == 1, "a fixture `run` has to start the ranks"
            return [function(*arguments)]

        return here

    @pytest.fixture(scope="class", name="written")
    @classmethod
    def _written(cls, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Written:
        path = str(tmp_path_factory.mktemp("run") / "c")
        return Written(path, run(cls._write, cls.ranks, path))

    # Whole runs

    def test_what_is_resumed_goes_on_as_what_never_stopped(self, run: Run, written: Written) -> None:
        resumed = run(self._restore, self.ranks, written.path)
        for (before, after, end), (other, restored, other_end) in zip(written.held, resumed, strict=True):
            assert before == after, "the write has changed the engine"
            assert before != end, "training changes nothing"
            assert before != other, "another seed makes the same engine"
            assert restored == before
            assert other_end == end
        assert zckpt.validate(written.path).ok

    @classmethod
    def _write(cls, path: str) -> list[Any]:
        engine = cls.make(0)
        cls.train(engine, BEFORE)
        held = [frozen(cls.held(engine))]
        zckpt.write(engine, path, client_state={"epoch": 3})
        held.append(frozen(cls.held(engine)))
        cls.train(engine, AFTER)
        return [*held, frozen(cls.held(engine))]

    @classmethod
    def _restore(cls, path: str) -> list[Any]:
        engine = cls.make(1)
        cls.train(engine, 1)
        held = [frozen(cls.held(engine))]
        restored = zckpt.restore(engine, path, rng=True)
        assert restored == {"epoch": 3}
        assert not restored.kept
        assert not restored.unexpected
        held.append(frozen(cls.held(engine)))
        cls.train(engine, AFTER)
        return [*held, frozen(cls.held(engine))]

    def test_other_numbers_of_ranks_hold_the_same(self, run: Run, written: Written) -> None:
        """And write it: what they write is the same, tensor by tensor, and as to the state."""
        for ranks in self.other_ranks:
            other = f"{written.path}-{ranks}"
            run(self._move, ranks, written.path, other)
            assert content(other) == content(written.path)

    @classmethod
    def _move(cls, path: str, other: str) -> None:
        engine = cls.make(1)
        zckpt.restore(engine, path)
        zckpt.write(engine, other)

    # Parts

    def test_a_part_is_restored_alone(self, run: Run, written: Written) -> None:
        run(self._restore_parts, self.ranks, written.path, f"{written.path}-parts")

    @classmethod
    def _restore_parts(cls, path: str, own: str) -> None:
        engine, source = cls.make(1), content(path)
        cls.train(engine, 1)
        zckpt.write(engine, own)
        for part in zckpt.open(path).parts:
            before = content(own)
            chosen = {key for key in before if key.startswith(f"{part}/")}
            assert part == PARAM or any(before[key] != source[key] for key in chosen), "nothing differs"
            restored = zckpt.restore(engine, path, parts=[part]).restored
            assert {f"{part}/{name}" for part, names in restored.items() for name in names} == chosen
            zckpt.write(engine, own, overwrite=True)
            after = content(own)
            differ = [key for key in before if after[key] != (source if key in chosen else before)[key]]
            assert not differ, f"after {part} alone was restored"

    # The adapter, call by call

    def test_each_rank_restores_alone_until_it_finishes(self, run: Run, written: Written) -> None:
        """Nothing but ``finish`` is collective: rank by rank, each does all the rest while the others do nothing."""
        turns = f"{written.path}-turns"
        open_store(turns).make_directories("")
        found = run(self._restore_in_turn, self.ranks, written.path, turns)
        for (held, _), (before, *_) in zip(found, written.held, strict=True):
            assert held == before
        places = [wanted for _, wanted in found]
        keys = [[fragment.key for fragment in wanted] for wanted in places]
        assert keys == [keys[0]] * len(keys), "the ranks want different keys"
        assert set(keys[0]) == set(zckpt.open(written.path))
        spans = sorted(span_of(fragment) for wanted in places for fragment in wanted)
        for key, parts in groupby(spans, lambda span: span[0]):
            reached = 0
            for _, start, stop in parts:
                assert start <= reached, f"no rank wants the elements of {key} from {reached} to {start}"
                reached = max(reached, stop)
            assert reached == math.prod(zckpt.open(written.path)[key].shape)

    @classmethod
    def _restore_in_turn(cls, path: str, turns: str) -> tuple[Any, list[Fragment]]:
        engine = cls.make(1)
        cls.train(engine, 1)
        checkpoint = zckpt.open(path)
        names: dict[str, dict[str, torch.dtype]] = {}
        for info in checkpoint.values():
            names.setdefault(info.part, {})[info.name] = info.dtype
        with _turn(engine, turns) as rank:
            adapter = adapt(engine)
            adapter.refuse_unsupported(drop_gradients=True)
            wanted = adapter.wanted(names)
            assert wanted == adapter.wanted(names), "asking changes something"
            assert all(fragment.data is None for fragment in wanted)
            assert {f.key for f in wanted if f.part in (MASTER, PARAM)} <= {f.key for f in adapter.wanted({})}
            assert adapter.unexpected(names) == []
            strange = {MASTER: ["no such name"], "no_such_part": ["no such name"]}
            assert adapter.unexpected(strange) == [f"{part}/no such name" for part in strange]
            restoring = adapter.restoring(
                Selection(
                    stored=names, wanted=wanted, restored=set(checkpoint), kept=frozenset(), rng=True,
                    state=checkpoint.state["engine"], rank_state=checkpoint.rank_state(rank, lazy=True),
                )
            )  # fmt: skip
            assert restoring.problems() == []
            filled = []
            for batch in restoring.fill():
                for f in batch:
                    data = f.data
                    assert isinstance(data, torch.Tensor)
                    assert data.shape == (f.stop - f.start,)
                    assert data.is_contiguous()
                    want = Want(checkpoint[f.key], [Span(f.start, f.stop, 0)], data)
                    checkpoint.read([want], rank=rank)
                    filled += [span_of(f)] if data.numel() else []
            assert sorted(filled) == sorted(span for span in map(span_of, wanted) if span[1] < span[2])
            restoring.set_state()
        _wait_for(turns, group_size(engine))
        restoring.finish()
        synchronize(adapter.devices)
        return frozen(cls.held(engine)), list(wanted)

    def test_a_fill_that_is_given_up_can_be_begun_again(self, run: Run, written: Written) -> None:
        resumed = run(self._restore_again, self.ranks, written.path)
        assert resumed == [before for before, *_ in written.held]

    @classmethod
    def _restore_again(cls, path: str) -> Any:
        engine = cls.make(1)
        cls.train(engine, 1)
        read = zckpt.Checkpoint.read

        def fail(*arguments: Any, **options: Any) -> None:
            read(*arguments, **options)
            raise MemoryError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zckpt.Checkpoint, "read", fail)
            with pytest.raises((MemoryError, zckpt.RankError)):
                zckpt.restore(engine, path)
        zckpt.restore(engine, path, rng=True)
        return frozen(cls.held(engine))

    def test_before_change_comes_once_before_the_next_step(self, run: Run) -> None:
        run(self._wait_for_a_step, self.ranks)

    @classmethod
    def _wait_for_a_step(cls) -> None:
        engine = cls.make(0)
        cls.train(engine, 1)
        adapter = adapt(engine)
        adapter.refuse_unsupported()
        adapter.refuse_lazy()
        live = {f.key: f.data for f in adapter.inventory(None).fragments if f.part not in (PARAM, BUFFER)}
        tensors = {key: data for key, data in live.items() if isinstance(data, torch.Tensor)}
        before = frozen(tensors)
        seen: list[Any] = []
        adapter.before_change(lambda: seen.append(frozen(tensors)))
        assert seen == []
        cls.train(engine, 1)
        assert seen == [before]
        assert frozen(tensors) != before or not any(tensor.numel() for tensor in tensors.values())
        cls.train(engine, 1)
        assert seen == [before]

    def test_what_cannot_be_written_is_refused_before_anything_is_touched(self, run: Run, written: Written) -> None:
        path = f"{written.path}-refused"
        run(self._refuse, self.ranks, path)
        assert open_store(path).entries() is None

    @classmethod
    def _refuse(cls, path: str) -> None:
        engine = cls.make(0)
        cls.train(engine, 1)
        cls.spoil(engine)
        before = frozen(cls.held(engine))
        with pytest.raises((zckpt.UnsupportedError, zckpt.RankError)):
            zckpt.write(engine, path)
        assert frozen(cls.held(engine)) == before


def frozen(value: Any) -> Any:
    """The same as plain values: equal ones are equal bit for bit."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return str(data.dtype), tuple(data.shape), data.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: frozen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(one) for one in value]
    return repr(value)


def content(path: str) -> dict[str, Any]:
    """What a checkpoint says of an engine, whatever wrote it: every tensor by key, and the state."""
    checkpoint = zckpt.open(path)
    found: dict[str, Any] = frozen({**checkpoint.load(), "": checkpoint.state["engine"]})
    return found


def span_of(fragment: Fragment) -> tuple[str, int, int]:
    return fragment.key, fragment.start, fragment.stop


def rank_of(engine: Any) -> int:
    return torch.distributed.get_rank(group_of(engine)) if torch.distributed.is_initialized() else 0


def group_size(engine: Any) -> int:
    return torch.distributed.get_world_size(group_of(engine)) if torch.distributed.is_initialized() else 1


@contextmanager
def _turn(engine: Any, turns: str) -> Iterator[int]:
    """Inside of it this rank, whose number it gives, does something while the others wait."""
    rank = rank_of(engine)
    _wait_for(turns, rank)
    yield rank
    open_store(turns).put(str(rank), b"")


def _wait_for(turns: str, count: int) -> None:
    """Until so many ranks have had their turn."""
    deadline = time.monotonic() + TURN_SECONDS
    while len(open_store(turns).entries() or ()) < count:
        assert time.monotonic() < deadline, "a rank waits for others in what is not collective"
        time.sleep(0.01)
