"""Tests of each method that every adapter of a training engine has."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.loader import Loader, ReadRequest
from zckpt.engines import adapt
from zckpt.engines.contract import Selection
from zckpt.plan.inventory import BUFFER, GRADIENT, MASTER, PARAM, Fragment
from zckpt.storage.schemes import open_store
from zckpt.testing.engine_definition import (
    AFTER,
    BEFORE,
    EngineDefinition,
    Run,
    Written,
    found_problems,
    frozen,
    group_size,
    place_of,
    range_of,
    rank_of,
)
from zckpt.transfer.devices import synchronize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zckpt.engines.contract import Stored

TURN_SECONDS = 300
"""How long a rank waits until the other ranks have done their steps alone, in seconds."""


class AdapterContract(EngineDefinition):
    """The tests of ``EngineContract`` that call the adapter directly, or that use it in a way in which no public
    function uses it."""

    def test_what_the_adapter_says_of_the_engine(self, run: Run) -> None:
        """``step``, ``trains``, ``trees``, ``parts`` and ``devices`` describe the engine, and ``inventory`` refuses an
        unknown part."""
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

    def test_ranks_can_tell_engines_apart(self, run: Run) -> None:
        """``sample`` is equal on all ranks of an engine, and another engine has another one."""
        samples = run(self._sample, self.ranks)
        assert samples == [samples[0]] * self.ranks
        first, second = samples[0]
        assert first != second

    @classmethod
    def _sample(cls) -> list[Mapping[str, bytes]]:
        engines = [cls.make(seed) for seed in (0, 1)]
        for engine in engines:
            cls.train(engine, BEFORE)
        return [adapt(engine).sample() for engine in engines]

    def test_memory_has_all_places_of_the_state(self, run: Run) -> None:
        """``memory`` returns every storage and swap file of ``inventory``, and gradients, and changes nothing."""
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
            tensors = [(holding.data, holding.dtype) for holding in memory if isinstance(holding.data, torch.Tensor)]
            assert all(tensor.numel() and tensor.dtype == dtype for tensor, dtype in tensors)
            places = {(holding.part, place_of(holding.data)) for holding in memory}
            fragments = [f for f in adapter.inventory(adapter.parts).fragments if f.span.numel]
            assert {(f.part, place_of(f.data)) for f in fragments} <= places
        if cls._defines("backward"):
            cls.backward(engine)
            assert any(holding.part == GRADIENT for holding in adapt(engine).memory())

    def test_what_moves_to_disk_comes_back(self, run: Run, written: Written) -> None:
        """``zckpt.offload`` and ``zckpt.reload`` do not change the training, and an offloaded engine refuses to
        train."""
        if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
            pytest.skip("zckpt.offload needs torch 2.13")
        states = run(self._move_to_disk, self.ranks, f"{written.path}-scratch")
        assert states == [[before, later] for before, _, later in written.held]

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
        """Only ``finish`` is collective: each rank in turn calls all other methods of a restore, while the other ranks
        wait."""
        turns = f"{written.path}-turns"
        results = run(self._restore_in_turn, self.ranks, written.path, turns)
        for (held, _), (before, *_) in zip(results, written.held, strict=True):
            assert held == before
        wanted = [fragments for _, fragments in results]
        keys = [[fragment.key for fragment in fragments] for fragments in wanted]
        assert keys == [keys[0]] * len(keys), "the ranks want different keys"
        assert set(keys[0]) == set(zckpt.open(written.path))
        ranges = sorted(range_of(fragment) for fragments in wanted for fragment in fragments)
        for key, parts in groupby(ranges, lambda key_range: key_range[0]):
            reached = 0
            for _, (_, start, stop) in parts:
                assert start <= reached, f"no rank wants the elements of {key} from {reached} to {start}"
                reached = max(reached, stop)
            assert reached == math.prod(zckpt.open(written.path)[key].shape)

    @classmethod
    def _restore_in_turn(cls, path: str, turns: str) -> tuple[Any, list[Fragment]]:
        engine = cls.make(1)
        cls.train(engine, 1)
        checkpoint = open_loader(path)
        names: dict[str, dict[str, Stored]] = {}
        for info in checkpoint.contents.values():
            names.setdefault(info.part, {})[info.name] = info
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
                stored=names, wanted=wanted, restored=names, kept=frozenset(), rng=True,
                state=checkpoint.state["engine"], rank_state=checkpoint.rank_state(rank, lazy=True),
            )  # fmt: skip
            for tree in adapter.trees:
                value = selection.state[tree]
                wrong: list[Any] = [{}, ["no tree"], *([] if value is None else [None])]
                for strange in wrong:
                    other = adapter.restoring(replace(selection, state={**selection.state, tree: strange}))
                    if not found_problems(other):
                        assert strange is None, f"{tree} of a state that is restored is {strange}"
                        for batch in other.fill():
                            batch.after_urgent()
                        other.set_state()
            restoring = adapter.restoring(selection)
            assert restoring.problems() == []
            filled = []
            for batch in restoring.fill():
                for fragments, after in ((batch.urgent, batch.after_urgent), (batch.others, lambda: None)):
                    for f in fragments:
                        data = f.data
                        assert isinstance(data, torch.Tensor)
                        assert data.numel() == f.span.numel
                        assert data.is_contiguous()
                        request = ReadRequest(checkpoint.contents[f.key], f.span, data)
                        checkpoint.read([request], rank=rank)
                        filled += [range_of(f)] if data.numel() else []
                    after()
            assert sorted(filled) == sorted(range_of(fragment) for fragment in wanted if fragment.span.numel)
            restoring.set_state()
        _wait_for(turns, group_size(engine))
        restoring.finish()
        synchronize(adapter.devices)
        assert adapter.step == checkpoint.manifest.step
        return frozen(cls.held(engine)), list(wanted)

    def test_a_fill_that_is_given_up_can_be_begun_again(self, run: Run, written: Written) -> None:
        """If ``fill`` is closed early, the next restore into the same engine succeeds."""
        resumed = run(self._restore_again, self.ranks, written.path)
        assert resumed == [before for before, *_ in written.held]

    @classmethod
    def _restore_again(cls, path: str) -> Any:
        engine = cls.make(1)
        cls.train(engine, 1)
        read = Loader.read

        def fail(*arguments: Any, **options: Any) -> None:
            read(*arguments, **options)
            raise MemoryError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loader, "read", fail)
            with pytest.raises((MemoryError, zckpt.RankError)):
                zckpt.restore(engine, path)
        zckpt.restore(engine, path, rng=True)
        return frozen(cls.held(engine))

    def test_before_change_comes_once_before_the_next_step(self, run: Run) -> None:
        """``before_change`` calls its action once, before the next optimizer step changes masters and moments."""
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
        """A write refuses pending gradients, or leaves them out. A restore removes them from the engine."""
        self._needs("backward")
        refused = f"{written.path}-refused"
        resumed = run(self._drop_gradients, self.ranks, written.path, refused, f"{written.path}-dropped")
        assert open_store(refused).entry("") is None
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
            adapt(engine).refuse_unsupported()  # the gradients are still there
        zckpt.restore(engine, path, rng=True)
        adapt(engine).refuse_unsupported()
        restored = frozen(cls.held(engine))
        cls.train(engine, AFTER)
        return [restored, frozen(cls.held(engine))]


@contextmanager
def _turn(engine: Any, turns: str) -> Iterator[int]:
    """Returns a context that the ranks enter one after the other, each when the one before has left it. Its value is
    the number of this rank."""
    rank = rank_of(engine)
    _wait_for(turns, rank)
    yield rank
    open_store(turns).put(str(rank), b"")


def _wait_for(turns: str, count: int) -> None:
    """Waits until ``count`` ranks have had their turn."""
    deadline = time.monotonic() + TURN_SECONDS
    while len(open_store(turns).entries() or ()) < count:
        assert time.monotonic() < deadline, "a rank waits for others in what is not collective"
        time.sleep(0.01)
