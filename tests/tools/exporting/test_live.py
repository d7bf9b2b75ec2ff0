"""An export of a live engine writes what ``save_pretrained`` of the same model writes, although each rank has only a
part of it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import zckpt
from tests.support.faults import NO_SPACE, Fault, faulty, kill
from tests.support.hugging_face import make_hugging_face
from tests.support.live_export import export_both
from tests.support.memory import peak_growth
from tests.support.states import write_state
from zckpt.geometry import all_of
from zckpt.ranks import heartbeat
from zckpt.ranks.collectives import Ranks
from zckpt.storage.schemes import open_store
from zckpt.testing.engine import ReferenceEngine
from zckpt.tools.exporting.engine_source import EngineSource
from zckpt.tools.exporting.live import write_from_ranks
from zckpt.tools.exporting.plan import Conversion, Extent, OutputTensor, safetensors_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster

MATRIX = pytest.mark.matrix
CASES = [
    ("gpt2", 1, "20KB"),
    pytest.param("gpt2", 2, "1GB", marks=MATRIX),
    pytest.param("gpt2", 3, "20KB", marks=MATRIX),
    pytest.param("gpt2", 0, "20KB", marks=MATRIX),
    pytest.param("mixtral", 1, "1GB", marks=MATRIX),
    ("mixtral", 3, "30KB"),
]


@pytest.mark.parametrize(("kind", "stage", "data_file"), CASES)
def test_the_files_are_those_of_save_pretrained(
    cluster: Cluster, tmp_path: Path, kind: str, stage: int, data_file: str
) -> None:
    exported, other = cluster.run(export_both, 2, kind, stage, tmp_path, data_file)
    assert exported == other
    saved = files(tmp_path / "saved")
    assert files(tmp_path / "exported") == saved
    assert exported.files == tuple(saved)
    assert exported.nbytes == sum(map(len, saved.values()))
    assert any("-of-" in name for name in saved) == (data_file != "1GB")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []
    zckpt.export(
        tmp_path / "checkpoint", tmp_path / "of_checkpoint", config=tmp_path / "saved", max_shard_size=data_file
    )
    assert files(tmp_path / "of_checkpoint") == files(tmp_path / "fp32")
    tensors = torch.load(tmp_path / "model.pt", weights_only=True)
    if kind == "gpt2":  # the names in its files are those in memory
        weights = [load_file(path) for path in (tmp_path / "saved").glob("*.safetensors")]
        assert {name: tensor for part in weights for name, tensor in part.items()}.keys() <= tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for part in weights for name, tensor in part.items())


def export_fsdp2(directory: Path) -> None:
    model = make_hugging_face("gpt2")
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(directory / "saved")
    fully_shard(model)
    zckpt.export(zckpt.TrainState(model, None), directory / "exported")


def test_the_files_of_an_fsdp2_model_are_those_of_save_pretrained(cluster: Cluster, tmp_path: Path) -> None:
    """``fully_shard`` replaces the class of a model, from which its configuration comes."""
    cluster.run(export_fsdp2, 2, tmp_path)
    assert files(tmp_path / "exported") == files(tmp_path / "saved")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def export_with_a_fault(directory: Path, name: str, who: int) -> tuple[str, list[str]]:
    engine = ReferenceEngine()
    engine.train(1)
    fault = Fault(NO_SPACE, names=(name,), path="model-")
    with faulty(fault if engine.rank == who else None), pytest.raises((OSError, RuntimeError)) as caught:
        zckpt.export(engine, directory / "out", max_shard_size=8000, overwrite=True)
    Ranks().together(
        lambda: None, "end the export"
    )  # until each rank has ended its export, another rank may still be removing files
    left = Ranks().first(lambda: sorted(path.name for path in directory.rglob("*")), "look")
    zckpt.export(engine, directory / "again", max_shard_size=8000)
    return f"{type(caught.value).__name__}: {caught.value}", left


@pytest.mark.parametrize("name", ["create", "write", "sync"])
def test_if_a_rank_fails_the_export_ends_on_all_and_the_earlier_one_stays(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("an earlier export")
    outcomes = cluster.run(export_with_a_fault, 3, tmp_path, name, 2)
    for rank, (error, left) in enumerate(outcomes):
        expected = "NoSpaceError: cannot do" if rank == 2 else "RankError: rank 2 failed to"
        assert error.startswith(expected)
        assert left == ["model.safetensors", "out"]
    assert (tmp_path / "out" / "model.safetensors").read_text() == "an earlier export"


def export_until_rank_1_dies(directory: Path) -> tuple[int | None, list[str]]:
    """Rank 1 dies while it writes the second of three slices of its file. Returns the rank that the error of another
    rank names, and the names of the files that are left."""
    heartbeat.PERIOD_SECONDS = 0.2
    shapes = {f"weight{number}": (1024, 513) for number in range(24)}
    engine, budget = ReferenceEngine(shapes, frozen=shapes), zckpt.Budget(32 << 20, threads=1)
    fault = Fault(kill, at=1, names=("write",), path="model-")
    with faulty(fault if engine.rank == 1 else None), pytest.raises(zckpt.RankError) as caught:
        zckpt.export(engine, directory / "out", max_shard_size="9MB", overwrite=True, budget=budget)
    return caught.value.rank, sorted(path.name for path in directory.rglob("*"))


def test_if_a_rank_is_killed_the_export_ends_on_all_and_the_earlier_one_stays(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("an earlier export")
    first, second, third = cluster.outcomes(export_until_rank_1_dies, 3, tmp_path)
    assert second.signal == signal.SIGKILL
    assert first.value == (1, ["model.safetensors", "out"]), first
    assert third.value[0] == 1
    assert (tmp_path / "out" / "model.safetensors").read_text() == "an earlier export"


class FailingProgress:
    """A progress object that raises an error in the method ``call`` on one rank."""

    def __init__(self, call: str, rank: int) -> None:
        self.call, self.rank = call, rank

    def _told(self, call: str) -> None:
        if call == self.call and torch.distributed.get_rank() == self.rank:
            raise ValueError("a broken bar")

    def begin(self, action: str, nbytes: int) -> None:
        self._told("begin")

    def advance(self, nbytes: int) -> None:
        self._told("advance")

    def end(self) -> None:
        self._told("end")


def export_with_a_progress_that_fails(directory: Path, call: str) -> str:
    with pytest.raises((ValueError, zckpt.RankError)) as caught:
        zckpt.export(ReferenceEngine(), directory / "out", max_shard_size=8000, progress=FailingProgress(call, 0))
    Ranks().decide(lambda: None, list, "go on")  # all ranks still take part
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("call", ["begin", "advance", "end"])
def test_if_the_progress_fails_on_one_rank_the_export_ends_on_all(cluster: Cluster, tmp_path: Path, call: str) -> None:
    first, second = cluster.run(export_with_a_progress_that_fails, 2, tmp_path, call)
    assert first == "ValueError: a broken bar"
    assert second.startswith("RankError: rank 0 failed to")
    assert not (tmp_path / "out").exists()


def export_with_an_argument_of_one_rank(directory: Path, arguments: dict[str, Any]) -> str:
    arguments_of_rank = arguments if torch.distributed.get_rank() == 1 else {}
    with pytest.raises((ValueError, zckpt.RankError)) as caught:
        zckpt.export(directory / "ckpt", directory / "out", **arguments_of_rank)
    Ranks().decide(lambda: None, list, "go on")  # all ranks still take part
    return type(caught.value).__name__


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"max_shard_size": "x"}, "ValueError"), ({"dtype": "float7"}, "ValueError"), ({"dtype": "bf16"}, "RankError")],
)
def test_an_argument_that_only_one_rank_passes_is_an_error_on_all(
    cluster: Cluster, tmp_path: Path, arguments: dict[str, Any], error: str
) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    errors = cluster.run(export_with_an_argument_of_one_rank, 2, tmp_path, arguments)
    assert errors == ["RankError", error]


def die_before_the_directory_is_made(directory: Path) -> list[str]:
    heartbeat.PERIOD_SECONDS = 0.2
    ranks, first = Ranks(), Ranks.first

    def or_die(self: Ranks, action: Any, doing: str) -> Any:
        if doing == "prepare the place" and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return first(self, action, doing)

    with mock.patch.object(Ranks, "first", or_die), pytest.raises(zckpt.RankError, match="has died"):
        zckpt.export(directory / "ckpt", directory / "out")
    return sorted(os.listdir(directory))


def test_a_rank_that_dies_before_the_first_byte_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    write_state(tmp_path / "ckpt", parts=["master"])
    first, second = cluster.outcomes(die_before_the_directory_is_made, 2, tmp_path)
    assert second.signal == signal.SIGKILL
    assert first.value == ["ckpt", "latest"], first


def export_of_different_checkpoints(directory: Path) -> str:
    ranks = Ranks()
    with pytest.raises(zckpt.RankError, match="different checkpoints") as caught:
        zckpt.export(zckpt.open(directory / f"step{ranks.rank}"), directory / "out")
    zckpt.export(directory / f"step{ranks.rank}", directory / "out", max_shard_size=8000)  # rank 0 opens it for all
    return str(caught.value)


def test_ranks_never_mix_two_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    for step in range(2):
        write_state(tmp_path / f"step{step}", parts=["master"], seed=step)
    cluster.run(export_of_different_checkpoints, 2, tmp_path)
    expected = zckpt.open(tmp_path / "step0").state_dict()
    exported = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def convert(directory: Path) -> bool:
    """Exports with a conversion whose outputs are in the files of two ranks. One file also has a tensor that needs no
    conversion. Returns whether the files are right."""
    engine, ranks = ReferenceEngine(), Ranks()
    source = EngineSource(engine, None, None, ranks)
    tensors = source.sources
    shapes = {name: tensors[name].shape for name in ("weight", "embedding")}

    def convert_both(elements: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        weight, embedding = (flat.view(shape) for flat, shape in zip(elements, shapes.values(), strict=True))
        return {"a": weight.T, "b": embedding.flip(0)}

    conversion = Conversion(tuple(Extent(name, tensors[name].all) for name in shapes), convert_both)
    bias = OutputTensor("bias", "BF16", (65,), (Extent("bias", all_of((65,))),))
    files = [
        safetensors_file("0.safetensors", [OutputTensor("a", "BF16", (65, 63), None, conversion), bias]),
        safetensors_file("1.safetensors", [OutputTensor("b", "BF16", shapes["embedding"], None, conversion)]),
    ]
    write_from_ranks(open_store(directory), files, tensors, source, ranks, None)
    zckpt.export(engine, directory / "plain")
    plain, *converted = (
        load_file(directory / name) for name in ("plain/model.safetensors", "0.safetensors", "1.safetensors")
    )
    expected = {"a": plain["weight"].T, "b": plain["embedding"].flip(0), "bias": plain["bias"]}
    return (
        all(torch.equal(tensor, expected[name]) for file in converted for name, tensor in file.items())
        and len(converted) == 2
    )


def test_the_rank_that_writes_a_converted_tensor_converts_it(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(convert, 2, tmp_path) == [True, True]


def measure_growth(directory: Path, budget_bytes: int) -> tuple[int, int]:
    """Returns by how many bytes the memory of this rank grows at most during an export, and how many bytes were
    exported."""
    shapes = {f"weight{number}": (2048, 2048) for number in range(16)}
    zckpt.export(ReferenceEngine(), directory / "small", budget=zckpt.Budget(budget_bytes, threads=1))
    engine = ReferenceEngine(shapes, frozen=shapes)
    exported: list[zckpt.Exported] = []
    budget = zckpt.Budget(budget_bytes, threads=1)
    growth = peak_growth(
        lambda: exported.append(zckpt.export(engine, directory / "large", max_shard_size="40MB", budget=budget))
    )
    return growth, exported[0].nbytes


@pytest.mark.linux
def test_memory_is_bounded_by_the_budget(cluster: Cluster, tmp_path: Path) -> None:
    budget_bytes = 16 << 20
    for growth, exported_bytes in cluster.run(measure_growth, 2, tmp_path, budget_bytes):
        assert exported_bytes > 128 << 20
        assert growth < budget_bytes
