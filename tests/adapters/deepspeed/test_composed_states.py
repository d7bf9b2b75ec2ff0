"""Optimizers whose state is in tensors that have no memory of their own, such as those of torchao: they resume bit for
bit, or they are refused by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.coded import Coded, Opaque
from tests.support.composed import SETUPS, held, resume
from tests.support.models import make_engine, train
from tests.support.runs import inner

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

SUB_GROUPS: dict[str, dict[str, Any]] = {"3-sub-groups": {"stage": 3, "sub_group_size": 1000}}
"""A setup whose flat buffers are too small for torchao, which keeps moments of fewer than 4096 elements in float32."""


def test_a_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(resume, 2, str(tmp_path), {**SETUPS, **SUB_GROUPS}, "coded")
    assert all(zckpt.validate(tmp_path / name).ok for name in SETUPS)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("kind", ["8bit", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("4bit", "Fp8"))])
def test_a_run_with_torchao_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    cluster.run(resume, 2, str(tmp_path), SETUPS, f"torchao {kind}")
    assert all(zckpt.validate(tmp_path / name).ok for name in SETUPS)


def write_trained(path: str, setup: dict[str, Any]) -> None:
    engine = make_engine(**setup)
    train(engine, 2)
    zckpt.write(engine, path)


def refuse(path: str, setup: dict[str, Any], trained: int, message: str) -> None:
    engine = make_engine(**setup, seed=1)
    train(engine, trained, 100)
    before = held(engine)
    with pytest.raises((zckpt.MismatchError, zckpt.RankError), match=message):
        zckpt.restore(engine, path)
    assert held(engine) == before
    zckpt.restore(engine, path, parts=["master"])


@pytest.mark.parametrize("trained", [0, 1])
def test_coded_states_fit_only_the_partitioning_that_they_were_made_for(
    cluster: Cluster, tmp_path: Path, trained: int
) -> None:
    setup = {"stage": 2, "optimizer": "coded"}
    cluster.run(write_trained, 2, str(tmp_path), setup)
    for ranks, stage in ((1, 2), (2, 3)):
        message = "momentum of CodedMomentum cannot be cut anew"
        cluster.run(refuse, ranks, str(tmp_path), {**setup, "stage": stage}, trained, message)


def refuse_others(path: str) -> None:
    setup: dict[str, Any] = {"stage": 2, "optimizer": "coded"}
    differs = r"momentum of layers\.0\.weight and 3 more differs: Coded \[8320\] with .*"
    scales = r"scale .*, \[1\]\].* in the checkpoint, .*scale .*, \[4\]\].* in the engine"
    refuse(path, {**setup, "optimizer": "coded in four"}, 1, differs + scales)
    torch.serialization.clear_safe_globals()
    refuse(path, setup, 0, r"the engine has none before its first step.*add_safe_globals\(\[Coded\]\)")
    engine = make_engine(**setup, seed=1)
    train(engine, 1, 100)
    zckpt.restore(engine, path)
    with torch.serialization.safe_globals([type("Coded", (Opaque,), {})]):
        refuse(path, setup, 0, "no new one can be made .*__tensor_unflatten__")
    with torch.serialization.safe_globals([Coded]):
        zckpt.restore(make_engine(**setup, seed=1), path)
    made = make_engine(**setup, seed=1)
    train(made, 1)
    (state,) = inner(made).state.values()
    state["momentum"] = torch.zeros_like(state["momentum"].codes, dtype=torch.float32)
    with pytest.raises(zckpt.MismatchError, match="differs: Coded"):
        zckpt.restore(made, path)


def test_a_state_of_another_kind_is_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_trained, 1, str(tmp_path), {"stage": 2, "optimizer": "coded"})
    cluster.run(refuse_others, 1, str(tmp_path))


def refuse_to_write(path: str) -> None:
    for stage in range(4):
        where = r"rank_state\[.\]\.optimizer\[0\]" if stage else r"optimizer\.states\[0\]"
        engine = make_engine(stage=stage, dtype="fp32", optimizer="opaque")
        train(engine, 1)
        with pytest.raises(zckpt.StateError, match=rf"{where}\.values\.momentum .*Opaque"):
            zckpt.write(engine, f"{path}/c")
        with pytest.raises(zckpt.UnsupportedError, match=r"momentum/.*Opaque"):
            zckpt.where(engine)
    assert not Path(path).exists()


def test_a_state_that_cannot_be_taken_apart_is_refused_before_a_write(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refuse_to_write, 2, str(tmp_path / "run"))


def refuse_a_weight(path: str, given: str) -> None:
    for name, value in (("layers.0.weight", Coded(torch.zeros(64, 64, dtype=torch.int8), torch.ones(1))),
                        ("layers.0.bias", torch.ones(64, dtype=torch.complex64).conj())):  # fmt: skip
        engine = make_engine(stage=0, dtype="fp32", optimizer="none")
        layer = engine.module.get_submodule("layers.0")
        setattr(layer, name.rpartition(".")[2], torch.nn.Parameter(value, requires_grad=False))
        calls: list[Any] = [zckpt.write, zckpt.export, zckpt.offload, zckpt.where, zckpt.restore]
        for call, arguments in zip(calls, ([f"{path}/c"], [f"{path}/e"], [path], [], [given]), strict=True):
            with pytest.raises(zckpt.UnsupportedError, match=name):
                call(engine, *arguments)
    assert not Path(path).exists()


@pytest.mark.offload
def test_a_weight_without_memory_of_its_own_is_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_trained, 1, str(tmp_path / "c"), {"stage": 0, "dtype": "fp32"})
    cluster.run(refuse_a_weight, 1, str(tmp_path / "run"), str(tmp_path / "c"))


def look_and_offload(path: str) -> None:
    setup: dict[str, Any] = {"stage": 0, "dtype": "fp32", "optimizer": "coded"}
    engine, other = make_engine(**setup), make_engine(**setup)
    for each in (engine, other):
        train(each, 2)
    of_momentum = {e.dtype: e.nbytes for e in zckpt.where(engine).entries if e.part == "momentum"}
    assert of_momentum == {"int8": 2 * 64 * 64, "float32": 2 * 4 + 2 * 64 * 4}
    zckpt.write(engine, f"{path}/before")
    with zckpt.offloaded(engine, f"{path}/scratch") as out:
        assert "momentum" in out.parts
        in_memory = [e for e in zckpt.where(engine).entries if (e.part, e.tier) == ("momentum", "pageable")]
        assert {e.dtype: e.nbytes for e in in_memory} == {"int8": 2 * 64 * 64, "float32": 2 * 4}
        zckpt.write(engine, f"{path}/offloaded")
    assert zckpt.diff(f"{path}/before", f"{path}/offloaded").equal
    assert train(engine, 2, 2) == train(other, 2, 2)
    assert held(engine) == held(other)


@pytest.mark.offload
def test_where_and_offload_with_coded_and_plain_states(cluster: Cluster, tmp_path: Path) -> None:
    """At stage 0 in fp32, the momentum of the weights is coded, and that of the biases is not."""
    cluster.run(look_and_offload, 1, str(tmp_path))


def save_in_deepspeed_s_format(path: str) -> None:
    engine = make_engine(stage=2, optimizer="coded")
    train(engine, 1)
    engine.save_checkpoint(path, "tag")


def test_no_conversion_loses_a_coded_state(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_in_deepspeed_s_format, 1, str(tmp_path))
    with pytest.raises(zckpt.FormatError, match=r"asks for tests\.support\.coded\.Coded"):
        zckpt.convert(tmp_path / "tag", tmp_path / "converted")
    cluster.run(write_trained, 1, str(tmp_path / "c"), {"stage": 2, "optimizer": "coded"})
    with pytest.raises(zckpt.UnsupportedError, match=r"momentum of layers\.0\.weight .*Coded"):
        zckpt.convert(tmp_path / "c", tmp_path / "converted", to="deepspeed")
    assert not (tmp_path / "converted").exists()
