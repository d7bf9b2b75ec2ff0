"""What every adapter of a training engine has to do: a test class for it derives from ``EngineContract``."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import zckpt
from zckpt.engines import adapt, group_of
from zckpt.engines.contract import Selection
from zckpt.plan.reshard import Span
from zckpt.plan.select import part_of
from zckpt.reading.checkpoint import Want
from zckpt.state.inventory import BUFFER, GRADIENT, MASTER, PARAM, FileSpan, Fragment
from zckpt.storage.schemes import open_store
from zckpt.transfer.devices import synchronize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zckpt.engines.contract import Restoring

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

    Define ``backward``, ``generators``, ``make_resized`` and ``make_unlike`` too, if the framework allows it. A test
    that needs one that is not defined is skipped.
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
    def backward(cls, engine: Any) -> None:
        """A forward and backward pass: leaves gradients in the engine that no optimizer step has used yet."""
        raise NotImplementedError

    @classmethod
    def generators(cls, engine: Any) -> Mapping[str, Any]:
        """The states of the random generators that ``seed`` and the rank decide. ``held`` has them too."""
        raise NotImplementedError

    @classmethod
    def make_resized(cls, seed: int) -> Any:
        """As ``make``, but one of the trained weights has another shape, and there is one more of them."""
        raise NotImplementedError

    @classmethod
    def make_unlike(cls, seed: int) -> Any:
        """As ``make``, with the same tensors, but the state of ``make`` does not fit: it has another scheduler, for
        instance."""
        raise NotImplementedError

    @classmethod
    def _defines(cls, name: str) -> bool:
        return any(name in vars(one) for one in cls.__mro__[: cls.__mro__.index(EngineContract)])

    @classmethod
    def _needs(cls, name: str) -> None:
        """Skips a test where the class does not define this method."""
        if not cls._defines(name):
            pytest.skip(f"{cls.__name__} does not define {name}()")

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
        assert zckpt.open(written.path).step == BEFORE

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
            assert keys_of(restored) == chosen
            zckpt.write(engine, own, overwrite=True)
            after = content(own)
            differ = [key for key in before if after[key] != (source if key in chosen else before)[key]]
            assert not differ, f"after {part} alone was restored"

    def test_what_fits_in_part_is_restored_in_part(self, run: Run, written: Written) -> None:
        self._needs("make_resized")
        run(self._restore_what_fits, self.ranks, written.path, f"{written.path}-resized")

    @classmethod
    def _restore_what_fits(cls, path: str, own: str) -> None:
        engine, source = cls.make_resized(1), content(path)
        cls.train(engine, 1)
        parts = adapt(engine).parts

        def all_of_it() -> dict[str, Any]:
            zckpt.write(engine, own, parts=parts, overwrite=True)
            return content(own)

        before = all_of_it()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one says that the checkpoint fits in part
            found = zckpt.restore(engine, path, strict=False)
        after = all_of_it()
        masters = [key.partition("/")[2] for key in before if part_of(key) == MASTER]
        derived = {f"{PARAM}/{name}" for name in masters}
        tensors, stored = before.keys() - derived - {""}, source.keys() - {""}
        fits = {key for key in tensors & stored if before[key][:2] == source[key][:2]}
        misfits = {key for key in tensors - fits if part_of(key) == MASTER}
        assert {key in stored for key in misfits} == {True, False}, "no weight is missing, or none has another shape"
        assert keys_of(found.restored) == fits
        assert keys_of(found.kept) == tensors - fits
        assert keys_of(found.unexpected) == stored - fits
        kept = (tensors - fits) | (before.keys() & {f"{PARAM}/{key.partition('/')[2]}" for key in misfits})
        assert not [key for key in kept if after[key] != before[key]], "kept tensors have changed"
        assert not [key for key in fits if after[key] != source[key]], "restored tensors are not the checkpoint's"
        values = zckpt.open(own).load()
        for name in masters if PARAM in parts else ():
            param = values[f"{PARAM}/{name}"]
            assert frozen(values[f"{MASTER}/{name}"].to(param.dtype)) == frozen(param)
        cls.train(engine, 1)
        trained = all_of_it()
        for keys in (misfits, fits - misfits):
            assert any(trained[key] != after[key] for key in keys if part_of(key) == MASTER), "it does not train on"

    def test_a_state_that_does_not_fit_is_refused(self, run: Run, written: Written) -> None:
        self._needs("make_unlike")
        run(self._refuse_state, self.ranks, written.path)

    @classmethod
    def _refuse_state(cls, path: str) -> None:
        engine = cls.make_unlike(1)
        cls.train(engine, 1)
        before = frozen(cls.held(engine))
        with pytest.raises((zckpt.MismatchError, zckpt.RankError)):
            zckpt.restore(engine, path)
        assert frozen(cls.held(engine)) == before
        assert not zckpt.restore(engine, path, state=()).kept, "tensors do not fit either"

    def test_random_generators_are_restored_if_asked_for(self, run: Run, written: Written) -> None:
        self._needs("generators")
        run(self._restore_generators, self.ranks, written.path)

    @classmethod
    def _restore_generators(cls, path: str) -> None:
        engine = cls.make(1)
        rank_state = zckpt.open(path).rank_state(rank_of(engine), lazy=True)
        before = frozen(cls.generators(engine))
        for rng in (False, True):
            adapter = adapt(engine)
            adapter.refuse_unsupported(drop_gradients=True)
            selection = Selection(
                stored={}, wanted=(), restored=(), kept=(), state={}, rank_state=rank_state, rng=rng
            )  # fmt: skip
            restoring = adapter.restoring(selection)
            assert restoring.problems() == []
            assert not any(restoring.fill())
            restoring.set_state()
            restoring.finish()
            assert (frozen(cls.generators(engine)) != before) == rng

    # The adapter, call by call

    def test_what_the_adapter_says_of_the_engine(self, run: Run) -> None:
        run(self._describe, self.ranks)

    @classmethod
    def _describe(cls) -> None:
        engine = cls.make(0)
        for steps in (0, BEFORE):
            cls.train(engine, steps)
            adapter = adapt(engine)
            adapter.refuse_unsupported()
            assert adapter.step == steps
        assert adapter.trains
        assert set(adapter.state()) >= set(adapter.trees)
        assert set(adapter.parts) >= {fragment.part for fragment in adapter.inventory(None).fragments}
        for part in adapter.parts:
            fragments = adapter.inventory([part]).fragments
            assert {fragment.part for fragment in fragments} <= {part}
            used = {f.data.device for f in fragments if isinstance(f.data, torch.Tensor)}
            assert used <= set(adapter.devices)
        with pytest.raises(ValueError, match="no_such_part") as raised:
            adapter.inventory([*adapter.parts, "no_such_part"])
        assert all(part in str(raised.value) for part in adapter.parts)

    def test_memory_has_all_places_of_the_state(self, run: Run) -> None:
        run(self._look_at_memory, self.ranks)

    @classmethod
    def _look_at_memory(cls) -> None:
        engine = cls.make(0)
        for steps in (0, 1):
            cls.train(engine, steps)
            before = frozen(cls.held(engine))
            adapter = adapt(engine)
            adapter.refuse_unsupported()
            memory = list(adapter.memory())
            assert frozen(cls.held(engine)) == before
            tensors = [(one.data, one.dtype) for one in memory if isinstance(one.data, torch.Tensor)]
            assert all(tensor.numel() and tensor.dtype == dtype for tensor, dtype in tensors)
            places = {(one.part, place_of(one.data)) for one in memory}
            fragments = [f for f in adapter.inventory(adapter.parts).fragments if f.start < f.stop]
            assert {(f.part, place_of(f.data)) for f in fragments} <= places
        if cls._defines("backward"):
            cls.backward(engine)
            assert any(one.part == GRADIENT for one in adapt(engine).memory())

    def test_what_moves_to_disk_comes_back(self, run: Run, written: Written) -> None:
        found = run(self._move_to_disk, self.ranks, f"{written.path}-scratch")
        assert found == [[before, later] for before, _, later in written.held]

    @classmethod
    def _move_to_disk(cls, directory: str) -> list[Any]:
        engine = cls.make(0)
        cls.train(engine, BEFORE)
        assert zckpt.offload(engine, directory).parts
        assert set(adapt(engine).parts) >= {fragment.part for fragment in adapt(engine).inventory(None).fragments}
        with pytest.raises(zckpt.OffloadedError):
            cls.train(engine, 1)
        zckpt.reload(engine)
        before = frozen(cls.held(engine))
        for part in zckpt.offload(engine, directory, auto=True).parts:
            if part != MASTER:
                zckpt.reload(engine, [part])
        cls.train(engine, AFTER)
        return [before, frozen(cls.held(engine))]

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
            unknown = {MASTER: ["no such name"], "no_such_part": ["no such name"]}
            assert adapter.unexpected(unknown) == [f"{part}/no such name" for part in unknown]
            selection = Selection(
                stored=names, wanted=wanted, restored=set(checkpoint), kept=frozenset(), rng=True,
                state=checkpoint.state["engine"], rank_state=checkpoint.rank_state(rank, lazy=True),
            )  # fmt: skip
            for tree in adapter.trees:
                value = selection.state[tree]
                wrong: list[Any] = [{}, ["no tree"], *([] if value is None else [None])]
                for strange in wrong:
                    other = adapter.restoring(replace(selection, state={**selection.state, tree: strange}))
                    if not found_problems(other):
                        assert strange is None, f"{tree} of a state that is restored is {strange}"
                        for _ in other.fill():
                            pass
                        other.set_state()
            restoring = adapter.restoring(selection)
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
        assert adapter.step == checkpoint.step
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

    def test_gradients_are_refused_or_dropped(self, run: Run, written: Written) -> None:
        """A write drops them from what it writes, a restore from the engine."""
        self._needs("backward")
        refused = f"{written.path}-refused"
        resumed = run(self._drop_gradients, self.ranks, written.path, refused, f"{written.path}-dropped")
        assert open_store(refused).entries() is None
        assert resumed == [[before, end] for before, _, end in written.held]

    @classmethod
    def _drop_gradients(cls, path: str, refused: str, dropped: str) -> list[Any]:
        engine = cls.make(1)
        cls.train(engine, 1)
        cls.backward(engine)
        before = frozen(cls.held(engine))
        with pytest.raises((zckpt.UnsupportedError, zckpt.RankError)):
            zckpt.write(engine, refused)
        assert frozen(cls.held(engine)) == before
        zckpt.write(engine, dropped, pending_gradients="drop")
        assert frozen(cls.held(engine)) == before
        with pytest.raises(zckpt.UnsupportedError):
            adapt(engine).refuse_unsupported()  # they are still there
        zckpt.restore(engine, path, rng=True)
        adapt(engine).refuse_unsupported()
        restored = frozen(cls.held(engine))
        cls.train(engine, AFTER)
        return [restored, frozen(cls.held(engine))]


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


def place_of(data: torch.Tensor | FileSpan | None) -> str | int:
    """The file, or the address of the storage."""
    assert data is not None
    return data.path if isinstance(data, FileSpan) else data.untyped_storage().data_ptr()


def found_problems(restoring: Restoring) -> bool:
    try:
        return bool(restoring.problems())
    except zckpt.FormatError:
        return True


def keys_of(names: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{part}/{name}" for part, own in names.items() for name in own}


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
