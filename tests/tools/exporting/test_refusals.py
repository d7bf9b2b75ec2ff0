"""What cannot be exported is refused before anything is written. An export that fails leaves no incomplete files."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.faults import BROKEN, NO_SPACE, Fault, faulty
from tests.support.hugging_face import content, make_hugging_face, write_model
from tests.support.states import write_state
from zckpt.tools.exporting import place

if TYPE_CHECKING:
    from pathlib import Path

    from zckpt.tools.exporting.export import Format


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns the folder of a model. Next to it is a checkpoint of the model, ``ckpt``."""
    made = make_hugging_face("gpt2")
    write_model(tmp_path / "ckpt", made)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def assert_refused(tmp_path: Path, error: type[Exception], match: str, **options: Any) -> None:
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(error, match=match):
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", **options)
    assert sorted(os.listdir(tmp_path)) == before


def edit(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def test_a_configuration_of_another_model(tmp_path: Path, model: Path) -> None:
    edit(model, n_embd=48)
    assert_refused(
        tmp_path, zckpt.MismatchError, r"shapes differ.*wte.weight is \[64, 48\].* \[64, 32\] here", config=model
    )
    edit(model, n_embd=32, n_layer=12)
    assert_refused(
        tmp_path, zckpt.MismatchError, "the source lacks 12 tensors: transformer.h.11.ln_1.weight", config=model
    )
    edit(model, n_layer=10)
    assert_refused(tmp_path, zckpt.MismatchError, "the model of the configuration lacks 12 tensors", config=model)


def test_a_configuration_of_no_model(tmp_path: Path, model: Path) -> None:
    edit(model, architectures=["NoSuchModel"])
    assert_refused(tmp_path, zckpt.UnsupportedError, "has no model 'NoSuchModel'", config=model)
    edit(model, architectures=None)
    assert_refused(tmp_path, zckpt.UnsupportedError, '"architectures": ', config=model)
    edit(model, architectures=["GPT2LMHeadModel"], n_head=0)
    assert_refused(tmp_path, zckpt.FormatError, "transformers makes no model of it", config=model)
    edit(model, quantization_config={"quant_method": "fp8"})
    assert_refused(tmp_path, zckpt.UnsupportedError, "quantized", config=model)
    for text in ("{", "[" * 100_000):
        (model / "config.json").write_text(text)
        assert_refused(tmp_path, zckpt.MismatchError, "not JSON", config=model)
    (model / "config.json").unlink()
    assert_refused(tmp_path, zckpt.StorageError, "config=.* has to be the folder of the model", config=model)


def test_without_transformers(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert_refused(tmp_path, zckpt.UnsupportedError, "pip install 'transformers>=5'", config=model)


def test_wrong_arguments(tmp_path: Path, model: Path) -> None:
    assert_refused(tmp_path, ValueError, "format must be one of hf, pt", format="onnx")
    for wrong, meant in (
        ("float7", "float"),
        ("half", "float16"),
        ("BF16", "bf16"),
        (np.float32, "float32"),
        (["bf16"], "bf16"),
    ):
        match = f"dtype must be one of .*, fp16, fp32, .* got .*did you mean '{meant}"
        assert_refused(tmp_path, ValueError, match, dtype=wrong)
    floating = "float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64, bf16, fp16, fp32"
    for other in ("foo", "int8", torch.int8):
        assert_refused(tmp_path, ValueError, f"dtype must be one of {floating}, or .* got {other!r}", dtype=other)
    assert_refused(tmp_path, ValueError, "a size must be", max_shard_size="5 gigs")
    assert_refused(tmp_path, ValueError, "only with format 'hf'", format="pt", config=model)
    with pytest.raises(ValueError, match="format='pt'"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "out.pt")
    with pytest.raises(zckpt.UnsupportedError, match="file system"):
        zckpt.export(tmp_path / "ckpt", "nowhere://bucket/out")


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    buffers = {"mean": [torch.ones(3)] * 3}
    for parts, given in ((["exp_avg"], None), ([], buffers), (["exp_avg"], buffers)):
        write_state(tmp_path / "ckpt", parts=parts, buffers=given, overwrite=True)
        for form in ("hf", "pt"):
            assert_refused(tmp_path, zckpt.KeyNotFoundError, "no weights: its parts are", format=form)
        with pytest.raises(zckpt.KeyNotFoundError, match="no weights: "):
            zckpt.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
        with pytest.raises(zckpt.KeyNotFoundError, match="no weights: "):
            zckpt.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_damage_is_found_and_leaves_nothing(tmp_path: Path) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    (file,) = (tmp_path / "ckpt").glob("data-*/rank-00001/master.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] + b"\x5a" + whole[-99:])
    assert_refused(tmp_path, zckpt.DigestError, "master/")
    assert_refused(tmp_path, zckpt.DigestError, "master/", format="pt")
    file.write_bytes(whole[:-1])
    assert_refused(tmp_path, zckpt.SizeError, "bytes long")


@pytest.mark.parametrize("format", ["hf", "pt"])
@pytest.mark.parametrize(("name", "fault"), [("write", NO_SPACE), ("create", NO_SPACE), ("sync", BROKEN)])
def test_an_earlier_export_survives_a_failure(tmp_path: Path, format: Format, name: str, fault: Any) -> None:  # noqa: A002
    write_state(tmp_path / "ckpt", parts=["master"])
    zckpt.export(tmp_path / "ckpt", tmp_path / "out", format=format)
    out = tmp_path / "out"
    before = content(out) if format == "hf" else out.read_bytes()
    there = sorted(os.listdir(tmp_path))
    write_state(tmp_path / "ckpt", parts=["master"], seed=1, overwrite=True)
    with faulty(Fault(fault, names=(name,), path="out")), pytest.raises(zckpt.StorageError):
        zckpt.export(tmp_path / "ckpt", out, format=format, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == there
    assert (content(out) if format == "hf" else out.read_bytes()) == before
    zckpt.export(tmp_path / "ckpt", out, format=format, overwrite=True)
    assert (content(out) if format == "hf" else out.read_bytes()) != before
    assert sorted(os.listdir(tmp_path)) == there


def test_a_file_that_appears_after_the_last_check_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    out, put_in_place = tmp_path / "out", place.put_in_place
    zckpt.export(tmp_path / "ckpt", out)

    def late(prepared: str, path: str) -> None:
        monkeypatch.undo()
        (out / "notes.txt").write_text("the only copy")
        put_in_place(prepared, path)

    monkeypatch.setattr(place, "put_in_place", late)
    with pytest.raises(zckpt.CheckpointExistsError, match=r"notes\.txt meanwhile"):
        zckpt.export(tmp_path / "ckpt", out, overwrite=True)
    assert sorted(os.listdir(out)) == ["model.safetensors", "notes.txt"]


def test_only_an_export_is_replaced_and_only_on_request(tmp_path: Path) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    out = tmp_path / "out"
    out.mkdir()
    zckpt.export(tmp_path / "ckpt", out)  # an empty directory has nothing that could be lost
    before = content(out)
    assert_refused(tmp_path, zckpt.CheckpointExistsError, "something is there already")
    assert_refused(tmp_path, zckpt.CheckpointExistsError, "there is a directory, and the export is a file", format="pt")
    (out / "thesis.tex").write_text("the only copy")
    assert_refused(tmp_path, zckpt.CheckpointExistsError, "no export has: thesis.tex", overwrite=True)
    (out / "thesis.tex").unlink()
    (out / "figures").mkdir()
    assert_refused(tmp_path, zckpt.CheckpointExistsError, "no export has: figures", overwrite=True)
    (out / "figures").rmdir()
    (out / "model-00001-of-00002.safetensors").write_text("of an earlier one, in more files")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.json").write_text("{}")
    with pytest.raises(zckpt.CheckpointExistsError, match=r"no weights.*: config"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "settings", overwrite=True)
    zckpt.export(tmp_path / "ckpt", out, overwrite=True)
    assert content(out) == before
    with pytest.raises(zckpt.CheckpointExistsError, match="no export has"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "ckpt", overwrite=True)
    assert zckpt.validate(tmp_path / "ckpt").ok


def test_a_file_that_somebody_else_has_written_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    out = tmp_path / "out"

    class Meanwhile:
        def begin(self, action: str, nbytes: int) -> None:
            out.write_text("the only copy")

        def advance(self, nbytes: int) -> None: ...

        def end(self) -> None: ...

    for form in ("hf", "pt"):
        out.unlink(missing_ok=True)
        with pytest.raises(zckpt.CheckpointExistsError):
            zckpt.export(tmp_path / "ckpt", out, format=form, progress=Meanwhile())
        assert out.read_text() == "the only copy"
        assert sorted(os.listdir(tmp_path)) == ["ckpt", "latest", "out"]


def test_only_what_is_clearly_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert_refused(tmp_path, zckpt.CheckpointExistsError, "no weights, .*: config.json", overwrite=True)
    (out / "model.safetensors").write_text("weights")
    (out / "train.py").write_text("the only copy")
    assert_refused(tmp_path, zckpt.CheckpointExistsError, "no export has: train.py", overwrite=True)
    (out / "config.json").write_text('{"auto_map": {}}')  # a model with its own code
    zckpt.export(tmp_path / "ckpt", out, overwrite=True)
    assert os.listdir(out) == ["model.safetensors"]
    (out / "model.safetensors").unlink()
    out.rmdir()
    for text in ("the only copy", ""):
        out.write_text(text)
        assert_refused(tmp_path, zckpt.CheckpointExistsError, "a file of another kind", overwrite=True, format="pt")
        assert out.read_text() == text


@pytest.mark.parametrize("format", ["hf", "pt"])
def test_nothing_is_written_into_a_checkpoint(tmp_path: Path, format: Any) -> None:  # noqa: A002
    ckpt = write_state(tmp_path / "ckpt", parts=["master"]).path
    (tmp_path / "link").symlink_to(ckpt)
    (rank,) = ckpt.glob("data-*/rank-00000")
    for out in (ckpt / "manifest.msgpack", ckpt / "out", rank / "out", tmp_path / "link" / "out"):
        with pytest.raises(zckpt.CheckpointExistsError, match="is a checkpoint"):
            zckpt.export(ckpt, out, format=format, overwrite=True)
    assert zckpt.validate(ckpt).ok


@pytest.mark.parametrize("format", ["hf", "pt"])
def test_the_target_of_a_link_is_replaced(tmp_path: Path, format: Any) -> None:  # noqa: A002
    write_state(tmp_path / "ckpt", parts=["master"])
    (tmp_path / "link").symlink_to("target")
    for overwrite in (False, True):
        exported = zckpt.export(tmp_path / "ckpt", tmp_path / "link", format=format, overwrite=overwrite)
        assert exported.path == str(tmp_path / "target")
        assert (tmp_path / "link").is_symlink()
        assert sorted(os.listdir(tmp_path)) == ["ckpt", "latest", "link", "target"]


def test_a_file_name_that_is_only_a_suffix(tmp_path: Path) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    zckpt.export(tmp_path / "ckpt", tmp_path / ".pt", format="pt")
    assert torch.load(tmp_path / ".pt", weights_only=True).keys() == zckpt.open(tmp_path / "ckpt").state_dict().keys()


def test_a_torch_file_has_tied_weights_under_every_name_and_stores_them_once(tmp_path: Path) -> None:
    written = write_state(tmp_path / "ckpt", parts=["master"], aliases={"head": "big"})
    zckpt.export(tmp_path / "ckpt", tmp_path / "model.pt", format="pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["head"].data_ptr() == loaded["big"].data_ptr()
    assert torch.equal(loaded["head"], written.full["master/big"])
    assert loaded.keys() == {key.partition("/")[2] for key in written.full} | {"head"}
    assert all(torch.equal(loaded[key.partition("/")[2]], tensor) for key, tensor in written.full.items())
