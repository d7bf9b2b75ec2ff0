"""Tests of the reference engine beyond the contract of engines: background writes, numbers of ranks, and devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support import accelerator
from tests.support.coded import Coded, Opaque
from tests.support.reference_engine import tensors_of
from tests.support.states import same_all
from zckpt.engines import adapt, group_of
from zckpt.plan.inventory import BUFFER, MASTER
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster

BEFORE, AFTER = 3, 2


def whole(ranks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the state that is the same at every number of ranks. The pieces of all ranks are joined."""
    return {
        key: torch.cat([rank[key] for rank in ranks]) if key.startswith(("master/", "exp_avg", "param/")) else first
        for key, first in ranks[0].items()
        if key != "buffer/running_mean"
    }


def device_of_rank(kind: str) -> str:
    return kind if kind == "cpu" else f"{kind}:{torch.distributed.get_rank() % 2}"


def write_and_go_on(path: str, options: dict[str, Any], kind: str = "cpu") -> list[dict[str, torch.Tensor]]:
    engine = ReferenceEngine(device=device_of_rank(kind))
    engine.train(BEFORE)
    states = [tensors_of(engine)]
    written = zckpt.write(engine, path, client_state={"epoch": 3}, **options)
    engine.train(AFTER)
    states.append(tensors_of(engine))
    if isinstance(written, zckpt.PendingWrite):
        written.wait()
    return states


def restore_and_go_on(path: str, rng: bool, kind: str = "cpu") -> list[dict[str, torch.Tensor]]:
    engine = ReferenceEngine(device=device_of_rank(kind), seed=1)
    engine.train(1)
    assert zckpt.restore(engine, path, rng=rng) == {"epoch": 3}
    states = [tensors_of(engine)]
    engine.train(AFTER)
    return [*states, tensors_of(engine)]


SNAPSHOTS: dict[str, dict[str, Any]] = {
    "copy": {"background": True},
    "lazy": {"background": True, "snapshot": "lazy"},
}


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_what_is_resumed_goes_on_as_what_never_stopped(cluster: Cluster, tmp_path: Path, snapshot: str) -> None:
    path = str(tmp_path / "c")
    through = cluster.run(write_and_go_on, 2, path, SNAPSHOTS[snapshot])
    assert zckpt.validate(path).ok
    assert zckpt.open(path).parts == adapt(ReferenceEngine()).parts
    resumed = cluster.run(restore_and_go_on, 2, path, True)
    for uninterrupted, restored in zip(through, resumed, strict=True):
        assert all(map(same_all, uninterrupted, restored))
    assert not same_all(through[0][0], through[0][1])
    assert not torch.equal(through[0][0]["buffer/running_mean"], through[1][0]["buffer/running_mean"])


@pytest.mark.parametrize(("writers", "readers"), [(2, 5), (4, 1)])
def test_a_run_goes_on_at_another_number_of_ranks(cluster: Cluster, tmp_path: Path, writers: int, readers: int) -> None:
    path = str(tmp_path / "c")
    through = cluster.run(write_and_go_on, writers, path, {})
    resumed = cluster.run(restore_and_go_on, readers, path, False)
    for when in (0, 1):
        assert same_all(whole([rank[when] for rank in through]), whole([rank[when] for rank in resumed]))
        mean = "buffer/running_mean"
        assert when or all(torch.equal(rank[when][mean], through[0][when][mean]) for rank in resumed)


@pytest.mark.usefixtures("devices")
def test_each_rank_has_a_device_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    through = cluster.run(accelerator.run, 2, write_and_go_on, path, SNAPSHOTS["lazy"], "sim")
    for readers, kind in ((2, "sim"), (3, "sim"), (1, "cpu")):
        resumed = cluster.run(accelerator.run, readers, restore_and_go_on, path, readers == 2, kind)
        for when in (0, 1):
            assert same_all(whole([rank[when] for rank in through]), whole([rank[when] for rank in resumed]))
            if readers == 2:
                assert all(
                    same_all(uninterrupted[when], restored[when])
                    for uninterrupted, restored in zip(through, resumed, strict=True)
                )


def test_adapt_finds_the_reference_engine() -> None:
    engine = ReferenceEngine()
    assert type(adapt(engine)).__name__ == "ReferenceAdapter"
    assert group_of(engine) is None
    with pytest.raises(zckpt.UnsupportedError, match=r"builtins\.dict is not a training engine"):
        adapt({})
    assert group_of({}) is None


def test_tensors_without_memory_are_not_restored(tmp_path: Path) -> None:
    path = zckpt.write(ReferenceEngine(), tmp_path / "c")
    engine = ReferenceEngine(seed=1)
    engine.tensors[BUFFER]["running_mean"] = torch.empty(63, device="meta")
    before = engine.tensors[MASTER]["bias"].clone()
    with pytest.raises(zckpt.MismatchError, match="on the device meta"):
        zckpt.restore(engine, path)
    assert torch.equal(engine.tensors[MASTER]["bias"], before)


def freed() -> torch.Tensor:
    tensor = torch.ones(65)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: Coded(torch.zeros(65, dtype=torch.int8), torch.ones(1)), "is of the class Coded"),
        (lambda: Opaque(torch.zeros(65, dtype=torch.int8), torch.ones(1)), "is of the class Opaque"),
        (freed, r"needs 260 bytes .*has 0"),
    ],
    ids=["composed", "opaque", "freed"],
)
@pytest.mark.offload
def test_tensors_whose_values_are_elsewhere_are_neither_read_nor_written(
    tmp_path: Path, given: Callable[[], torch.Tensor], why: str
) -> None:
    """Otherwise, the memory at the address 0 would be read or written, which ends the process."""
    path = zckpt.write(ReferenceEngine(), tmp_path / "c")
    engine = ReferenceEngine(seed=1)
    engine.tensors[MASTER]["bias"] = given()
    before = engine.tensors[MASTER]["weight"].clone()
    for call in (lambda: zckpt.write(engine, tmp_path / "d"), lambda: zckpt.restore(engine, path)):
        with pytest.raises((zckpt.StateError, zckpt.MismatchError), match=f"^master/bias {why}"):
            call()
    assert torch.equal(engine.tensors[MASTER]["weight"], before)
    assert not (tmp_path / "d").exists()
    if why.endswith("Opaque"):
        for look in (lambda: zckpt.where(engine), lambda: zckpt.offload(engine, tmp_path / "d")):
            with pytest.raises(zckpt.UnsupportedError, match=f"^master/bias {why}"):
                look()


def test_the_reference_engine_cannot_be_attached() -> None:
    with pytest.raises(zckpt.UnsupportedError, match="save_checkpoint and load_checkpoint"):
        zckpt.attach(ReferenceEngine())
