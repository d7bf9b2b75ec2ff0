"""Objects that are registered with an engine are saved and restored with it on each rank, whoever calls the write and
the restore."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.reference_engine import tensors_of
from tests.support.states import same_all
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


class Position:
    """The place of this rank in the data. ``fails`` names the method that raises."""

    def __init__(self, at: int = 0, fails: str = "") -> None:
        self.at, self.fails = at, fails
        self.loaded: list[object] = []

    def state_dict(self) -> dict[str, Any]:
        if self.fails == "state_dict":
            raise OSError("cannot say where it is")
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails == "load_state_dict":
            raise OSError("cannot go there")
        assert state["seen"].tolist() == list(range(state["at"]))
        self.at = state["at"]
        self.loaded.append(self.at)


def rank() -> int:
    return int(os.environ["RANK"])


def with_position(at: int = 0, *, seed: int = 0, **options: Any) -> tuple[ReferenceEngine, Position]:
    engine, position = ReferenceEngine(seed=seed), Position(at, **options)
    zckpt.register(engine, "train", position)
    return engine, position


def warnings_of(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in warned if issubclass(warning.category, UserWarning)]


def write_and_restore(path: str) -> None:
    engine, position = with_position(10 + rank())
    other = Position(20 + rank())
    zckpt.register(engine, "train", position)  # a second time, which changes nothing
    zckpt.register(engine, "validate", other)
    zckpt.write(engine, path, rank_state={"mine": rank()})
    assert zckpt.open(path).client_rank_state(1 - rank()).keys() == {"mine", "train", "validate"}  # type: ignore[union-attr]
    position.at = other.at = 0
    assert warnings_of(lambda: zckpt.restore(engine, path, parts=["master"])) == []
    assert (position.loaded, other.loaded) == ([], []), "a warm start begins anew"
    zckpt.restore(engine, path, with_rank_state=True)
    assert (position.loaded, other.loaded) == ([10 + rank()], [20 + rank()])


def test_each_rank_gets_its_own_state(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_and_restore, 2, str(tmp_path / "c"))


def test_objects_and_names_that_cannot_be_registered() -> None:
    engine, position = with_position()
    with pytest.raises(ValueError, match="registered as 'train'"):
        zckpt.register(engine, "train", Position())
    with pytest.raises(TypeError, match=r"list .*load_state_dict.*StatefulDataLoader"):
        zckpt.register(engine, "validate", [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"name must .*int"):
        zckpt.register(engine, 1, position)  # type: ignore[arg-type]
    with pytest.raises(zckpt.UnsupportedError, match="not a training engine"):
        zckpt.register({}, "train", position)


def fail_on_one_rank(path: str) -> None:
    failing = "state_dict" if rank() == 1 else ""
    engine, _ = with_position(1, fails=failing)
    with pytest.raises(OSError if rank() else zckpt.RankError, match="cannot say where it is"):
        zckpt.write(engine, path)
    assert not Path(path).exists()
    torch.distributed.barrier()
    engine, position = with_position(1)
    with pytest.raises(ValueError if rank() == 0 else zckpt.RankError, match="rank_state has 'train'"):
        zckpt.write(engine, path, rank_state={"train": 1} if rank() == 0 else None)
    zckpt.write(engine, path)
    position.fails = "load_state_dict" if rank() == 1 else ""
    with pytest.raises(OSError if rank() else zckpt.RankError, match="cannot go there"):
        zckpt.restore(engine, path)


def test_an_error_on_one_rank_is_an_error_on_all(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(fail_on_one_rank, 2, str(tmp_path / "c"))


def restore_without_a_state(path: str) -> None:
    engine, _ = with_position(5)
    zckpt.write(engine, path)
    engine, position = with_position(seed=1)
    more = Position()
    if rank() == 1:  # only this rank registers an object that was not saved
        zckpt.register(engine, "more", more)
    before = {key: tensor.clone() for key, tensor in tensors_of(engine).items()}
    with pytest.raises(zckpt.MismatchError if rank() else zckpt.RankError, match="no state of 'more'"):
        zckpt.restore(engine, path)
    assert same_all(tensors_of(engine), before)
    assert position.loaded == []
    zckpt.restore(engine, path, strict=False)
    assert (position.loaded, more.loaded) == ([5], [])


def test_a_name_that_the_checkpoint_lacks_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(restore_without_a_state, 2, str(tmp_path / "c"))
    path = zckpt.write(ReferenceEngine(), tmp_path / "without")
    engine, _ = with_position()
    with pytest.raises(zckpt.MismatchError, match="register it after"):
        zckpt.restore(engine, path)
    (message,) = warnings_of(lambda: zckpt.restore(engine, path, strict=False))
    assert "no state of 'train', registered" in message


def restore_elsewhere(path: str, write: bool) -> list[str]:
    engine, position = with_position(5)
    if write:
        zckpt.write(engine, path)
        return []
    messages = warnings_of(lambda: zckpt.restore(engine, path))
    assert position.loaded == []
    unregistered = ReferenceEngine()
    assert warnings_of(lambda: zckpt.restore(unregistered, path)) == messages
    assert warnings_of(lambda: zckpt.restore(unregistered, path, with_rank_state=True)) == []
    assert warnings_of(lambda: unregistered.train(1)) == []
    return messages


def test_another_number_of_ranks_gets_no_state(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    cluster.run(restore_elsewhere, 2, path, True)
    first, *others = cluster.run(restore_elsewhere, 3, path, False)
    assert len(first) == 1
    assert "each of the 2 ranks" in first[0]
    assert "of its own ('train'). Now the number of ranks is 3, and none gets any of them" in first[0]
    assert others == [[], []]


def test_an_object_may_be_registered_after_the_restore(tmp_path: Path) -> None:
    engine, _ = with_position(7)
    path = zckpt.write(engine, tmp_path / "c", rank_state={"mine": 1})
    engine = ReferenceEngine(seed=1)
    zckpt.restore(engine, path)
    late = Position()
    zckpt.register(engine, "train", late)
    zckpt.register(engine, "other", Position())
    assert late.loaded == [7]
    (message,) = warnings_of(lambda: engine.train(2))
    assert "has values of each rank that nothing has taken ('mine')" in message
    too_late = Position()
    zckpt.register(engine, "mine", too_late)
    assert too_late.loaded == [], "of a step that is over"

    for options in ({"with_rank_state": True}, {"parts": ["master"]}):
        engine = ReferenceEngine(seed=1)
        zckpt.restore(engine, path, **options)
        assert warnings_of(lambda engine=engine: engine.train(1)) == []


def test_a_second_restore_replaces_the_states_of_the_first(tmp_path: Path) -> None:
    for at in (3, 4):
        zckpt.write(with_position(at)[0], tmp_path / f"{at}")
    zckpt.write(ReferenceEngine(), tmp_path / "none")
    engine = ReferenceEngine()
    for name in ("3", "4"):
        zckpt.restore(engine, tmp_path / name)
    late = Position()
    zckpt.register(engine, "train", late)
    assert late.loaded == [4]
    engine = ReferenceEngine()
    for name in ("3", "none"):
        zckpt.restore(engine, tmp_path / name)
    assert warnings_of(lambda: engine.train(1)) == []


def test_nothing_keeps_an_engine_alive(tmp_path: Path) -> None:
    engine, position = with_position(3)
    position.engine = engine  # type: ignore[attr-defined]
    zckpt.write(engine, tmp_path / "c")
    zckpt.restore(engine, tmp_path / "c")
    unclaimed = ReferenceEngine()
    zckpt.restore(unclaimed, tmp_path / "c")
    dead = [weakref.ref(owner) for owner in (engine, position, unclaimed)]
    del engine, position, unclaimed
    gc.collect()
    assert [reference() for reference in dead] == [None, None, None]


def save_and_load(directory: str) -> None:
    engine, position = zckpt.attach(make_engine(stage=2)), Position(30 + rank())
    zckpt.register(engine, "train", position)
    train(engine, 1)
    engine.save_checkpoint(directory, client_state={"mine": rank()})
    other, late = zckpt.attach(make_engine(stage=2, seed=1)), Position()
    zckpt.register(other, "train", late)
    assert other.load_checkpoint(directory)[1] == {"mine": rank()}
    assert late.loaded == [30 + rank()]
    other.load_checkpoint(directory, load_module_only=True)
    assert late.loaded == [30 + rank()]
    third, later = zckpt.attach(make_engine(stage=3, seed=2)), Position()
    third.load_checkpoint(directory)
    messages = warnings_of(lambda: train(third, 1))
    assert (
        [text for text in messages if "nothing has taken" in text] == messages[:1] == messages
        if rank() == 0
        else messages == []
    )
    third.load_checkpoint(directory)
    zckpt.register(third, "train", later)
    assert later.loaded == [30 + rank()]
    assert warnings_of(lambda: train(third, 1)) == []

    zckpt.detach(engine).save_checkpoint(f"{directory}-theirs")
    with pytest.raises(zckpt.MismatchError, match=r"DeepSpeed's own format.* no state of 'train'"):
        other.load_checkpoint(f"{directory}-theirs")
    fourth = zckpt.attach(make_engine(stage=2, seed=3))
    fourth.load_checkpoint(f"{directory}-theirs")
    zckpt.register(fourth, "train", Position())


def test_attached_engines_save_and_load_registered_objects(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load, 2, str(tmp_path / "run"))
