"""Compares the directory of a run with a model, through any sequence of writes, overwrites, failures and removals."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import zckpt
from tests.support.independent_reader import Reader
from tests.support.states import Written, fragment, same_all, write_state
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.format import names
from zckpt.plan import catalog
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

TAGS = st.sampled_from(["a", "b", "c"])
SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (3,), (2, 3), (1100,)]), min_size=1, max_size=3)
LAYOUTS = st.sampled_from(["zero3", "random"])


@dataclass(frozen=True)
class Stored:
    """The facts that the model has of a checkpoint."""

    written: Written
    step: int


class Run(RuleBasedStateMachine):
    """The model.

    ``stored`` and ``latest`` say what the directory should contain. ``lost`` has the tags of checkpoints that have all
    of their data and no manifest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.path = self.root / "run"
        self.stored: dict[str, Stored] = {}
        self.lost: set[str] = set()
        self.latest: str | None = None
        self.opened: tuple[zckpt.Checkpoint, Stored, str] | None = None
        self.step = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize()
    def empty(self) -> None:
        self.path.mkdir()

    @rule(
        tag=TAGS, ranks=st.integers(1, 3), shapes=SHAPES, layout=LAYOUTS, latest=st.booleans(), overwrite=st.booleans()
    )
    def write(
        self, tag: str, ranks: int, shapes: Sequence[tuple[int, ...]], layout: str, latest: bool, overwrite: bool
    ) -> None:
        self.step += 1
        tensors = {f"t{i}": shape for i, shape in enumerate(shapes)}

        def write() -> Written:
            return write_state(
                self.path / tag, ranks, tensors, parts=("master",), layout=layout, latest=latest, overwrite=overwrite,
                step=self.step, seed=self.step, client_state={"seen": torch.tensor(self.step)},
            )  # fmt: skip

        if (tag in self.stored or tag in self.lost) and not overwrite:
            with pytest.raises(zckpt.CheckpointExistsError):
                write()
            return
        self.stored[tag] = Stored(write(), self.step)
        self.lost.discard(tag)
        if latest:
            self.latest = tag

    @rule(tag=TAGS, ranks=st.integers(0, 2), committed=st.booleans())
    def fail(self, tag: str, ranks: int, committed: bool) -> None:
        """Lets a write die before its commit, with the files of ``ranks`` ranks, or at a commit that lacks a rank."""
        whole = torch.arange(6.0)
        halves = [[fragment("master", "w", whole, 3 * rank, 3 * rank + 3)] for rank in range(2)]
        place, metadata = (self.path / tag, secrets.token_hex(8)), catalog.SaveMetadata(99, 4096, {}, b"\xc0", {})
        writes = [rank_write(*place, halves, rank, metadata, WriteOptions(overwrite=True)) for rank in range(2)]
        first = writes[0]
        first.make_manifest([catalog.rank_record(write.rank, write.data_files) for write in writes])
        first.begin(Unlocked(first.store))
        digests = [write.write_data_files(Snapshot()) for write in writes[:ranks]]
        if committed and ranks == 1:
            with pytest.raises(zckpt.ZckptError):
                first.commit(digests * 2)
        if ranks == 2 and tag not in self.stored:
            self.lost.add(tag)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        tag = data.draw(st.sampled_from(sorted(self.stored)))
        (self.path / tag / names.MANIFEST).unlink()
        shutil.rmtree(self.path / tag)
        del self.stored[tag]

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Opens a checkpoint and keeps it open through the rules that follow."""
        tag = data.draw(st.sampled_from(sorted(self.stored)))
        self.opened = zckpt.open(self.path / tag), self.stored[tag], tag

    @precondition(lambda self: self.opened is not None)
    @rule()
    def load_from_the_open_checkpoint(self) -> None:
        """Loads from the open checkpoint. Its files are missing if it was overwritten or removed meanwhile."""
        assert self.opened is not None
        checkpoint, stored, tag = self.opened
        self.opened = None
        if self.stored.get(tag) is stored:
            assert same_all(checkpoint.load(), stored.written.full)
            return
        with suppress(zckpt.MissingFileError):
            assert same_all(checkpoint.load(), stored.written.full)

    @rule()
    def open_the_latest(self) -> None:
        if self.latest in self.stored:
            assert zckpt.open(self.path).step == self.stored[self.latest].step
            return
        with pytest.raises(zckpt.CheckpointNotFoundError):
            zckpt.open(self.path)

    @invariant()
    def all_are_whole(self) -> None:
        for tag in ("a", "b", "c"):
            if tag not in self.stored:
                with pytest.raises(zckpt.CheckpointNotFoundError):
                    zckpt.open(self.path / tag)
                continue
            stored = self.stored[tag]
            assert zckpt.validate(self.path / tag).ok
            checkpoint = zckpt.open(self.path / tag)
            assert checkpoint.step == stored.step
            assert checkpoint.state["client_state"]["seen"] == stored.step
            tensors = checkpoint.load()
            assert same_all(tensors, stored.written.full)
            reader = Reader(self.path / tag)
            assert all(len(reader.load(key)) == tensor.nbytes for key, tensor in tensors.items())


TestFew = Run.TestCase
TestFew.settings = settings(max_examples=8, stateful_step_count=10, deadline=None)


@pytest.mark.matrix
class TestMany(Run.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
