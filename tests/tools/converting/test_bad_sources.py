"""zckpt.convert refuses folders that are not a checkpoint of a known format, that are damaged, or that were made to do
harm."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.support.coded import Coded
from tests.support.deepspeed_folders import Runs, make_folder, model_state, refused, zero_state
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.tools.converting.restricted_pickle import load


def test_a_sound_folder(tmp_path: Path) -> None:
    """The other tests damage copies of such a folder."""
    converted = zckpt.convert(make_folder(tmp_path / "source", 2, epoch=7), tmp_path / "converted")
    assert converted.found_format == "DeepSpeed checkpoint, ZeRO stage 2"
    ck = zckpt.open(converted.path)
    assert ck.load("master/weight")["master/weight"].flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert ck.load("exp_avg/weight")["exp_avg/weight"].flatten().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert ck.state["client_state"] == {"epoch": 7}
    assert loader_of(ck).manifest.writer["missing"] == "; ".join(converted.missing)
    assert any("random number" in line for line in converted.missing)
    with pytest.raises(zckpt.CheckpointExistsError):
        zckpt.convert(tmp_path / "source", tmp_path / "converted")
    zckpt.convert(tmp_path / "source", tmp_path / "converted", overwrite=True)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Runs(os.system, "touch touched"), "system"),
        (Runs(eval, "open('touched', 'w')"), "eval"),
        (Runs(getattr, 1, "real"), "getattr"),
        (Runs(torch.save, 1, "touched"), "save"),
        (Path, "pathlib"),
        (Runs(bytearray, 1 << 60), "bytearray"),
        (Coded(torch.zeros(2, dtype=torch.int8), torch.ones(1)), r"tests\.support\.coded\.Coded"),
    ],
)
def test_nothing_in_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(make_folder(tmp_path / "source", extra=value), zckpt.FormatError, f"asks for .*{name}")
    assert not (tmp_path / "touched").exists()


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    empty = model_state(1, module={}, param_shapes=[], buffer_names=[], optimizer=None)
    torch.save(empty, tmp_path / "source" / "mp_rank_00_model_states.pt")
    refused(tmp_path / "source", zckpt.FormatError, "the source has no tensor of a model")


def test_values_that_a_client_state_may_have(tmp_path: Path) -> None:
    import numpy as np

    client_state: dict[str, Any] = {
        "array": np.arange(6, dtype=">i4").reshape(2, 3), "number": np.float64(2.5), "text": np.str_("word"),
        "path": Path("a/b"), "set": {1, 2}, "bytes": b"\x00\xff", "tensor": torch.arange(3)[1:],
        "scalar": torch.tensor(4),
    }  # fmt: skip
    converted = zckpt.convert(make_folder(tmp_path / "source", **client_state), tmp_path / "converted")
    actual = zckpt.open(converted.path).state["client_state"]
    assert np.array_equal(actual.pop("array"), np.arange(6).reshape(2, 3))
    assert actual.pop("tensor").tolist() == [1, 2]
    assert actual == {
        "number": 2.5, "text": "word", "path": "a/b", "set": [1, 2], "bytes": b"\x00\xff", "scalar": torch.tensor(4),
    }  # fmt: skip


@pytest.mark.parametrize("left", [10, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_file_that_was_cut_off(tmp_path: Path, left: float, file: str) -> None:
    path = make_folder(tmp_path / "source") / file
    size = path.stat().st_size
    os.truncate(path, left if isinstance(left, int) else int(size * left))
    refused(path.parent, zckpt.FormatError, "cut off")


def test_an_empty_file(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "source") / "mp_rank_00_model_states.pt"
    os.truncate(path, 0)
    refused(path.parent, zckpt.FormatError, "not a file of torch.save")


def test_a_missing_rank(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", 2)
    (source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    refused(source, zckpt.MissingFileError, "the file of rank 1 is missing")


def test_files_of_two_checkpoints(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", 2)
    first = source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(first, source / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")
    refused(source, zckpt.FormatError, "two checkpoints")


def test_ranks_that_differ_in_the_learning_rate(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", 2)
    state = zero_state(1, 2)
    state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.2
    torch.save(state, source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    refused(source, zckpt.StateError, "rank 1")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"num_experts": [4]}, "over how many ranks its experts are divided"),
        ({"random_ltd": {}}, "random_ltd"),
        ({"data_sampler": {}}, "curriculum"),
        ({"module": None}, "pipeline"),
    ],
)
def test_states_that_zckpt_cannot_hold(tmp_path: Path, more: dict[str, Any], match: str) -> None:
    refused(make_folder(tmp_path / "source", **more), zckpt.UnsupportedError, match)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"dp_world_size": 0}, zckpt.FormatError),
        ({"dp_world_size": "two"}, zckpt.FormatError),
        ({"param_shapes": None}, zckpt.FormatError),
        ({"param_shapes": [{"weight": torch.Size([4, 3])}]}, zckpt.FormatError),
        ({"param_shapes": [{"weight": torch.Size([4, 2])}, {}]}, zckpt.FormatError),
        ({"global_steps": "three"}, zckpt.FormatError),
    ],
)
def test_a_wrong_model_state(tmp_path: Path, more: dict[str, Any], error: type[Exception]) -> None:
    refused(make_folder(tmp_path / "source", **more), error)


def test_another_format_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").touch()
    refused(source, zckpt.UnsupportedError, "PEFT")


def test_several_models_in_a_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / "source" / name).mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (tmp_path / "source" / name / file).touch()
    refused(tmp_path / "source", zckpt.CheckpointNotFoundError, "give one of the checkpoints in .*: first, second")


def test_no_checkpoint(tmp_path: Path) -> None:
    absent = r"(?s)^the path does not exist \(file .*\)\n  "
    refused(tmp_path / "source", zckpt.CheckpointNotFoundError, f"{absent}give the folder of a checkpoint of DeepSpeed")
    (tmp_path / "source" / "inner").mkdir(parents=True)
    refused(tmp_path / "sorce", zckpt.CheckpointNotFoundError, f"{absent}did you mean {tmp_path / 'source'}")
    refused(tmp_path / "source", zckpt.CheckpointNotFoundError, "no checkpoint of a known format")
    make_folder(tmp_path / "source" / "good")
    hint = rf"give one of the checkpoints in {tmp_path / 'source'}, by its path or as tag \(--tag\): good"
    refused(tmp_path / "source", zckpt.CheckpointNotFoundError, hint)
    refused(tmp_path / "source", zckpt.CheckpointNotFoundError, hint, tag="bad")
    refused(tmp_path / "source" / "bad", zckpt.CheckpointNotFoundError, hint)
    (tmp_path / "source" / "latest").write_text("bad")
    refused(tmp_path / "source", zckpt.CheckpointNotFoundError, hint)
    (tmp_path / "source" / "latest").unlink()
    assert zckpt.convert(tmp_path / "source", tmp_path / "new", tag="good").path == str(tmp_path / "new")
    with pytest.raises(zckpt.UnsupportedError, match="is a checkpoint of zckpt"):
        zckpt.convert(tmp_path / "new", tmp_path / "newer")


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to='deepspeed'"):
        zckpt.convert(tmp_path, tmp_path / "new", stage=2)
    with pytest.raises(ValueError, match="to must be"):
        zckpt.convert(tmp_path, tmp_path / "new", to="orbax")  # type: ignore[arg-type]


def test_a_destination_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write fails, and leaves nothing."""
    import resource

    source = make_folder(tmp_path / "source", module={"weight": torch.ones(4, 2), "mean": torch.zeros(1 << 20)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        refused(source, zckpt.NoSpaceError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def archive(path: Path, raw: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", raw)
        for name, data in records.items():
            made.writestr(f"archive/data/{name.removeprefix('_')}", data)
    return path


class Storage:
    """Stands for a storage of torch. It is pickled as torch does it: ``persistent_id`` returns what is pickled
    instead."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class StoragePickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", value.numel) if isinstance(value, Storage) else None


@pytest.mark.parametrize(
    ("numel", "offset", "size", "stride"),
    [
        (8, 0, (9,), (1,)),
        (8, 4, (5,), (1,)),
        (8, 0, (3, 3), (4, 1)),
        (8, -1, (2,), (1,)),
        (8, 0, (2,), (-1,)),
        (1 << 60, 0, (8,), (1,)),
        (9, 0, (9,), (1,)),
        (8, 0, (1 << 62, 1 << 62), (1 << 62, 1)),
    ],
)
def test_a_tensor_beyond_its_storage(tmp_path: Path, numel: int, offset: int, size: Any, stride: Any) -> None:
    raw = io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    StoragePickler(raw, 2).dump(Runs(rebuild, Storage(numel), offset, size, stride, False, {}))
    path = archive(tmp_path / "file.pt", raw.getvalue(), _0=bytes(32))
    with pytest.raises(zckpt.FormatError):
        load(str(path))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02r\xff\xff\xff\x7f.",  # a memo of 2**31 entries
        b"\x80\x02]q\x00h\x00a.",  # a list that contains itself
        b"\x80\x02\x8a\xff",  # a number that is cut off
        b"\x80\x02X\xff\xff\xff\x7f.",  # a text whose bytes are missing
        b"\x80\x02}q\x00(K\x01h\x00u.",  # a dict that contains itself
        b"\x80\x09.",
        b"",
        b"\x80\x02ctorch\nSize\n}b.",  # a state that is set on a class
    ],
)
def test_a_pickle_of_nonsense(tmp_path: Path, raw: bytes) -> None:
    path = archive(tmp_path / "file.pt", raw)
    try:
        load(str(path))
    except zckpt.ZckptError:
        return
    make = tmp_path / "source"
    make_folder(make)
    shutil.copy(path, make / "mp_rank_00_model_states.pt")
    refused(make, zckpt.FormatError)


def test_a_file_of_old_torch(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source")
    torch.save(model_state(), source / "mp_rank_00_model_states.pt", _use_new_zipfile_serialization=False)
    refused(source, zckpt.UnsupportedError, "before 1.6")
