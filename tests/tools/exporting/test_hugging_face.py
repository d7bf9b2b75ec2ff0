"""zckpt.export writes every kind of model as the files that its save_pretrained writes, byte for byte, and in bounded
memory."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import zckpt
from tests.support.hugging_face import content, make_hugging_face, write_model
from tests.support.states import same, write_state
from zckpt.tools.exporting import write as writing

if TYPE_CHECKING:
    from pathlib import Path

SMALL = zckpt.Budget(4 << 20, 2)


KINDS = ("gpt2", "t5", "mixtral", "qwen2_moe", "llava", "qwen3_vl_moe", "hrm_text")
CASES = [
    pytest.param(kind, layout, marks=() if layout == "zero3" or kind == "mixtral" else pytest.mark.matrix)
    for kind in KINDS
    for layout in ("zero3", "random")
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_the_files_are_those_of_save_pretrained(
    tmp_path: Path, kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WINDOW_BYTES_MAX", 10_000)  # so small that tensors are cut
    model = make_hugging_face(kind)
    write_model(tmp_path / "ckpt", model, layout=layout)
    model.to(torch.bfloat16)
    for size in ("5GB", "60KB", "1KB"):
        expected, actual = tmp_path / f"expected-{size}", tmp_path / f"found-{size}"
        model.save_pretrained(expected, max_shard_size=size)
        zckpt.export(tmp_path / "ckpt", actual, dtype="bf16", config=expected, max_shard_size=size, budget=SMALL)
        ours, theirs = content(actual), content(expected)
        assert list(ours) == list(theirs)
        assert [name for name in ours if ours[name] != theirs[name]] == []


def test_weights_that_are_not_tied_though_the_configuration_says_so_are_both_written(tmp_path: Path) -> None:
    model = make_hugging_face("gpt2")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    write_model(tmp_path / "ckpt", model)
    model.save_pretrained(tmp_path / "expected")
    zckpt.export(tmp_path / "ckpt", tmp_path / "found", config=tmp_path / "expected")
    assert content(tmp_path / "found") == content(tmp_path / "expected")


def test_experts_are_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that holds all experts of a layer is never completely in memory."""
    model = make_hugging_face("mixtral")
    write_model(tmp_path / "ckpt", model)
    model.save_pretrained(tmp_path / "expected")
    asked: list[int] = []
    put = writing._put

    def watched(writer: Any, window: Any, *rest: Any) -> None:
        asked.append(window.nbytes)
        put(writer, window, *rest)

    monkeypatch.setattr(writing, "WINDOW_BYTES_MAX", 8192)
    monkeypatch.setattr(writing, "_put", watched)
    monkeypatch.setattr(writing, "_convert", lambda *_: pytest.fail("a conversion"))
    zckpt.export(tmp_path / "ckpt", tmp_path / "found", config=tmp_path / "expected")
    assert max(asked) <= 8192 < max(tensor.nbytes for tensor in model.state_dict().values())
    assert content(tmp_path / "found") == content(tmp_path / "expected")


def test_files_of_the_tokenizer_are_copied_and_other_files_are_not(tmp_path: Path) -> None:
    model = make_hugging_face("gpt2")
    write_model(tmp_path / "ckpt", model)
    model.save_pretrained(tmp_path / "model")
    taken = [
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "vocab.json",
        "spiece.model",
        "chat_template.jinja",
    ]
    for name in (*taken, "preprocessor_config.json"):
        (tmp_path / "model" / name).write_text(name)
    for name in ("optimizer.pt", "trainer_state.json", "pytorch_model.bin", "README.md", "modeling.py"):
        (tmp_path / "model" / name).write_text("not these")
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("nor older weights")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 7}')
    exported = zckpt.export(tmp_path / "ckpt", tmp_path / "out", config=tmp_path / "model")
    assert exported.files == tuple(
        sorted(["config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json", *taken])
    )
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == 7


def test_the_new_configuration_has_the_dtype_of_the_weights(tmp_path: Path) -> None:
    model = make_hugging_face("gpt2")
    write_model(tmp_path / "ckpt", model)
    model.save_pretrained(tmp_path / "model")
    zckpt.export(tmp_path / "ckpt", tmp_path / "out", config=tmp_path / "model", dtype="fp16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float16}


def test_without_a_configuration_tensors_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)  # importing transformers raises an error
    written = write_state(tmp_path / "ckpt", parts=["master"], buffers={"mean": [torch.arange(9)] * 3})
    zckpt.export(tmp_path / "ckpt", tmp_path / "out", max_shard_size=20_000, dtype="bf16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = {key.partition("/")[2]: key for key in written.full}
    assert index["weight_map"].keys() == names.keys()
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in written.full.values())
    safetensors = pytest.importorskip("safetensors.torch")
    loaded: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        loaded |= safetensors.load_file(tmp_path / "out" / file)
    for name, key in names.items():
        tensor = written.full[key]
        assert same(loaded[name], tensor.bfloat16() if tensor.is_floating_point() else tensor)
    assert "config.json" not in os.listdir(tmp_path / "out")


def test_the_code_of_a_model_is_not_run_and_its_tensors_keep_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["MyModel"], "auto_map": {"AutoModel": "modeling.MyModel"}, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('executed')")
    write_state(tmp_path / "ckpt", parts=["master"])
    exported = zckpt.export(tmp_path / "ckpt", tmp_path / "out", config=folder, dtype="bf16")
    assert exported.files == ("config.json", "model.safetensors", "modeling.py")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "dtype": "bfloat16"}
