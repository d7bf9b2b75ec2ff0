"""zckpt.convert on folders whose files can be read, but in which one value is not what DeepSpeed writes there."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from transformers import GPT2Config, GPT2LMHeadModel

import zckpt
from tests.support.deepspeed_folders import OPTIMIZER, kinds, make_folder, zero_state
from tests.support.states import write_state
from zckpt.errors import FormatError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GONE = object()
OTHERS = [
    GONE, None, True, -1, 7, 1 << 70, 1.5, math.nan, "text", b"raw", [], {}, (), [[]], [None], {"a": 1}, {1: [2]},
    torch.ones(3), torch.ones((), dtype=torch.complex64), torch.Size([1 << 40, 1 << 40]),
]  # fmt: skip
KINDS = kinds()


def entries(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each value in nested containers, as keys and indexes."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield (*way, key)
        yield from entries(value, (*way, key))


def changed(tree: Any, way: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of ``tree`` in which ``value`` is at the end of ``way``. If ``value`` is GONE, the entry is
    missing there."""
    if not way:
        return value
    key, *rest = way
    items = dict(tree.items() if isinstance(tree, dict) else enumerate(tree))
    items[key] = changed(items[key], tuple(rest), value)
    if items[key] is GONE:
        del items[key]
    if isinstance(tree, dict):
        return items
    return list(items.values()) if isinstance(tree, list) else tuple(items.values())


def cases(kind: str) -> list[tuple[str, tuple[Any, ...]]]:
    return [(file, way) for file, tree in KINDS[kind].items() for way in [(), *entries(tree)]]


def check(folder: Path, source: Path, **options: Any) -> bool:
    """Returns whether the folder can be converted. If not, the error has to be clear and to name the file, and nothing
    may be left."""
    destination, refused = folder / "converted", None
    try:
        converted = zckpt.convert(source, destination, **options)
    except zckpt.ZckptError as error:
        refused = error
    if refused is not None:
        assert not isinstance(refused, StorageError)
        assert not isinstance(refused, FormatError) or str(refused.file).startswith(str(source)), refused
        assert not destination.exists()
        return False
    if not options:
        assert zckpt.validate(converted.path).ok
    shutil.rmtree(destination)
    return True


@pytest.mark.parametrize("share", [61, pytest.param(5, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_value_may_be_wrong(tmp_path: Path, kind: str, share: int) -> None:
    source = tmp_path / "source"
    for file, tree in KINDS[kind].items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        torch.save(tree, source / file)
    assert check(tmp_path, source)
    tried = [(file, way, other) for file, way in cases(kind) for other in OTHERS][::share]
    for file, way, other in tried:
        tree = KINDS[kind][file]
        torch.save(changed(tree, way, None if other is GONE and not way else other), source / file)
        try:
            check(tmp_path, source)
        except BaseException as error:
            error.add_note(f"{kind}, {file}: {way} was {other!r}")
            raise
        torch.save(tree, source / file)


@pytest.mark.parametrize("share", [41, pytest.param(3, marks=pytest.mark.matrix)])
def test_any_value_of_a_hugging_face_model_may_be_wrong(tmp_path: Path, share: int) -> None:
    source = tmp_path / "model"
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=2))
    model.save_pretrained(source)
    (source / "model.safetensors").unlink()
    weights, config = model.state_dict(), json.loads((source / "config.json").read_text())
    torch.save(weights, source / "pytorch_model.bin")
    assert check(tmp_path, source)
    plain = [other for other in OTHERS if isinstance(other, (type(None), bool, int, float, str, list, dict))]
    for key, other in [(key, other) for key in config for other in [*plain, GONE]][::share]:
        large = type(other) is int and other > 7  # a model of that size would take long to refuse
        (source / "config.json").write_text(json.dumps(changed(config, (key,), 9 if large else other)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns about some of the values
            check(tmp_path, source)
    (source / "config.json").write_text(json.dumps(config))
    for way, other in [(way, other) for way in [(), *((name,) for name in weights)] for other in OTHERS][::share]:
        torch.save(changed(weights, way, None if other is GONE and not way else other), source / "pytorch_model.bin")
        check(tmp_path, source)


@pytest.mark.parametrize("share", [97, pytest.param(5, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_value_of_a_checkpoint_that_becomes_a_folder_may_be_wrong(tmp_path: Path, stage: int, share: int) -> None:
    names = ["a", "b"]
    state = {
        "counters": {"global_steps": 5, "global_samples": 40, "micro_steps": 5, "skipped_steps": 0},
        "deepspeed": {
            "stage": stage, "dtype": "float16", "grad_accum_dtype": "float16", "sub_group_size": 9,
            "gradient_clipping": 1.0, "round_robin_gradients": False, "parameter_alignment": False,
            "cpu_offload": False, "other_dtypes": {"a": "float32"}, "groups": None,
        },
        "optimizer": {
            "class": "AdamW",
            "param_groups": [{"params": names, "lr": 0.1}],
            "states": [{"params": names, "moments": ["exp_avg", "exp_avg_sq"], "values": {"step": 5}}],
        },
        "scaler": {
            "class": "DynamicLossScaler", "values": {"cur_scale": 512.0, "cur_iter": 3, "dynamic": True},
            "wrapper": {"overflow": False},
        },
        "scheduler": {"class": "WarmupLR", "state": {"last_batch_iteration": 3}},
    }  # fmt: skip
    path = tmp_path / "run" / "here"
    kept = [value for value in OTHERS if not isinstance(value, torch.Size)]
    write_state(path, 2, {"a": (3, 5), "b": (7,)}, engine_state=state)
    assert check(tmp_path, path, to="deepspeed")
    for way, other in [(way, other) for way in entries(state) for other in kept][::share]:
        shutil.rmtree(tmp_path / "run")
        write_state(path, 2, {"a": (3, 5), "b": (7,)}, engine_state=changed(state, way, other))
        try:
            check(tmp_path, path, to="deepspeed")
        except BaseException as error:
            error.add_note(f"{way} was {other!r}")
            raise


@pytest.mark.parametrize("by_name", [False, True])
def test_a_stage_that_is_saved_by_its_number_or_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    def reduced(stage: ZeroStageEnum, protocol: object) -> tuple[object, ...]:
        """Pickles an enum as Python 3.11.0 to 3.11.3 do, or as all others do."""
        return (getattr, (type(stage), stage.name)) if by_name else (type(stage), (stage.value,))

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", reduced)
    source = make_folder(tmp_path / "source")
    torch.save(zero_state(zero_stage=ZeroStageEnum.optimizer_states), source / f"bf16_{OPTIMIZER}")
    assert zckpt.convert(source, tmp_path / "made").found_format == "DeepSpeed checkpoint, ZeRO stage 1"
