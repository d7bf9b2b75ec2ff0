"""Folders that were made to do harm are refused in bounded memory and time, and no file outside of them is read."""

from __future__ import annotations

import json
import os
import random
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.deepspeed_folders import Runs, kinds, make_folder, refused
from zckpt.tools.converting import restricted_pickle
from zckpt.tools.converting.restricted_pickle import load
from zckpt.transfer.stored import with_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL_STATES = "mp_rank_00_model_states.pt"


def nested_twice(value: Any, times: int, kind: Callable[[Any], Any] = list) -> Any:
    for _ in range(times):
        value = kind((value, value))
    return value


def list_that_contains_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


LONG = "x" * 10_000
MANY = list(range(1000))


@pytest.mark.parametrize(
    "value",
    [
        nested_twice(0, 40),
        nested_twice([0], 40),
        nested_twice((0,), 40, tuple),
        nested_twice({0: 0}, 40, lambda pair: {0: pair[0], 1: pair[1]}),
        list_that_contains_itself(),
        [MANY] * 10_000,
        [Runs(list, LONG)] + [Runs(list, LONG) for _ in range(100)],
    ],
)
def test_values_that_contain_the_same_value_too_often(tmp_path: Path, value: object) -> None:
    refused(make_folder(tmp_path / "source", extra=value), zckpt.FormatError, "in so many places")


def test_a_value_in_two_places_is_converted(tmp_path: Path) -> None:
    import numpy as np

    array, numbers = np.arange(3), [1, 2, 3]
    shared = (array, numbers)
    source = make_folder(tmp_path / "source", one=shared, other=shared, grid=torch.zeros(2, 1).expand(2, 3))
    actual = zckpt.open(zckpt.convert(source, tmp_path / "converted").path).state["client_state"]
    assert actual["grid"].tolist() == [[0.0] * 3] * 2
    for name in ("one", "other"):
        assert actual[name][0].tolist() == [0, 1, 2]
        assert actual[name][1] == numbers


@pytest.mark.parametrize("name", ["module", "extra"])
def test_a_tensor_of_far_more_elements_than_are_stored(tmp_path: Path, name: str) -> None:
    large = torch.zeros(1).expand(10**14)
    value: Any = {"weight": large} if name == "module" else [large]
    refused(make_folder(tmp_path / "source", **{name: value}), zckpt.FormatError, "more elements than are stored")


def test_copies_of_tensors_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted_pickle, "COPIED_BYTES_MAX", 1000)
    grid = torch.zeros(20, 20).t()
    path = tmp_path / "file.pt"
    torch.save([grid] * 4, path)
    assert all(torch.equal(with_values(tensor), grid) for tensor in load(str(path)))
    torch.save([grid[number:] for number in range(4)], path)
    with pytest.raises(zckpt.FormatError, match="more elements"):
        load(str(path))


@pytest.mark.parametrize("ranks", [0, 2000, (1 << 20) + 1, 10**9])
def test_an_impossible_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    source = make_folder(tmp_path / "source", dp_world_size=ranks)
    for file in source.glob("*optim_states.pt"):
        file.unlink()  # so that the stage is 0
    refused(source, zckpt.FormatError, f"the run had {ranks} ranks")


def rezip(source: Path, changed: str, change: Callable[[bytes], bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Changes a record in the file of the model states."""
    path = source / MODEL_STATES
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in records.items():
            is_changed = name.endswith(changed)
            archive.writestr(name, change(raw) if is_changed else raw, method if is_changed else zipfile.ZIP_STORED)


@pytest.mark.parametrize("name", ["byteorder", "data.pkl"])
def test_a_compressed_record(tmp_path: Path, name: str) -> None:
    source = make_folder(tmp_path / "source")
    rezip(source, name, lambda raw: raw, zipfile.ZIP_DEFLATED)
    refused(source, zckpt.FormatError)


def test_an_encrypted_record(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "source") / MODEL_STATES
    raw = bytearray(path.read_bytes())
    raw[raw.find(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    refused(path.parent, zckpt.FormatError)


@pytest.mark.parametrize("latest", [b"/{outside}", b"../outside", b"a\0b", b"\xff", b"x" * 5000, b""])
def test_a_latest_that_leads_elsewhere(tmp_path: Path, latest: bytes) -> None:
    make_folder(tmp_path / "outside")
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest").write_bytes(latest.replace(b"/{outside}", str(tmp_path / "outside").encode()))
    refused(run, zckpt.FormatError, "L001")


@pytest.mark.linux
@pytest.mark.parametrize("name", ["latest", MODEL_STATES, "config.json"])
def test_a_pipe_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    if name == MODEL_STATES:
        make_folder(source)
        (source / name).unlink()
    elif name == "latest":
        source.mkdir()
    else:
        hugging_face(source, {})
    os.mkfifo(source / name)
    refused(source, zckpt.FormatError, "regular file")


def test_a_universal_checkpoint_whose_names_lead_elsewhere(tmp_path: Path) -> None:
    shapes = [{"../../outside": torch.Size([2])}]
    source = make_folder(tmp_path / "source", param_shapes=shapes)
    (source / "zero").mkdir()
    group = {"lr": 0.1, "params": [0]}
    torch.save({"param_groups": [group], "zero_stage": 2}, source / "zero" / "optimizer_state.pt")
    (tmp_path / "outside").mkdir()
    torch.save({"param": torch.ones(2)}, tmp_path / "outside" / "fp32.pt")
    refused(source, zckpt.FormatError, r"'\.\./\.\./outside' has no file")


@pytest.mark.parametrize(
    "more",
    [
        {"global_steps": 1 << 80},
        {"module": {1: torch.zeros(2)}},
        {"module": {"../../x": torch.zeros(2)}, "buffer_names": [3]},
        {"param_shapes": [3]},
        {"param_shapes": [{"weight": "abc"}]},
        {"param_shapes": [{"weight": (-4, -2)}]},
        {"buffer_names": 3},
        {"ds_config": {"gradient_clipping": "x"}},
        {"shared_params": [1]},
    ],
)
def test_impossible_values(tmp_path: Path, more: dict[str, Any]) -> None:
    source = make_folder(tmp_path / "source", **more)
    try:
        zckpt.convert(source, tmp_path / "converted")
    except zckpt.ZckptError:
        assert not (tmp_path / "converted").exists()
        return
    assert zckpt.validate(tmp_path / "converted").ok


@pytest.mark.parametrize("shape", [(1 << 62,) * 10_000, (1 << 70, 0), (2.0, 4), "ab"])
def test_a_shape_that_no_tensor_can_have(tmp_path: Path, shape: object) -> None:
    source = make_folder(tmp_path / "source", param_shapes=[{"weight": shape}])
    refused(source, zckpt.FormatError, "a shape that no tensor can have")


def test_weights_that_could_be_in_endless_orders(tmp_path: Path) -> None:
    """At stage 0, the names of the weights are found by their values, of which there are 10^9 combinations here."""
    module = {f"weight{number}": torch.zeros(1, dtype=torch.float16) for number in range(1500)}
    optimizer = {**kinds()["0-fp16"][MODEL_STATES]["optimizer"], "fp32_groups_flat": [torch.zeros(1500)]}
    source = make_folder(tmp_path / "source", module=module, buffer_names=[], optimizer=optimizer)
    for file in source.glob("*optim_states.pt"):
        file.unlink()
    refused(source, zckpt.UnsupportedError, "too many weights of the module are equal")


CONFIG: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1,
    "vocab_size": 10, "n_positions": 4,
}  # fmt: skip


def hugging_face(folder: Path, header: dict[str, Any], config: object = None) -> Path:
    """Makes the folder of a model. Its file has this header, and 1,000 bytes after it."""
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(1000))
    return folder


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (DEEP, zckpt.FormatError),
        ("no JSON", zckpt.FormatError),
        ("[]", zckpt.FormatError),
        ({**CONFIG, "architectures": ["is_torch_available"]}, zckpt.UnsupportedError),
        ({**CONFIG, "architectures": ["GPT2Config"]}, zckpt.UnsupportedError),
        ({**CONFIG, "architectures": 3}, zckpt.FormatError),
        ({**CONFIG, "n_embd": "x"}, zckpt.FormatError),
        ({**CONFIG, "model_type": "none"}, zckpt.FormatError),
    ],
)
def test_a_configuration_of_no_model(tmp_path: Path, config: object, error: type[Exception]) -> None:
    refused(hugging_face(tmp_path / "source", {}, config), error)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"n_layer": 6000}, "far more than its weights have tensors"),
        ({"n_layer": 10**9}, "n_layer is 1000000000, and may be 65536 at most"),
        ({"num_labels": 10**9}, "num_labels is 1000000000"),
        ({"text_config": {"depths": [1, 10**9]}}, "depths is 1000000000"),
    ],
)
def test_a_configuration_of_a_model_that_is_far_larger_than_its_weights(
    tmp_path: Path, more: dict[str, Any], match: str
) -> None:
    refused(hugging_face(tmp_path / "source", {}, {**CONFIG, **more}), zckpt.FormatError, match)


def test_a_configuration_that_asks_for_code_from_the_internet(tmp_path: Path) -> None:
    """transformers would import another implementation of attention. The weights do not depend on it."""
    import transformers

    transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).save_pretrained(tmp_path / "source")
    config = {**CONFIG, "attn_implementation": "kernels-community/flash-attn"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assert zckpt.validate(zckpt.convert(tmp_path / "source", tmp_path / "converted").path).ok


def test_tensors_of_a_safetensors_file_that_share_bytes(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    source = hugging_face(tmp_path / "source", {"a": entry, "b": {**entry, "data_offsets": [4, 12]}}, CONFIG)
    refused(source, zckpt.FormatError, "share bytes.*key b")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_that_is_too_long(tmp_path: Path, name: str) -> None:
    source = hugging_face(tmp_path / "source", {}, CONFIG)
    (source / name).touch()
    os.truncate(source / name, 1 << 40)
    refused(source, zckpt.FormatError, "the file has more than 100000000 bytes")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 1 << 126]},
        {"dtype": [], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        [],
    ],
)
def test_an_impossible_header(tmp_path: Path, entry: object) -> None:
    source = hugging_face(tmp_path / "source", {"transformer.wte.weight": entry}, CONFIG)
    refused(source, zckpt.FormatError)


def test_a_header_of_deeply_nested_json(tmp_path: Path) -> None:
    source = hugging_face(tmp_path / "source", {}, CONFIG)
    (source / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    refused(source, zckpt.FormatError)


def spoiled(raw: bytes, random: random.Random) -> bytes:
    """Returns the bytes with some bits flipped, with some bytes replaced, removed or added, or cut off."""
    changed = bytearray(raw)
    for _ in range(random.choice((1, 1, 3, 20))):
        if not changed:
            break
        at = random.randrange(len(changed))
        how = random.randrange(5)
        if how == 0:
            changed[at] ^= 1 << random.randrange(8)
        elif how == 1:
            changed[at] = random.randrange(256)
        elif how == 2:
            del changed[at : at + random.randrange(1, 9)]
        elif how == 3:
            changed[at:at] = random.randbytes(random.randrange(1, 9))
        else:
            del changed[max(at, 1) :]
    return bytes(changed)


def attempt(source: Path, destination: Path) -> bool:
    """Returns whether a spoiled source can be converted. If it cannot, nothing may be left."""
    try:
        zckpt.convert(source, destination, overwrite=True)
    except zckpt.ZckptError:
        assert not destination.exists() or not any(destination.iterdir())
        return False
    assert zckpt.validate(destination).ok
    for file in sorted(destination.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    return True


@pytest.mark.parametrize("cases", [15, pytest.param(400, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", ["deepspeed", "hugging face"])
def test_spoiled_sources(tmp_path: Path, kind: str, cases: int) -> None:
    """Either the result is complete and valid, or there is a ZckptError and nothing is left."""
    chance = random.Random(cases)
    source = tmp_path / "source"
    if kind == "deepspeed":
        files = sorted(make_folder(source, 2, epoch=7, text=["a", {"b": 1.5}]).glob("*.pt"))
    else:
        import transformers

        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))
        model.save_pretrained(source)
        files = [source / "model.safetensors", source / "config.json"]
    outcomes = set()
    for _ in range(cases):
        path = chance.choice(files)
        sound = path.read_bytes()
        path.write_bytes(spoiled(sound, chance))
        outcomes.add(attempt(source, tmp_path / "converted"))
        path.write_bytes(sound)
    assert attempt(source, tmp_path / "converted")
    assert outcomes == {False, True}, "some bytes matter, and some do not"
