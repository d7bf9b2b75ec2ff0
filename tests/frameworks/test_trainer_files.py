"""Which checkpoints of Trainer are whole, and which are removed. Files decide this, so nothing is trained here."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.checkpoint.listing.find import find
from zckpt.checkpoint.listing.runs import is_begun
from zckpt.frameworks import patches as frameworks
from zckpt.frameworks.trainer_files import DirectoryKind, kind_of, kind_of_models, last_checkpoint, rng_file, superseded
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOMENTS = ["exp_avg", "exp_avg_sq"]


def save(
    output: Path, step: int, *, ranks: int = 2, full: bool = True, foreign: str = "", scheduler: object = None
) -> Path:
    """Writes what Trainer leaves after a save. ``foreign`` names a file of another framework, which takes the place of
    zckpt's checkpoint. ``scheduler`` is the state of the engine's own scheduler, if it has one."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"any")
    if foreign:
        (folder / foreign).parent.mkdir(exist_ok=True)
        (folder / foreign).write_bytes(b"any")
    else:
        write_state(
            folder / f"global_step{step}", ranks, {"w": (40, 50)}, step=step,
            engine_state={"optimizer": {}, "scheduler": scheduler},
            parts=("master", *MOMENTS) if full else ("master",), left_out=[] if full else MOMENTS,
        )  # fmt: skip
    if scheduler is None:
        torch.save({"last_epoch": step}, folder / "scheduler.pt")
    for rank in range(ranks):
        torch.save({"cpu": torch.get_rng_state()}, folder / rng_file(rank, ranks))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    os.utime(folder, (1e9 + step,) * 2)
    return folder


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def data(folder: Path) -> Path:
    return next(folder.glob("global_step*/data-*/rank-00001/*master.safetensors"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no state": lambda folder: (folder / "trainer_state.json").unlink(),
    "half a state": lambda folder: cut(folder / "trainer_state.json"),
    "an empty state": lambda folder: (folder / "trainer_state.json").write_bytes(b""),
    "no generators of a rank": lambda folder: (folder / "rng_state_1.pth").unlink(),
    "no generators of the first rank": lambda folder: (folder / "rng_state_0.pth").unlink(),
    "half of the generators of a rank": lambda folder: cut(folder / "rng_state_1.pth"),
    "no scheduler": lambda folder: (folder / "scheduler.pt").unlink(),
    "half a scheduler": lambda folder: cut(folder / "scheduler.pt"),
    "no commit": lambda folder: next(folder.glob("global_step*/manifest.msgpack")).unlink(),
    "half a manifest": lambda folder: cut(next(folder.glob("global_step*/manifest.msgpack"))),
    "no name": lambda folder: (folder / "latest").unlink(),
    "half a tensor": lambda folder: cut(data(folder)),
    "no tensor": lambda folder: data(folder).unlink(),
    "no checkpoint": lambda folder: shutil.rmtree(next(folder.glob("global_step*"))),
    "no digests": lambda folder: next(folder.glob("global_step*/data-*/rank-00000/digests.bin")).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_is_not_resumed_from(tmp_path: Path, damage: str) -> None:
    older, newer = save(tmp_path, 3), save(tmp_path, 12)
    assert [kind_of(str(folder)) for folder in (older, newer)] == [DirectoryKind.FULL, DirectoryKind.FULL]
    assert last_checkpoint(str(tmp_path)) == str(newer)
    DAMAGE[damage](newer)
    assert kind_of(str(newer)) is DirectoryKind.UNFINISHED
    assert last_checkpoint(str(tmp_path)) == str(older)
    assert superseded([str(older), str(newer)], 1, None) == [str(newer)]
    DAMAGE[damage](older)
    assert last_checkpoint(str(tmp_path)) is None
    assert superseded([str(older), str(newer)], 1, None) == [], "nothing goes where nothing is whole"


def test_other_ways_to_be_whole(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, ranks=1)
    assert kind_of(str(folder)) is DirectoryKind.FULL
    (folder / "rng_state.pth").unlink()
    assert kind_of(str(folder)) is DirectoryKind.UNFINISHED
    (folder / "scheduler.pt").unlink()
    assert kind_of(str(folder)) is DirectoryKind.FULL, "with save_only_model, Trainer writes neither"
    assert kind_of(str(save(tmp_path, 2, scheduler={"class": "WarmupLR"}))) is DirectoryKind.FULL, (
        "the engine has its scheduler"
    )
    assert kind_of(str(save(tmp_path, 3, full=False))) is DirectoryKind.WEIGHTS
    assert kind_of(str(save(tmp_path, 4, foreign="global_step4/mp_rank_00_model_states.pt"))) is DirectoryKind.FOREIGN
    foreign_folder = save(tmp_path, 5, foreign="optimizer.pt")
    assert kind_of(str(foreign_folder)) is DirectoryKind.FOREIGN
    for name in ("optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"):
        (foreign_folder / name).unlink()
    assert kind_of(str(foreign_folder)) is DirectoryKind.FOREIGN, "with save_only_model"
    (tmp_path / "checkpoint-6").mkdir()
    assert kind_of(str(tmp_path / "checkpoint-6")) is DirectoryKind.UNFINISHED, "killed before anything was written"


def test_weights_alone_are_passed_over_but_never_in_silence(tmp_path: Path) -> None:
    full, weights, _ = save(tmp_path, 3), save(tmp_path, 6, full=False), save(tmp_path, 9, full=False)
    assert last_checkpoint(str(tmp_path)) == str(full)
    DAMAGE["no commit"](tmp_path / "checkpoint-9")
    DAMAGE["no commit"](full)
    assert last_checkpoint(str(tmp_path)) == str(weights), "which to load is an error, and not a new beginning"
    assert last_checkpoint(str(tmp_path / "checkpoint-6")) is None


def steps(paths: list[str]) -> list[int]:
    return sorted(int(path.rpartition("-")[2]) for path in paths)


def test_which_checkpoints_go_beyond_the_limit(tmp_path: Path) -> None:
    full = {3, 12}
    folders = [str(save(tmp_path, step, full=step in full)) for step in (3, 6, 9, 12, 15, 18)]
    for limit, best, gone in (
        (1, None, [3, 6, 9, 15]),  # the newest one and the newest full one stay
        (2, None, [3, 6, 9, 15]),
        (3, None, [3, 6, 9]),
        (1, 6, [3, 9, 15]),
        (4, 6, [3, 9]),
        (6, 6, []),
        (9, None, []),
    ):
        chosen = None if best is None else str(tmp_path / f"checkpoint-{best}")
        assert steps(superseded(folders, limit, chosen)) == gone, (limit, best)
    DAMAGE["no commit"](tmp_path / "checkpoint-18")
    assert steps(superseded(folders, 3, None)) == [3, 6, 18], "what is not whole takes no place from what is"
    assert steps(superseded(folders, 6, None)) == []
    with WriteLock(open_store(tmp_path / "checkpoint-18" / "global_step18")):
        assert steps(superseded(folders, 3, None)) == [3, 6], "it is being written"


def test_what_save_model_leaves_takes_the_place_of_no_checkpoint(tmp_path: Path) -> None:
    """With ZeRO-3, ``Trainer.save_model`` lets the engine save into the output directory, from which Trainer cannot
    resume. ``latest`` there is stale as soon as the training goes on."""
    state: dict[str, object] = {"optimizer": {}, "scheduler": None}
    save(tmp_path, 5)
    save(tmp_path, 10)
    write_state(tmp_path / "global_step10", 2, {"w": (40, 50)}, step=10, engine_state=state)
    zckpt.prune(tmp_path, keep_last=1)
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert is_begun(os.listdir(tmp_path / "global_step10"))
    assert not is_begun(os.listdir(tmp_path / "checkpoint-5"))
    assert find(tmp_path).location.name == "global_step10", "both have the same number of steps"
    newer = save(tmp_path, 15)
    assert str(find(tmp_path).location) == str(newer / "global_step15")
    DAMAGE["no commit"](newer)
    assert find(tmp_path).location.name == "global_step10"


def test_a_folder_of_accelerate_without_all_of_its_files_is_not_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_1"
    zckpt.write(ReferenceEngine(), folder / "pytorch_model")
    assert kind_of_models(str(folder)) is DirectoryKind.UNFINISHED, "perhaps another model would have followed"
    (folder / "random_states_0.pkl").touch()
    assert kind_of_models(str(folder)) is DirectoryKind.FULL
    shutil.rmtree(folder / "pytorch_model")
    assert kind_of_models(str(folder)) is DirectoryKind.UNFINISHED, "the write has failed"
    (folder / "optimizer.bin").touch()
    assert kind_of_models(str(folder)) is DirectoryKind.FOREIGN


def test_a_checkpoint_that_takes_the_place_of_one_to_be_removed_stays(tmp_path: Path) -> None:
    """Lightning removes the only checkpoint from which training can go on, and then saves a new one at the same
    path. zckpt keeps the old checkpoint until then, and the new one stays."""
    engine, best = ReferenceEngine(), str(tmp_path / "best.ckpt")
    zckpt.write(engine, best)
    frameworks._held_back[best] = frameworks._save_id(best), partial(shutil.rmtree, best)
    frameworks._remove_held_back()
    zckpt.write(engine, best, overwrite=True)
    zckpt.write(engine, tmp_path / "last.ckpt")
    frameworks._remove_held_back()
    assert zckpt.validate(best).ok
    assert not frameworks._held_back
