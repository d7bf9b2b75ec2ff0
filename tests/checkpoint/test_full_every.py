"""`attach(full_every=)` saves weights often and full states rarely. A resume takes a full checkpoint, errors name the
newest full one, and prune keeps it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.litter import directory_names
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine
from tests.support.runs import assert_same, logical, weights
from zckpt.checkpoint import background
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.format import names

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.support.cluster import Cluster

MOMENTS = {"exp_avg", "exp_avg_sq"}


def is_full(path: Path) -> bool:
    """Returns whether the checkpoint has all moments. Checks that the checkpoint names those that it lacks."""
    checkpoint = zckpt.open(path)
    assert set(loader_of(checkpoint).contents.left_out) == MOMENTS.difference(checkpoint.parts)
    return not MOMENTS.difference(checkpoint.parts)


def save_often(run: str, in_background: bool) -> dict[str, Any]:
    """Saves after each of 5 steps. Then a second engine resumes from what ``latest`` names, and saves after each step
    again."""
    engine = zckpt.attach(make_engine(stage=2, scheduler=True), full_every=3, background=in_background)
    for step in range(5):
        train(engine, 1, step)
        engine.save_checkpoint(run)
    zckpt.wait()
    resumed = zckpt.attach(make_engine(stage=2, scheduler=True, seed=1), full_every=3, background=in_background)
    path, _ = resumed.load_checkpoint(run)
    for step in range(4, 8):
        train(resumed, 1, step)
        resumed.save_checkpoint(run, f"again{step + 1}")
    zckpt.wait()
    return {"path": path, "weights": weights(engine)}


def load_weights_alone(run: str, tag: str, trained: dict[str, torch.Tensor]) -> list[str]:
    """Returns the errors of loads that would go on from weights alone: by an engine that has moments, and by one that
    has none yet."""
    messages = []
    for stage, optimizer in ((2, "adamw"), (0, "torch_adamw")):
        engine = zckpt.attach(make_engine(stage=stage, optimizer=optimizer, seed=2, scheduler=True))
        before = logical(engine, ())
        for strict in (True, False):
            with pytest.raises((zckpt.MismatchError, zckpt.RankError)) as caught:
                engine.load_checkpoint(run, tag, load_module_strict=strict)
            messages.append(str(caught.value))
        assert_same(before, logical(engine, ()))
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine.load_checkpoint(run, tag, **options)
            assert_same(trained, weights(engine))
    return messages


@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_a_resume_takes_full_checkpoints(cluster: Cluster, tmp_path: Path, in_background: bool) -> None:
    result = cluster.run(save_often, 2, str(tmp_path), in_background)[0]
    full = [name for name in directory_names(tmp_path) if is_full(tmp_path / name)]
    assert full == ["again7", "global_step1", "global_step4"]
    assert result["path"] == str(tmp_path / "global_step4"), "what latest names"
    assert (tmp_path / "latest").read_text().strip() == "again7"
    assert all(zckpt.validate(tmp_path / name).ok for name in directory_names(tmp_path))
    messages, _ = cluster.run(load_weights_alone, 2, str(tmp_path), "global_step5", result["weights"])
    for message in messages:
        assert "exp_avg, exp_avg_sq, without which training cannot go on" in message
        assert f"resume from {tmp_path / 'again7'}, the newest one that holds all" in message
        assert "load_module_only=True restores the weights alone" in message


def save_and_load_as_accelerate(run: str) -> None:
    """Saves under the names of two models, as Accelerate does. Every third save is full."""
    engine = zckpt.attach(make_engine(), full_every=3)
    for number in range(4):
        train(engine, 1, number)
        for name in ("pytorch_model", "pytorch_model_1"):
            engine.save_checkpoint(f"{run}/checkpoint_{number}", name)
    other = zckpt.attach(make_engine(seed=1))
    for name, asked, full in (("pytorch_model", 2, 3), ("pytorch_model_1", 3, 1)):
        with pytest.raises(zckpt.MismatchError, match="leaves out exp_avg") as caught:
            other.load_checkpoint(f"{run}/checkpoint_{asked}", name)
        (told,) = re.findall("resume from (.*), the newest one that holds all", str(caught.value))
        assert told == f"{run}/checkpoint_{full}"
        other.load_checkpoint(told, name)
        assert other.global_steps == full + 1


def test_the_newest_full_checkpoint_of_accelerate_is_in_another_directory(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load_as_accelerate, 1, str(tmp_path))


def save_to_one_tag(run: str) -> None:
    engine = zckpt.attach(make_engine(), full_every=3)
    for step in range(3):
        train(engine, 1, step)
        engine.save_checkpoint(run, "last")
        assert open_loader(run).contents.left_out == ()
    engine.save_checkpoint(run, "weights", save_latest=False)
    os.remove(os.path.join(run, "latest"))
    train(engine, 1)
    engine.save_checkpoint(run, "more")
    assert open_loader(run).contents.left_out, "where latest names no full checkpoint, it names what is saved"
    zckpt.detach(engine)
    zckpt.attach(engine)
    engine.save_checkpoint(run, "weights")
    assert open_loader(run).contents.left_out == ()


def test_weights_alone_never_replace_a_full_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_to_one_tag, 1, str(tmp_path))


def save_and_keep(run: str, keep_last: int) -> None:
    engine = zckpt.attach(make_engine(), full_every=4, keep_last=keep_last, reuse=None)
    for step in range(7):
        train(engine, 1, step)
        engine.save_checkpoint(run)


def test_the_newest_full_checkpoint_is_never_pruned(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_keep, 1, str(tmp_path), 1)
    assert directory_names(tmp_path) == ["global_step5", "global_step7"]
    (tmp_path / "latest").write_text("global_step7")
    assert zckpt.prune(tmp_path, keep_last=1).kept == tuple(str(tmp_path / f"global_step{step}") for step in (5, 7))
    assert [is_full(tmp_path / name) for name in directory_names(tmp_path)] == [True, False]


def fail_once(run: str) -> None:
    """A full save in the background fails. The next save raises its error, and the save after that has to be full."""
    engine = zckpt.attach(make_engine(), full_every=3, background=True)
    train(engine, 1)
    with mock.patch.object(RankWrite, "prepare_commit", side_effect=zckpt.StorageError("no commit")):
        engine.save_checkpoint(run)
        background.wait_until_all_ended()
    with pytest.raises(zckpt.StorageError, match="no commit"):
        engine.save_checkpoint(run)
    train(engine, 1)
    engine.save_checkpoint(run)
    zckpt.wait()
    assert open_loader(run).contents.left_out == ()
    engine.load_checkpoint(run)
    engine.save_checkpoint(f"{run}/first", "full")
    zckpt.wait()
    with mock.patch.object(RankWrite, "prepare_commit", side_effect=zckpt.StorageError("no commit")):
        engine.save_checkpoint(f"{run}/second", "failed")  # a directory of its own, so it would be full
        with pytest.raises(zckpt.StorageError, match="no commit"):
            zckpt.wait()
    engine.save_checkpoint(f"{run}/second", "next")
    zckpt.wait()
    assert open_loader(f"{run}/second").contents.left_out == ()


def test_a_save_that_has_failed_does_not_count(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(fail_once, 1, str(tmp_path))


@pytest.mark.usefixtures("engines_are_adapters")
def test_a_checkpoint_says_which_parts_the_write_has_left_out(tmp_path: Path) -> None:
    engine = Engine()
    zckpt.write(engine, tmp_path / "full")
    assert names.LEFT_OUT not in zckpt.open(tmp_path / "full").state
    for number, options in enumerate(({"exclude": "exp_avg"}, {"parts": "master"})):
        zckpt.write(engine, tmp_path / str(number), latest=False, **options)  # type: ignore[call-overload]
        checkpoint = zckpt.open(tmp_path / str(number))
        assert checkpoint.state[names.LEFT_OUT] == ["exp_avg"] == list(loader_of(checkpoint).contents.left_out)


def test_wrong_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attachable:
        save_checkpoint = load_checkpoint = None

    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="full_every must"):
            zckpt.attach(Attachable(), full_every=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="full_every must"):
            zckpt.attach_all(full_every=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reuse must"):
        zckpt.attach(Attachable(), reuse="/run")  # type: ignore[arg-type]
    monkeypatch.setenv("ZCKPT_BACKGROUND", "yes")
    with pytest.raises(ValueError, match=r"ZCKPT_BACKGROUND must.*'yes'"):
        zckpt.attach(Attachable())


def late(operation: Callable[[], Any], file: str) -> Any:
    time.sleep(0.2)
    return operation()


def background_by_environment(run: str) -> list[bool]:
    """Returns for each save whether it has returned before its checkpoint was there."""
    in_background = []
    for tag, (value, background_option) in enumerate((("1", None), ("1", False), ("0", None), ("0", True))):
        os.environ["ZCKPT_BACKGROUND"] = value
        engine = zckpt.attach(make_engine(), background=background_option)
        with faulty(Fault(late, names=("write",))):
            engine.save_checkpoint(run, str(tag))
        in_background.append(not Path(run, str(tag), "manifest.msgpack").exists())
        zckpt.wait()
        assert zckpt.open(Path(run, str(tag)))
    return in_background


def test_the_environment_decides_if_background_is_not_given(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(background_by_environment, 1, str(tmp_path)) == [[True, False, False, True]]
