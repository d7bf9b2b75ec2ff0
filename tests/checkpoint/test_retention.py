"""Retention works within one run and use: no `prune` and no `keep_last` removes the last checkpoint from which a run
can be resumed, whatever else is in its directory."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zckpt
from tests.support.litter import directory_names
from tests.support.states import write_state
from zckpt.checkpoint.listing.contents import Contents
from zckpt.checkpoint.listing.find import find, open_contents
from zckpt.engines.history import history_of
from zckpt.format import names, tree
from zckpt.plan.lineage import Use
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster

WEIGHTS = ["master", "param", "buffer"]


def use_of(path: Path) -> Use:
    contents = open_contents(find(path))
    contents.reader.close()
    return contents.lineage.use


def run_of(path: Path) -> str:
    contents = open_contents(find(path))
    contents.reader.close()
    return contents.lineage.run_id


def resumable(run: Path) -> list[str]:
    """Returns the names of the checkpoints from which an engine can be restored."""
    found = []
    for name in directory_names(run):
        try:
            zckpt.restore(ReferenceEngine(seed=3), run / name)
            found.append(name)
        except zckpt.ZckptError:
            pass
    return found


def written(run: Path, *steps: int) -> ReferenceEngine:
    engine = ReferenceEngine()
    for step in steps:
        engine.train(step - engine.steps)
        zckpt.write(engine, run / f"s{step}")
    return engine


def copied(run: Path, engine: ReferenceEngine, keys: list[str]) -> None:
    zckpt.cp(run / "s2", run / "other", keys)


def repaired(run: Path, engine: ReferenceEngine) -> None:
    zckpt.cp(run / "s2", run / "other")
    (run / "other" / "manifest.msgpack").unlink()
    zckpt.repair(run / "other")


def without_optimizer(run: Path, engine: ReferenceEngine) -> None:
    write_state(run / "other", 1, {"w": (4, 5)}, parts=("param",), engine_state={"counters": {}}, latest=False)


def weights(run: Path, engine: ReferenceEngine) -> None:
    zckpt.write(engine, run / "other", parts=WEIGHTS, latest=False)


OTHERS: dict[str, tuple[Callable[[Path, ReferenceEngine], None], Use]] = {
    "a copy of some layers": (lambda run, engine: copied(run, engine, ["*/weight", "buffer/*", "param/*"]), Use.PART),
    "a copy without one moment": (lambda run, engine: copied(run, engine, ["master/*", "exp_avg/*"]), Use.PART),
    "a copy of the weights": (lambda run, engine: copied(run, engine, [f"{part}/*" for part in WEIGHTS]), Use.WEIGHTS),
    "a repaired one": (repaired, Use.WEIGHTS),
    "one without an optimizer": (without_optimizer, Use.WEIGHTS),
    "one of the weights": (weights, Use.WEIGHTS),
    "one of a moment": (lambda run, engine: ignore(zckpt.write(engine, run / "other", parts="exp_avg")), Use.PART),
}


def ignore(result: object) -> None:
    pass


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("how", ["prune", "keep_last"])
def test_what_cannot_be_resumed_takes_no_place_from_what_can(tmp_path: Path, other: str, how: str) -> None:
    engine = written(tmp_path, 1, 2)
    make, use = OTHERS[other]
    make(tmp_path, engine)
    assert use_of(tmp_path / "other") is use
    (tmp_path / "latest").unlink()
    if how == "prune":
        zckpt.prune(tmp_path, keep_last=1)
        assert directory_names(tmp_path) == ["other", "s2"]
    else:
        zckpt.write(engine, tmp_path / "again", parts=WEIGHTS, keep_last=1, latest=False)
        assert set(directory_names(tmp_path)) >= {"s2", "again"}
    assert resumable(tmp_path) == ["s2"]


def test_a_whole_copy_has_the_use_of_its_source(tmp_path: Path) -> None:
    written(tmp_path, 1)
    zckpt.cp(tmp_path / "s1", tmp_path / "copy")
    zckpt.cp(tmp_path / "s1", tmp_path / "all", ["*"])
    zckpt.cp(tmp_path / "s1", tmp_path / "trained", ["master/*", "exp_avg*", "buffer/*"])
    assert [use_of(tmp_path / name) for name in ("copy", "all", "trained")] == [Use.RESUME] * 3
    assert len({run_of(tmp_path / name) for name in directory_names(tmp_path)}) == 1
    zckpt.cp(tmp_path / "trained", tmp_path / "less", ["master/*"])
    zckpt.cp(tmp_path / "less", tmp_path / "least", ["*"])
    assert use_of(tmp_path / "less") is use_of(tmp_path / "least") is Use.PART


def test_a_run_keeps_its_identity_over_restarts(tmp_path: Path) -> None:
    engine = written(tmp_path, 1, 2)
    run = run_of(tmp_path)
    assert run == run_of(tmp_path / "s1")
    del engine
    for step in (3, 4):
        resumed = ReferenceEngine(seed=step)
        zckpt.restore(resumed, tmp_path)
        resumed.train(1)
        zckpt.write(resumed, tmp_path / f"s{step}", keep_last=2)
        assert run_of(tmp_path) == run
    assert directory_names(tmp_path) == ["s3", "s4"]
    del resumed
    begun_anew = ReferenceEngine(seed=9)
    zckpt.restore(begun_anew, tmp_path, parts=["master"])
    zckpt.write(begun_anew, tmp_path / "warm", latest=False, keep_last=1)
    assert run_of(tmp_path / "warm") != run
    assert directory_names(tmp_path) == ["s3", "s4", "warm"], "a warm start begins another run"


def test_an_engine_that_only_reads_does_not_take_the_run(tmp_path: Path) -> None:
    """A second engine evaluates each checkpoint. The engine that trains goes on pruning its own."""
    engine, evaluation = written(tmp_path, 1), ReferenceEngine(seed=4)
    for step in (2, 3):
        zckpt.restore(evaluation, tmp_path)
        engine.train(1)
        zckpt.write(engine, tmp_path / f"s{step}", keep_last=1)
    assert directory_names(tmp_path) == ["s3"]


@pytest.mark.filterwarnings("ignore:.* fits the engine in part")
def test_a_warm_start_from_weights_alone_begins_another_run(tmp_path: Path) -> None:
    zckpt.write(ReferenceEngine(), tmp_path / "base", parts=["param", "master", "buffer"], latest=False)
    for seed in (1, 2):  # two jobs with one directory
        engine = ReferenceEngine(seed=seed)
        zckpt.restore(engine, tmp_path / "base", strict=False)
        zckpt.write(engine, tmp_path / "runs" / str(seed), keep_last=1)
        del engine
    assert directory_names(tmp_path / "runs") == ["1", "2"]


def test_the_frozen_weights_of_a_run_stay(tmp_path: Path) -> None:
    engine = written(tmp_path, 1)
    for step in (2, 3):
        engine.train(1)
        zckpt.write(engine, tmp_path / f"s{step}", exclude=["param"], keep_last=1)
    assert directory_names(tmp_path) == ["s1", "s3"]


def two_engines() -> tuple[ReferenceEngine, ReferenceEngine]:
    return ReferenceEngine(), ReferenceEngine(seed=5)


def test_two_engines_in_one_directory(tmp_path: Path) -> None:
    actor, critic = two_engines()
    zckpt.write(actor, tmp_path / "actor1", keep_last=1)
    with pytest.warns(UserWarning, match="two engines .*`latest`"):
        zckpt.write(critic, tmp_path / "critic1", keep_last=1)
    for step in (2, 3):
        actor.train(1)
        critic.train(1)
        zckpt.write(actor, tmp_path / f"actor{step}", keep_last=1)
        zckpt.write(critic, tmp_path / f"critic{step}", keep_last=1)
    assert directory_names(tmp_path) == ["actor3", "critic3"]
    assert (tmp_path / "latest").read_text().strip() == "actor3"
    reasons = zckpt.prune(tmp_path, keep_last=1).reasons
    assert reasons[str(tmp_path / "actor3")] == "`latest` names it"
    assert reasons[str(tmp_path / "critic3")].startswith(
        f"one of the last 1 of run {history_of(critic).run_id} with use "
    )


def test_two_engines_that_were_restored_from_one_checkpoint(tmp_path: Path) -> None:
    pretrained = written(tmp_path / "pretrained", 1)
    del pretrained
    gc.collect()
    actor, critic = two_engines()
    for engine in (actor, critic):
        zckpt.restore(engine, tmp_path / "pretrained")
    zckpt.write(actor, tmp_path / "rl" / "actor1", keep_last=1)
    with pytest.warns(UserWarning, match="two engines"):
        zckpt.write(critic, tmp_path / "rl" / "critic1", keep_last=1)
    assert directory_names(tmp_path / "rl") == ["actor1", "critic1"]
    assert history_of(actor).run_id == run_of(tmp_path / "pretrained") != history_of(critic).run_id


def test_an_engine_that_is_gone_is_no_second_one(tmp_path: Path) -> None:
    written(tmp_path, 1)
    other = ReferenceEngine(seed=8)
    zckpt.write(other, tmp_path / "x1")
    assert (tmp_path / "latest").read_text().strip() == "x1"


@pytest.mark.parametrize("background", [False, True])
def test_a_manifest_of_the_future_takes_no_place(tmp_path: Path, background: bool) -> None:
    engine = ReferenceEngine()
    for step in range(1, 8):
        engine.train(1)
        zckpt.write(engine, tmp_path / f"s{step}", keep_last=2, background=background)
        zckpt.wait()
        if step == 3:
            at = time.time() + 86400  # as if it was written before a clock was set back
            os.utime(tmp_path / "s3" / "manifest.msgpack", (at, at))
        assert f"s{step}" in directory_names(tmp_path)
        if step == 4:
            assert directory_names(tmp_path) == ["s3", "s4"]
    assert directory_names(tmp_path) == ["s6", "s7"]


def test_checkpoints_of_older_versions_are_judged_by_what_they_hold(tmp_path: Path) -> None:
    """They have no lineage. Those of one model count as one run."""
    trained: dict[str, Any] = {"engine_state": {"optimizer": {}}, "latest": False}
    shapes = {"w": (4, 5)}
    write_state(tmp_path / "full", 1, shapes, **trained)
    write_state(tmp_path / "weights", 1, shapes, left_out=["exp_avg"], **trained)
    write_state(tmp_path / "none", 1, shapes, engine_state={"counters": {}}, latest=False)
    write_state(tmp_path / "lost", 1, shapes, engine_state=None, latest=False)
    write_state(tmp_path / "moment", 1, shapes, parts=("exp_avg",), **trained)
    write_state(tmp_path / "other", 1, {"v": (4, 5)}, **trained)
    uses = {name: use_of(tmp_path / name) for name in directory_names(tmp_path)}
    assert uses == {
        "full": Use.RESUME, "weights": Use.WEIGHTS, "none": Use.WEIGHTS, "lost": Use.WEIGHTS, "moment": Use.PART,
        "other": Use.RESUME,
    }  # fmt: skip
    assert run_of(tmp_path / "full") == run_of(tmp_path / "weights") != run_of(tmp_path / "other")
    for number, name in enumerate(("full", "other", "moment", "none", "lost", "weights")):
        os.utime(tmp_path / name / "manifest.msgpack", (1e9 + number,) * 2)
    zckpt.prune(tmp_path, keep_last=1)
    assert directory_names(tmp_path) == ["full", "moment", "other", "weights"]


def test_a_lineage_is_compared_with_what_the_checkpoint_holds(tmp_path: Path) -> None:
    """An older version of zckpt copies the lineage of a checkpoint with some of its tensors."""
    engine = ReferenceEngine()
    zckpt.write(engine, tmp_path / "whole")
    recorded = zckpt.open(tmp_path / "whole").state[names.LINEAGE]
    assert recorded["use"] == "resume"
    assert recorded["tensors"] == {"master": 6, "exp_avg": 6, "exp_avg_sq": 6, "param": 1, "buffer": 2, "state": 2}
    assert recorded["run"] == history_of(engine).run_id == run_of(tmp_path / "whole")
    part = open_contents(find(tmp_path / "whole"))
    part.reader.close()
    root = part.plain_state
    root[names.LINEAGE]["tensors"]["exp_avg"] = 7
    with mock.patch.object(Contents, "plain_state", root):
        assert part.lineage.use is Use.PART
    for damaged in (
        {"use": "anything"},
        {"run": 5},
        {"run": "a" * 17},
        {"tensors": None},
        {"tensors": {"master": "all"}},
    ):
        odd = open_contents(find(tmp_path / "whole"))
        odd.reader.close()
        root = odd.plain_state
        root[names.LINEAGE] |= damaged
        with mock.patch.object(Contents, "plain_state", root):
            assert odd.lineage.use in (Use.PART, Use.RESUME)


def test_an_entry_is_added_to_any_packed_map() -> None:
    def nothing(*_: object) -> None:
        return None

    for size in (0, 14, 15, 16, 70_000):
        before = {f"k{number}": number for number in range(size)}
        packed = tree.with_entry(tree.pack(before, "", nothing), "new", {"a": [1]})
        assert tree.unpack(packed, nothing, "x") == {**before, "new": {"a": [1]}}
    assert tree.unpack(tree.with_entry(tree.pack(None, "", nothing), "new", 1), nothing, "x") == {"new": 1}


def write_engines_in_another_order(run: str) -> list[str]:
    """Rank 0 writes the first engine while rank 1 writes the second one."""
    engines = list(two_engines())
    for engine in engines:
        engine.train(1)
    errors: list[str] = []
    for order in (engines, engines[::-1]):
        try:
            zckpt.write(order[dist.get_rank() % 2], f"{run}/mixed{len(errors)}", overwrite=True, latest=False)
        except zckpt.RankError as error:
            errors.append(str(error))
    for number, engine in enumerate(engines):
        zckpt.write(engine, f"{run}/engine{number}", latest=False)
    for engine in engines:
        engine.seed = 0  # now their samples are equal, and only the identities of their runs differ
    try:
        zckpt.write(engines[dist.get_rank() % 2], f"{run}/engine0", overwrite=True, latest=False)
    except zckpt.RankError as error:
        errors.append(str(error))
    return errors


@pytest.mark.filterwarnings("ignore:two engines")
def test_ranks_that_write_different_engines(cluster: Cluster, tmp_path: Path) -> None:
    for errors in cluster.run(write_engines_in_another_order, 2, str(tmp_path)):
        assert len(errors) == 3
        assert all("the engine of rank 1 is not that of rank 0" in error for error in errors)
        assert "its weights are others" in errors[0]
        assert "it belongs to another run" in errors[2]
    assert directory_names(tmp_path) == ["engine0", "engine1"]
    for number in (0, 1):
        loaded = zckpt.open(tmp_path / f"engine{number}").load("master/weight")["master/weight"]
        engine = ReferenceEngine(seed=5 * number)
        engine.train(1)
        assert torch.equal(loaded.view(-1), engine.tensors["master"]["weight"])
