"""The state that each rank passes to a write is returned to the same rank, and can be read for any rank."""

from __future__ import annotations

import os
from collections import OrderedDict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.models import make_engine, train
from tests.support.plain_engine import Engine
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


def state_of(rank: int) -> dict[str, Any]:
    return {
        "epoch": rank + 3,
        "loader": {
            "seen": torch.arange(rank + 1),
            "workers": [OrderedDict(at=np.full(3, rank))],
            "done": (False, None),
        },
        "generator": torch.Generator().manual_seed(rank).get_state(),
        "since": date(2026, 1, 1 + rank),
    }


def plain(value: Any) -> Any:
    """Returns the value in a form that can be compared and that includes the types."""
    if isinstance(value, dict):
        return type(value).__name__, [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    return value


def read_back(rank: int) -> Any:
    return plain({**state_of(rank), "since": f"2026-01-0{1 + rank}"})


def write(path: str, engine: Any, **options: Any) -> None:
    written = zckpt.write(engine, path, client_state={"epoch": 7}, rank_state=state_of(engine_rank()), **options)
    if isinstance(written, zckpt.PendingWrite):
        written.wait()


def engine_rank() -> int:
    return int(os.environ["RANK"])


def restore(path: str, engine: Any) -> tuple[Any, list[Any], int, Any]:
    assert zckpt.restore(engine, path) == {"epoch": 7}
    client_state, ranks = zckpt.restore(engine, path, with_rank_state=True)
    assert client_state == {"epoch": 7}
    for beyond in (len(ranks), -len(ranks) - 1):
        with pytest.raises(IndexError, match="there is no rank"):
            ranks[beyond]
    assert [plain(state) for state in ranks[::-1]] == [plain(ranks[rank]) for rank in reversed(range(len(ranks)))]
    assert plain(ranks[-1]) == plain(ranks[len(ranks) - 1])
    return plain(ranks.own), [plain(state) for state in ranks], len(ranks), plain(zckpt.open(path).client_rank_state(0))


def write_reference(path: str, options: dict[str, Any]) -> None:
    write(path, ReferenceEngine(), **options)


def restore_reference(path: str) -> Any:
    return restore(path, ReferenceEngine(seed=1))


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "snapshot": "lazy"}], ids=["now", "copy", "lazy"]
)
def test_each_rank_gets_its_own_state_back_and_can_read_that_of_any(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "c")
    cluster.run(write_reference, 2, path, options)
    assert zckpt.validate(path).ok
    states = [read_back(0), read_back(1)]
    for readers in (2, 1, 3) if not options else (2,):
        for rank, result in enumerate(cluster.run(restore_reference, readers, path)):
            expected_state = states[rank] if readers == 2 else None
            assert result == (expected_state, states, 2, states[0])


def in_each_stage(path: str) -> None:
    for stage in range(4):
        engine = make_engine(stage=stage)
        train(engine, 1)
        write(f"{path}/{stage}", engine)
        rank_state, states, size, _ = restore(f"{path}/{stage}", engine)
        assert rank_state == states[engine_rank()] == read_back(engine_rank())
        assert size == 2


def test_engines_of_all_stages(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(in_each_stage, 2, str(tmp_path))
    missing = zckpt.convert(tmp_path / "3", tmp_path / "theirs", to="deepspeed").missing
    assert any("client_rank_state" in line for line in missing)


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_tensors_on_a_device(tmp_path: Path, background: bool) -> None:
    device = accelerator.DEVICE_TYPE
    engine = ReferenceEngine(device=device)
    at = torch.arange(500, device=device)
    written = zckpt.write(engine, tmp_path / "c", rank_state={"at": at, "half": at[::2]}, background=background)
    at.zero_()
    if isinstance(written, zckpt.PendingWrite):
        written.wait()
    rank_state = zckpt.restore(engine, tmp_path / "c", with_rank_state=True)[1].own
    assert rank_state is not None
    assert (rank_state["at"].device.type, rank_state["at"].tolist(), rank_state["half"].tolist()) == (
        "cpu", list(range(500)), list(range(0, 500, 2)),
    )  # fmt: skip


def write_or_fail(path: str) -> None:
    rank, engine = engine_rank(), ReferenceEngine()
    bad: dict[str, tuple[Any, type[Exception], str]] = {
        "an object": ({"loader": object()}, zckpt.StateError, r"client_rank_state\.loader: object cannot be kept"),
        "no map": ([1], TypeError, "rank_state must be a dict"),
        "no values": ({"at": torch.empty(3, device="meta")}, zckpt.StateError, "client_rank_state.at is on the device"),
    }
    for given, error, message in bad.values():
        with pytest.raises(error if rank == 1 else zckpt.RankError, match=message) as caught:
            zckpt.write(engine, f"{path}/bad", rank_state=given if rank == 1 else {"at": 1})
        assert rank == 1 or caught.value.rank == 1  # type: ignore[attr-defined]
        assert not Path(path, "bad").exists()
        torch.distributed.barrier()
    zckpt.write(engine, f"{path}/partly", rank_state={} if rank == 0 else None)
    ranks = zckpt.restore(engine, f"{path}/partly", with_rank_state=True)[1]
    assert (ranks.own, list(ranks)) == ({} if rank == 0 else None, [{}, None])
    zckpt.write(engine, f"{path}/without")
    ranks = zckpt.restore(engine, f"{path}/without", with_rank_state=True)[1]
    assert (ranks.own, list(ranks)) == (None, [None, None])


def test_the_state_of_one_rank_may_be_wrong_or_missing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_or_fail, 2, str(tmp_path))
    with pytest.raises(IndexError, match="no rank 2"):
        zckpt.open(tmp_path / "partly").client_rank_state(2)


def test_only_the_state_that_is_asked_for_is_read(tmp_path: Path, engines_are_adapters: None) -> None:
    class WithHistory(Engine):
        def rank_state(self) -> dict[str, object]:
            return {"history": torch.zeros(1 << 20)}

    zckpt.write(WithHistory(), tmp_path / "c", rank_state={"at": torch.ones(3)})
    checkpoint = zckpt.open(tmp_path / "c")
    rank_state = checkpoint.client_rank_state(0)
    assert rank_state is not None
    assert rank_state["at"].tolist() == [1, 1, 1]
    assert checkpoint.io.bytes_read < 1 << 20
    assert checkpoint.rank_state(0)["history"].numel() == 1 << 20
    before = checkpoint.io.bytes_read
    ranks = zckpt.RankStates(loader_of(checkpoint), None)
    assert (len(ranks), checkpoint.io.bytes_read) == (1, before)


def test_a_generator_accepts_its_state_from_a_checkpoint(tmp_path: Path, engines_are_adapters: None) -> None:
    """Torch reads the state from where the storage of the tensor begins, whatever the offset of the tensor is."""
    generator = torch.Generator().manual_seed(7)
    state = {"before": torch.ones(3), "generator": generator.get_state()}
    zckpt.write(Engine(), tmp_path / "c", rank_state=state, client_state=state)
    expected = torch.randn(5, generator=generator)
    checkpoint = zckpt.open(tmp_path / "c")
    states: list[Any] = [checkpoint.client_rank_state(0), checkpoint.state["client_state"]]
    for generator_state in states:
        assert generator_state["generator"].storage_offset() == 0
        generator.set_state(generator_state["generator"])
        assert torch.equal(torch.randn(5, generator=generator), expected)


def test_copies_and_repairs_keep_the_state(tmp_path: Path, engines_are_adapters: None) -> None:
    zckpt.write(Engine(), tmp_path / "c", rank_state=state_of(0))
    zckpt.cp(tmp_path / "c", tmp_path / "whole")
    zckpt.cp(tmp_path / "c", tmp_path / "chosen", "master/*")
    (tmp_path / "c" / "manifest.msgpack").unlink()
    zckpt.repair(tmp_path / "c")
    for name in ("c", "whole", "chosen"):
        assert plain(zckpt.open(tmp_path / name).client_rank_state(0)) == read_back(0)


def test_a_tree_in_which_it_is_not_a_map_is_a_format_error(tmp_path: Path, engines_are_adapters: None) -> None:
    class Other(Engine):
        def rank_state(self) -> dict[str, object]:
            return {"client_rank_state": [1]}

    zckpt.write(Other(), tmp_path / "c")
    with pytest.raises(zckpt.FormatError, match="client_rank_state of rank 0"):
        zckpt.open(tmp_path / "c").client_rank_state(0)
