"""Restores of a checkpoint that fits the engine only in part: which rank says what does not fit, and what the result
contains."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import zckpt
from tests.support import models
from tests.support.fragments import data_of
from tests.support.models import Mlp, make_engine, train
from tests.support.runs import assert_same, inner, tensors_of
from tests.support.runs import weights as weights_of
from zckpt.checkpoint.restore import restore_engine
from zckpt.checkpoint.restoring.plan import Request
from zckpt.checkpoint.write import write_engine
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.engines import adapt

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


class Deep(nn.Module):
    """A model that has more tensors than one message shows. With ``extra``, it has one more layer and a buffer."""

    def __init__(self, width: int = 8, extra: bool = False, prefix: str = "layers") -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.add_module(prefix, nn.Sequential(*layers))
        self.prefix, self.width = prefix, width
        if extra:
            self.extra = nn.Linear(width, width)
            self.register_buffer("seen", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.prefix)(x[:, : self.width]).float().square().mean()


class Pair(nn.Module):
    """A model of a weight with ``rows`` rows and a bias, which always has the same size."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(rows, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, : len(self.weight)] @ self.weight + self.bias).float().square().mean()


def engine_of(module: nn.Module, stage: int = 2, **options: Any) -> Any:
    original = models.make_model
    models.make_model = lambda model: module
    try:
        return make_engine(stage=stage, **options)
    finally:
        models.make_model = original


def refused(engine: Any, path: str, **options: Any) -> tuple[str, str]:
    before, steps = tensors_of(engine), engine.global_steps
    with pytest.raises(zckpt.ZckptError) as caught:
        zckpt.restore(engine, path, **options)
    after = tensors_of(engine)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert engine.global_steps == steps
    return type(caught.value).__name__, str(caught.value)


def restore_in_part(path: str) -> dict[str, Any]:
    engine = engine_of(Deep(extra=True))
    train(engine, 2)
    zckpt.write(engine, path)
    wide, renamed = engine_of(Deep(width=16)), engine_of(Deep(prefix="base_model"))
    results: dict[str, Any] = {
        "wide": refused(wide, path),
        "wide, in part": refused(wide, path, strict=False),
        "renamed": refused(renamed, path),
        "renamed, in part": refused(renamed, path, strict=False),
        "nothing asked for": dict(zckpt.restore(renamed, path, parts=[], strict=False)),
    }
    results["a buffer alone"] = refused(engine_of(Deep(width=16, extra=True)), path, strict=False)

    zckpt.write(engine, f"{path}-master", parts=["master"])
    untrained = engine_of(Deep(extra=True))
    for name, other in {"fresh": untrained, "trained": engine}.items():
        for strict in (True, False):
            results[f"masters alone, {name}, {strict}"] = refused(other, f"{path}-master", strict=strict)
    assert zckpt.restore(engine, f"{path}-master", parts=["master"]).kept == {}

    zckpt.write(engine, f"{path}-lost")
    if torch.distributed.get_rank() == 0:
        os.remove(f"{path}-lost/manifest.msgpack")
        zckpt.repair(f"{path}-lost")
    torch.distributed.barrier()
    results["lost state"] = refused(untrained, f"{path}-lost")
    assert dict(zckpt.restore(untrained, f"{path}-lost", parts=["master"])) == {}
    assert_same(weights_of(untrained), weights_of(engine))

    smaller = engine_of(Deep())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = zckpt.restore(smaller, path, strict=False)
    results["unexpected"] = (result.restored, result.kept, result.unexpected)
    results["said"] = [str(warning.message) for warning in warned if "in part" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in warned if "in part" in str(warning.message))
    zckpt.write(smaller, f"{path}-smaller", client_state={"a": 1})
    extra_moments = {f.key: data_of(f) for f in adapt(engine).inventory(None).fragments if "exp_avg/extra." in f.key}
    for data in extra_moments.values():
        data.fill_(3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = zckpt.restore(engine, f"{path}-smaller", strict=False)
        assert all(data.eq(3).all() for data in extra_moments.values())
        again = zckpt.restore(smaller, f"{path}-smaller", strict=False)
    results["kept"] = (result.restored, result.kept, result.unexpected)
    results["also said"] = [str(warning.message) for warning in warned if "in part" in str(warning.message)]
    results["whole"] = (dict(again), {part: len(names) for part, names in again.restored.items()}, again.kept)
    return results


@pytest.fixture(scope="module")
def in_part(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return cluster.run(restore_in_part, 2, str(tmp_path_factory.mktemp("part") / "c"))


def test_a_mismatch_is_grouped_and_one_rank_lists_it(in_part: list[dict[str, Any]]) -> None:
    kind, text = in_part[0]["wide"]
    assert kind == "MismatchError"
    assert " strict=False" not in text
    assert "  all 24 tensors differ in shape; the first 5:" in text
    assert text.count("differs: ") == 5
    assert "this looks like a model of another size" in text
    assert "7 tensors of the checkpoint have no place in the engine; the first 5:" in text
    kind, text = in_part[0]["renamed"]
    assert "  all 8 tensors of the engine are missing in the checkpoint; the first 5:" in text
    assert "this looks like another model" in text
    assert len(text) < 3000
    for case in ("wide", "renamed", "wide, in part", "renamed, in part"):
        kind, text = in_part[1][case]
        assert kind == "MismatchError"
        assert "rank 0 lists all that differs" in text
        assert f"all {8 if 'renamed' in case else 24} tensors" in text
        assert text.count("\n") <= 1
        assert "nothing was changed" in text


def test_a_restore_of_nothing_is_refused(in_part: list[dict[str, Any]]) -> None:
    for case in ("wide, in part", "renamed, in part", "a buffer alone"):
        kind, text = in_part[0][case]
        assert kind == "MismatchError"
        assert "no weight at all would be restored" in text
        assert "state_dict()" in text
    assert in_part[0]["nothing asked for"] == {}


@pytest.mark.parametrize("name", ["fresh", "trained"])
@pytest.mark.parametrize("strict", [True, False])
def test_masters_alone_do_not_resume_a_run(in_part: list[dict[str, Any]], name: str, strict: bool) -> None:
    (kind, text), (other_kind, other) = (results[f"masters alone, {name}, {strict}"] for results in in_part)
    assert kind == other_kind == "MismatchError"
    why = (
        "the checkpoint leaves out exp_avg, exp_avg_sq, without which" if strict else "9 more: not restored, though the"
    )
    assert why in text
    for said in (text, other):
        assert 'parts=["master"] restores the weights alone' in said
        assert "strict=False" not in said
    assert "rank 0 lists all that differs" in other


def test_a_checkpoint_that_has_lost_its_state_is_not_called_damaged(in_part: list[dict[str, Any]]) -> None:
    kind, text = in_part[0]["lost state"]
    assert kind == "MismatchError"
    assert "counters, optimizer, scaler, scheduler: not in the checkpoint" in text
    assert 'parts=["master", "buffer"] restores the weights alone; zckpt.open(path).state_dict()' in text
    assert "rule" not in text
    assert "whole" not in text


def test_the_result_says_what_was_restored(in_part: list[dict[str, Any]]) -> None:
    layers = {f"layers.{number}.{kind}" for number in range(4) for kind in ("weight", "bias")}
    extra = {"extra.weight", "extra.bias"}
    moments = ("exp_avg", "exp_avg_sq")
    assert [results["unexpected"] for results in in_part] == [in_part[0]["unexpected"]] * 2
    restored, kept, unexpected = in_part[0]["unexpected"]
    assert {part: set(names) for part, names in restored.items()} == dict.fromkeys(("master", *moments), layers)
    assert kept == {}
    expected = {**dict.fromkeys(("master", *moments), extra), "buffer": {"seen"}}
    assert {part: set(names) for part, names in unexpected.items()} == expected
    (said,) = in_part[0]["said"]
    assert "24 tensors are restored (8 of master, 8 of exp_avg, 8 of exp_avg_sq: layers." in said
    assert "0 of the engine are kept as they are" in said
    assert "7 of the checkpoint are left out (" in said
    assert in_part[1]["said"] == []
    restored, kept, unexpected = in_part[0]["kept"]
    assert {part: set(names) for part, names in kept.items()} == expected
    assert unexpected == {}
    (said,) = in_part[0]["also said"]
    assert "7 of the engine are kept as they are (2 of master, 2 of exp_avg, 2 of exp_avg_sq, 1 of buffer: ext" in said
    assert "kept moments beside restored ones" in said
    assert in_part[0]["whole"] == ({"a": 1}, {"master": 8, "exp_avg": 8, "exp_avg_sq": 8}, {})


def restore_all_but_one_weight(path: str) -> None:
    saved, engine = (engine_of(Pair(rows), groups=True) for rows in (8, 16))
    train(saved, 2)
    zckpt.write(saved, path)
    train(engine, 5)
    first, second = inner(engine).param_groups
    first["lr"] = second["lr"] = 0.5
    before = tensors_of(engine)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = zckpt.restore(engine, path, strict=False)
    (message,) = [str(warning.message) for warning in warned if "in part" in str(warning.message)]
    assert "3 of the checkpoint are left out (1 of master, 1 of exp_avg, 1 of exp_avg_sq: weight)" in message
    parts = ("master", "exp_avg", "exp_avg_sq")
    assert result.restored == dict.fromkeys(parts, ("bias",))
    assert result.kept == result.unexpected == dict.fromkeys(parts, ("weight",))
    expected = {key: value for key, value in (before | tensors_of(saved)).items() if "bias" in key[0] or key[2] == 128}
    assert_same(tensors_of(engine), expected)
    assert [int(inner(engine).state[group["params"][0]]["step"]) for group in (first, second)] == [5, 2]
    assert (first["lr"], second["lr"]) == (0.5, 2e-2)


def test_a_kept_weight_keeps_its_optimizer_state(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(restore_all_but_one_weight, 1, str(tmp_path / "c"))


class Strided(Mlp):
    """A model whose buffers have no contiguous memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(4, 6)
        self.register_buffer("table", table)
        self.register_buffer("turned", table.t())
        self.register_buffer("column", table[:, 2])
        self.register_buffer("one", torch.zeros(1).expand(5))
        self.register_buffer("several", torch.zeros(1).expand(5))
        self.whole = torch.zeros(6, 4)  # `part` is a view of this tensor, which is not a buffer
        self.register_buffer("part", self.whole[:, 1:3])
        self.register_buffer("mirrored", torch.zeros(3, dtype=torch.complex64).conj())


def restore_strided(path: str) -> None:
    module: Any = Strided()
    engine = engine_of(module, stage=0)
    module.table.copy_(torch.arange(24).view(4, 6))
    module.part.copy_(torch.arange(12).view(6, 2))
    module.one.data[:1] = 7
    module.several.data = torch.arange(5, dtype=module.several.dtype)
    module.mirrored.copy_(torch.tensor([1 + 2j, 3 - 4j, 5j]))
    zckpt.write(engine, path)
    memory = {name: buffer.data_ptr() for name, buffer in module.named_buffers()}
    for buffer in (module.table, module.whole, module.one.data[:1], module.several, module.mirrored):
        buffer.zero_()
    module.several.data = torch.zeros(1, dtype=module.several.dtype).expand(5)
    shared = module.several.data[:1]
    zckpt.restore(engine, path)
    assert module.table.tolist() == torch.arange(24).view(4, 6).tolist()
    assert module.whole[:, 1:3].tolist() == module.part.tolist() == torch.arange(12).view(6, 2).tolist()
    assert module.one.tolist() == [7] * 5
    assert module.several.tolist() == [0, 1, 2, 3, 4]
    assert module.mirrored.is_conj()
    assert module.mirrored.tolist() == [1 + 2j, 3 - 4j, 5j]
    assert shared.tolist() == [0]
    assert all(buffer.data_ptr() == memory[name] for name, buffer in module.named_buffers() if name != "several")
    module.table.add_(1)  # this changes its views too
    assert module.turned.tolist() == module.table.t().tolist()
    assert module.column.tolist() == module.table[:, 2].tolist()
    assert module.one.stride() == (0,)


def test_strided_buffers_are_filled_in_place(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(restore_strided, 1, str(tmp_path / "c"))


def restore_client_state(path: str, own_client_state: bool, write: bool) -> tuple[dict[str, Any], list[str]]:
    engine = make_engine(stage=2)
    rank = torch.distributed.get_rank()
    if write:
        late = {"position": 7} if rank else None  # rank 0 has none, which must not decide for rank 1
        write_engine(engine, f"{path}-late", WriteOptions(client_state=late, each_client_state=True))
        assert restore_engine(engine, f"{path}-late", Request(own_client_state=True))[0] == (late or {})
        state = {"step": 1, "position": rank, "order": torch.arange(rank + 1)}
        write_engine(engine, path, WriteOptions(client_state=state, each_client_state=True))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result, _ = restore_engine(engine, path, Request(own_client_state=own_client_state))
    result["order"] = result["order"].tolist()
    return dict(result), [str(warning.message) for warning in warned if "client_state" in str(warning.message)]


def test_each_rank_gets_its_own_client_state_again(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    states = [{"step": 1, "position": rank, "order": list(range(rank + 1))} for rank in range(2)]
    assert cluster.run(restore_client_state, 2, path, True, True) == [(states[0], []), (states[1], [])]
    assert cluster.run(restore_client_state, 2, path, False, False) == [(states[0], [])] * 2
    ((state, said),) = cluster.run(restore_client_state, 1, path, True, False)
    assert state == states[0]
    assert len(said) == 1
    assert "2 ranks" in said[0]
    assert zckpt.open(f"{path}-late").rank_state(0)["client_state"] == {}
