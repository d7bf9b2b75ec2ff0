"""The contract of the adapter of a training engine as a test suite. The tests of an adapter derive from
``EngineContract``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import zckpt
from zckpt.engines import adapt
from zckpt.engines.contract import Selection
from zckpt.plan.inventory import MASTER, PARAM
from zckpt.plan.select import part_of
from zckpt.testing.adapter_contract import AdapterContract
from zckpt.testing.engine_definition import (
    AFTER,
    BEFORE,
    Run,
    Written,
    content,
    frozen,
    keys_of,
    rank_of,
)


class EngineContract(AdapterContract):
    """The tests that every adapter of a training engine must pass.

    Derive a test class from it, in a module that can be imported, and define ``make``, ``train`` and ``held``:

        class TestMyEngine(EngineContract):
            @classmethod
            def make(cls, seed): return MyEngine(seed=seed)
            @classmethod
            def train(cls, engine, steps): engine.train(steps)
            @classmethod
            def held(cls, engine): return engine.state_dict()

    The tests call these methods on each rank. With one rank, everything runs in the process of the test. For more
    ranks, override the fixture ``run``.

    Also define ``backward``, ``generators``, ``make_resized`` and ``make_unlike`` if the framework allows it. A test is
    skipped if it needs a method that is not defined.
    """

    # Whole runs

    def test_what_is_resumed_goes_on_as_what_never_stopped(self, run: Run, written: Written) -> None:
        """A run that is resumed from a checkpoint holds the same values, bit for bit, as a run that never stopped."""
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
        """A checkpoint that is restored into another number of ranks, and written from there, has the same tensors and
        state."""
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
        """``zckpt.restore(parts=[part])`` changes this part and no other part."""
        run(self._restore_parts, self.ranks, written.path, f"{written.path}-parts")

    @classmethod
    def _restore_parts(cls, path: str, target: str) -> None:
        engine, source = cls.make(1), content(path)
        cls.train(engine, 1)
        zckpt.write(engine, target)
        for part in zckpt.open(path).parts:
            before = content(target)
            chosen = {key for key in before if key.startswith(f"{part}/")}
            assert part == PARAM or any(before[key] != source[key] for key in chosen), "nothing differs"
            restored = zckpt.restore(engine, path, parts=[part]).restored
            assert keys_of(restored) == chosen
            zckpt.write(engine, target, overwrite=True)
            after = content(target)
            differ = [key for key in before if after[key] != (source if key in chosen else before)[key]]
            assert not differ, f"after {part} alone was restored"

    def test_what_fits_in_part_is_restored_in_part(self, run: Run, written: Written) -> None:
        """``zckpt.restore(strict=False)`` restores the tensors that fit, keeps all others, and reports both."""
        self._needs("make_resized")
        run(self._restore_what_fits, self.ranks, written.path, f"{written.path}-resized")

    @classmethod
    def _restore_what_fits(cls, path: str, target: str) -> None:
        engine, source = cls.make_resized(1), content(path)
        cls.train(engine, 1)
        parts = adapt(engine).parts

        def written_content() -> dict[str, Any]:
            zckpt.write(engine, target, parts=parts, overwrite=True)
            return content(target)

        before = written_content()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one warning says that only a part of the checkpoint fits
            result = zckpt.restore(engine, path, strict=False)
        after = written_content()
        masters = [key.partition("/")[2] for key in before if part_of(key) == MASTER]
        derived = {f"{PARAM}/{name}" for name in masters}
        tensors, stored = before.keys() - derived - {""}, source.keys() - {""}
        fits = {key for key in tensors & stored if before[key][:2] == source[key][:2]}
        misfits = {key for key in tensors - fits if part_of(key) == MASTER}
        assert {key in stored for key in misfits} == {True, False}, "no weight is missing, or none has another shape"
        assert keys_of(result.restored) == fits
        assert keys_of(result.kept) == tensors - fits
        assert keys_of(result.unexpected) == stored - fits
        kept = (tensors - fits) | (before.keys() & {f"{PARAM}/{key.partition('/')[2]}" for key in misfits})
        assert not [key for key in kept if after[key] != before[key]], "kept tensors have changed"
        assert not [key for key in fits if after[key] != source[key]], "restored tensors are not the checkpoint's"
        values = zckpt.open(target).load()
        for name in masters if PARAM in parts else ():
            param = values[f"{PARAM}/{name}"]
            assert frozen(values[f"{MASTER}/{name}"].to(param.dtype)) == frozen(param)
        cls.train(engine, 1)
        trained = written_content()
        for keys in (misfits, fits - misfits):
            assert any(trained[key] != after[key] for key in keys if part_of(key) == MASTER), "it does not train on"

    def test_a_state_that_does_not_fit_is_refused(self, run: Run, written: Written) -> None:
        """If the non-tensor state does not fit, ``zckpt.restore`` raises an error and changes nothing."""
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
        """A restore sets the random generators only if ``rng`` is true."""
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
                stored={}, wanted=(), restored={}, kept=(), state={}, rank_state=rank_state, rng=rng
            )  # fmt: skip
            restoring = adapter.restoring(selection)
            assert restoring.problems() == []
            for batch in restoring.fill():
                assert not batch.urgent
                assert not batch.others
                batch.after_urgent()
            restoring.set_state()
            restoring.finish()
            assert (frozen(cls.generators(engine)) != before) == rng
