"""What errors say about a directory that is not what was expected, and about the other checkpoints of a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.checkpoint.listing import runs
from zckpt.checkpoint.listing.runs import whole_neighbours
from zckpt.cli import main
from zckpt.errors import CheckpointNotFoundError, FormatError, UnfinishedWriteError
from zckpt.storage.location import Location
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write(run: Path, *names: str, latest: bool = False) -> None:
    """Writes checkpoints, each committed after the one before."""
    for number, name in enumerate(names):
        write_state(run / name, 2, {"w": (40,)}, step=number, latest=latest)
        os.utime(run / name / "manifest.msgpack", (1e9 + number,) * 2)


def deepspeed(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (folder / name).write_bytes(b"")


def said(path: Path, error: type[Exception] = CheckpointNotFoundError) -> str:
    """Returns the text of the error that ``open`` raises."""
    with pytest.raises(error) as caught:
        zckpt.open(path)
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize("how", ["folder", "run", "folders", "Trainer"])
def test_a_directory_that_deepspeed_has_written(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    folder = run / {"Trainer": "checkpoint-3/global_step3"}.get(how, "global_step3")
    deepspeed(folder)
    if how == "run":
        (run / "latest").write_text("global_step3")
    path = folder if how == "folder" else run
    text = said(path)
    assert "DeepSpeed's own format" in text
    assert "zckpt.attach(engine)" in text
    assert "zckpt convert" in text
    assert str(folder.relative_to(tmp_path)) in text or os.path.relpath(folder, run) in text
    for command in ("validate", "repair"):
        assert main([command, str(path)]) == 2
        assert "DeepSpeed's own format" in capsys.readouterr().err


def test_a_directory_of_checkpoints_lists_them(tmp_path: Path) -> None:
    write(tmp_path, *(f"s{number}" for number in range(8)))
    (tmp_path / "notes").mkdir()
    text = said(tmp_path)
    assert "newest first: s7, s6, s5, s4, s3 and 3 more" in text
    (tmp_path / "latest").write_bytes(b"gone\n")
    text = said(tmp_path)
    assert "L001" in text
    assert "newest first: s7, s6, s5, s4, s3 and 3 more" in text
    (tmp_path / "latest").write_bytes(b"../gone\n")
    assert "newest first: s7, s6, s5, s4, s3 and 3 more" in said(tmp_path, FormatError)


def test_a_directory_of_runs_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "actor", "s1", latest=True)
    write(tmp_path / "checkpoint_3", "pytorch_model")  # as Accelerate makes it
    (tmp_path / "notes").mkdir()
    assert "give one of the runs that are here: actor, checkpoint_3" in said(tmp_path)
    assert main(["info", str(tmp_path)]) == 2
    assert "give one of the runs that are here: actor, checkpoint_3" in capsys.readouterr().err
    assert f"did you mean {tmp_path / 'actor'}?" in said(tmp_path / "acter")
    assert "did you mean" not in said(tmp_path / "critic")


def test_a_path_that_is_not_there_lists_the_checkpoints_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "1", "2")
    text = f"the checkpoints in {tmp_path} are, newest first: 2, 1"
    assert text in said(tmp_path / "3")
    with pytest.raises(CheckpointNotFoundError, match=f"(?s)does not exist.*{text}"):
        zckpt.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "3")
    assert zckpt.get_fp32_state_dict_from_zero_checkpoint(tmp_path, 2).keys() == {"w"}
    (tmp_path / "notes").write_text("")
    for command in ("validate", "repair", "gc"):
        for name, problem in (("3", "does not exist"), ("notes", "is a file")):
            assert main([command, str(tmp_path / name)]) == 2
            err = capsys.readouterr().err
            assert f"the path {problem}" in err
            assert text in err
    assert "give the directory of a checkpoint or run" in said(tmp_path / "1" / "data-x" / "y")
    inner = tmp_path / "inner"
    inner.mkdir()
    # Checkpoints further up may belong to somebody else, so they are not listed.
    for path in (inner / "3", inner / "absent" / "3"):
        assert "newest first" not in said(path)


def test_the_output_of_a_trainer_lists_its_checkpoints(tmp_path: Path) -> None:
    for number in (5, 10):
        folder = tmp_path / f"checkpoint-{number}"
        write(folder, f"global_step{number}", latest=True)
        os.utime(folder / f"global_step{number}" / "manifest.msgpack", (1e9 + number,) * 2)
        (folder / "trainer_state.json").write_text("{}")
    listed = "newest first: checkpoint-10/global_step10, checkpoint-5/global_step5"
    assert listed in said(tmp_path)
    assert zckpt.open(tmp_path / "checkpoint-5").step == 0
    for model in ({"config.json", "model.safetensors"}, {"adapter_config.json", "adapter_model.safetensors"}):
        for name in model:
            (tmp_path / name).write_bytes(b"{}")  # as trainer.save_model() leaves them
        text = said(tmp_path)
        assert listed in text
        assert "this is" not in text
        assert ("beside them is a Hugging Face model" in text) == ("config.json" in model)
        for name in model:
            (tmp_path / name).unlink()


def test_checkpoints_in_directories_of_a_run(tmp_path: Path) -> None:
    """Checkpoints are looked for where ``latest`` could name them, and not in another run."""
    write(tmp_path, "epoch0/s1", "epoch1/half/s2", "a/b/c/d/e/s4")
    write(tmp_path / "other", "s3", latest=True)
    (tmp_path / "epoch0" / "link").symlink_to(tmp_path / "other" / "s3")
    assert "give one of the runs that are here: epoch0, other" in said(tmp_path)
    (tmp_path / "latest").write_bytes(b"epoch2/s1\n")
    assert "newest first: epoch1/half/s2, epoch0/s1\n" in said(tmp_path) + "\n"
    assert runs.run_of(open_store(tmp_path / "epoch1" / "half" / "s2")).location == Location.of(tmp_path)
    assert runs.run_of(open_store(tmp_path / "other" / "s3")).location == Location.of(tmp_path / "other")
    assert whole_neighbours(open_store(tmp_path / "epoch0" / "s1")) == [str(tmp_path / "epoch1" / "half" / "s2")]


def spoil(name: str) -> Callable[[Path], object]:
    return lambda path: next(path.rglob(name)).write_bytes(b"short")


DAMAGES: dict[str, Callable[[Path], object]] = {
    name: spoil(name) for name in ("manifest.msgpack", "index.bin", "digests.bin", "master.safetensors")
} | {f"no {name}": lambda path, name=name: next(path.rglob(name)).unlink() for name in ("index.bin", "digests.bin")}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_whole_checkpoints_of_a_run(tmp_path: Path, damage: str) -> None:
    write(tmp_path, "s1", "s2", "s3")
    assert whole_neighbours(open_store(tmp_path / "s3")) == [str(tmp_path / "s2"), str(tmp_path / "s1")]
    assert whole_neighbours(open_store(tmp_path / "nothing")) == [str(tmp_path / name) for name in ("s3", "s2", "s1")]
    DAMAGES[damage](tmp_path / "s2")
    assert whole_neighbours(open_store(tmp_path / "s3")) == [str(tmp_path / "s1")]
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(FormatError) as caught:
        zckpt.open(tmp_path / "s2").load()
    assert str(caught.value).endswith(
        "nothing was changed; of the run's other checkpoints these are whole, newest first: "
        f"{tmp_path / 's3'}, {tmp_path / 's1'}"
    )
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_every_way_to_read_says_what_is_whole(tmp_path: Path) -> None:
    write_state(tmp_path / "s1", 1, {"w": (40,)}, client_state={"x": torch.zeros(3)})
    write_state(tmp_path / "s2", 1, {"w": (40,)})
    for file in (tmp_path / "s1").rglob("*.safetensors"):
        raw = file.read_bytes()
        file.write_bytes(raw[:4096] + bytes(byte ^ 1 for byte in raw[4096:]))
    checkpoint = zckpt.open(tmp_path)
    assert checkpoint.load().keys()
    checkpoint = zckpt.open(tmp_path / "s1")
    reads: list[Callable[[], Any]] = [
        checkpoint.load,
        lambda: list(checkpoint.iter()),
        lambda: checkpoint.load_slice("master/w", slice(None)),
        lambda: checkpoint.load_pieces(0),
        checkpoint.state_dict,
        lambda: checkpoint.state,
        lambda: checkpoint.rank_state(0),
    ]
    for read in reads:
        with pytest.raises(FormatError, match="D003") as caught:
            read()
        assert str(caught.value).count(f"newest first: {tmp_path / 's2'}") == 1


def test_a_load_without_errors_does_not_look_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "s1", "s2", latest=True)

    def fail(*_: object) -> None:
        raise AssertionError("the run was looked at")

    monkeypatch.setattr(runs, "directories", fail)
    checkpoint = zckpt.open(tmp_path)
    checkpoint.load()
    assert checkpoint.state is not None
    with pytest.raises(zckpt.KeyNotFoundError):
        checkpoint.load("nothing")


def test_an_unfinished_write_names_the_whole_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, "s1", "s2")
    (tmp_path / "s2" / "manifest.msgpack").unlink()
    text = said(tmp_path / "s2", UnfinishedWriteError)
    assert "zckpt.repair" in text
    assert text.endswith(f"newest first: {tmp_path / 's1'}")
    (tmp_path / "s1" / "manifest.msgpack").unlink()
    assert said(tmp_path / "s2", UnfinishedWriteError).endswith("the run has no other checkpoint that is whole")


def test_tensors_of_the_caller_are_not_called_unchanged(tmp_path: Path) -> None:
    write(tmp_path, "s1", "s2")
    next((tmp_path / "s2").rglob("digests.bin")).unlink()
    checkpoint = zckpt.open(tmp_path / "s2")
    out = {key: torch.zeros(info.shape, dtype=info.dtype) for key, info in checkpoint.items()}
    with pytest.raises(FormatError) as caught:
        checkpoint.load(out=out)
    assert "the tensors in `out` have undefined values; nothing else was changed; of the run's" in str(caught.value)


def test_repair_of_a_run_lists_its_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, "s1", "s2", latest=True)
    (tmp_path / "s1" / "manifest.msgpack").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"newest first: s2; .*no manifest.*repair.*: s1"):
        zckpt.repair(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        zckpt.repair(tmp_path / "nothing")
    (tmp_path / "s2" / "manifest.msgpack").unlink()
    (tmp_path / "latest").unlink()
    text = said(tmp_path)
    assert text.endswith("these have no manifest, which zckpt.repair may be able to rebuild: s1, s2")
    assert "give one" not in text


def test_a_tilde_is_not_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(zckpt.UnsupportedError, match="begins with a tilde"):
        zckpt.open("~/checkpoints")
