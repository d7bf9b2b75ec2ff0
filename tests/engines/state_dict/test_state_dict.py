"""State dicts without an engine: ``zckpt.write_state_dict`` and ``Checkpoint.load_into``."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from io import BytesIO
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import zckpt
from tests.support.patience import give_up_after
from tests.support.state_dicts import WEIGHT, blank, gathered, nested
from tests.support.torch_models import make_state, train
from zckpt.engines.state_dict import leaves_of
from zckpt.engines.tensors import local_of
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


def test_a_closed_stream_is_refused_by_name(tmp_path: Path) -> None:
    stream = BytesIO(b"bytes")
    stream.close()
    with pytest.raises(zckpt.StateError, match="closed") as caught:
        zckpt.write_state_dict({"weight": torch.zeros(1), "sampler": stream}, tmp_path / "c")
    assert caught.value.key == "sampler"
    assert not (tmp_path / "c").exists()


def test_a_nested_state_dict_comes_back(tmp_path: Path) -> None:
    path = zckpt.write_state_dict(nested(), tmp_path / "c", step=7)
    assert path == str(tmp_path / "c")
    assert zckpt.validate(path).ok
    checkpoint = zckpt.open(path)
    assert checkpoint.step == 7
    target = blank(nested())
    places = {name: leaf.value for name, leaf in leaves_of(target).items() if leaf.is_tensor}
    assert checkpoint.load_into(target) == []
    assert frozen(target) == frozen(nested())
    loaded = {name: leaf.value for name, leaf in leaves_of(target).items() if leaf.is_tensor}
    assert all(loaded[name] is places[name] for name in places)
    assert "param/model.a.weight" in checkpoint
    assert checkpoint.aliases == {"model.tied": "model.a.weight"}
    target["plain"].append("changed")
    checkpoint.load_into(again := blank(nested()))
    assert again["plain"] == nested()["plain"]


def test_names_are_those_of_dcp() -> None:
    names, paths = flatten_state_dict(nested())
    assert {name: leaf.path for name, leaf in leaves_of(nested()).items()} == paths
    assert names.keys() == paths.keys()


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ({"f": print}, "f: builtin_function_or_method"),
        ({"a.b": WEIGHT, "a": {"b": WEIGHT}}, r"two leaves .*a.b"),
        ({"s": {"w": WEIGHT.to_sparse()}}, r"s.w .*torch.sparse_coo"),
        ({"c": WEIGHT.to(torch.complex128)}, "c has dtype torch.complex128"),
        ({"m": WEIGHT.to("meta")}, r"param/m .*device meta"),
        ([WEIGHT], r"a state dict is .*got list$"),
        (torch.nn.Linear(1, 1), r"a state dict is .*got Linear; pass its state_dict\(\)"),
        ({"m": {"\ud800": WEIGHT}}, r"the name m\.\\ud800 is not valid Unicode"),
        ({"m": {"\ud800": 1}}, r"the name m\.\\ud800 is not valid Unicode"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, state_dict: Any, message: str) -> None:
    with pytest.raises((zckpt.ZckptError, TypeError), match=message):
        zckpt.write_state_dict(state_dict, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_state_dict_that_contains_itself(tmp_path: Path) -> None:
    around: dict[str, Any] = {}
    around["in"] = around
    with pytest.raises(zckpt.StateError, match="contains itself"):
        zckpt.write_state_dict(around, tmp_path / "c")


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ({"model": {"a.weight": torch.zeros(5, 3), "b": torch.zeros(1)}}, "missing: model.b"),
        ({"model": {"a.weight": torch.zeros(3, 5)}}, r"model.a.weight .*\[5, 3\] .*\[3, 5\]"),
        ({"model": {"a.weight": torch.zeros(5, 3, dtype=torch.int64)}}, r"model.a.weight: .*torch.float32"),
        ({"epoch": torch.zeros(1)}, r"(?s)epoch is a tensor .*a plain value where it has one"),
        ({"model": torch.nn.Identity()}, r"model is a Identity here: have its state_dict\(\) there"),
        ({"model": {"a.weight": 5}}, r"(?s)model.a.weight is a plain value .*have a tensor of this shape where"),
        ({"x": {"epoch": 1, "model": {"tied": torch.zeros(5, 3)}}}, r"pass state_dict\['x'\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, state_dict: Any, message: str) -> None:
    checkpoint = zckpt.open(zckpt.write_state_dict(nested(), tmp_path / "c"))
    before = frozen(state_dict)
    with pytest.raises(zckpt.MismatchError, match=message):
        checkpoint.load_into(state_dict)
    assert frozen(state_dict) == before


def test_a_tensor_without_memory_is_refused(tmp_path: Path) -> None:
    checkpoint = zckpt.open(zckpt.write_state_dict(nested(), tmp_path / "c"))
    with pytest.raises(zckpt.MismatchError, match=r"model.tied .*device meta"):
        checkpoint.load_into({"model": {"tied": torch.zeros(5, 3, device="meta")}})


def test_what_is_missing_is_left_as_it_is_without_strict(tmp_path: Path) -> None:
    checkpoint = zckpt.open(zckpt.write_state_dict(nested(), tmp_path / "c"))
    target = {"model": {"tied": torch.zeros(5, 3, dtype=torch.float64), "more": torch.ones(2)}, "other": 1, "epoch": 0}
    assert checkpoint.load_into(target, strict=False) == ["model.more", "other"]
    assert frozen(target) == frozen({"model": {"tied": WEIGHT.double(), "more": torch.ones(2)}, "other": 1, "epoch": 3})


def test_a_damaged_tensor_is_noticed(tmp_path: Path) -> None:
    path = zckpt.write_state_dict({"w": torch.ones(100)}, tmp_path / "c")
    file = next((tmp_path / "c").glob("data-*/rank-00000/*param.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(zckpt.DigestError):
        zckpt.open(path).load_into({"w": torch.zeros(100)})


def test_a_write_in_the_background_has_the_values_of_the_call(tmp_path: Path) -> None:
    state_dict = {"w": torch.ones(1000), "step": torch.tensor(1.0)}
    pending = zckpt.write_state_dict(state_dict, tmp_path / "c", background=True)
    state_dict["w"].zero_()
    assert isinstance(pending, zckpt.PendingWrite)
    checkpoint = zckpt.open(pending.wait())
    assert torch.equal(checkpoint.load()["param/w"], torch.ones(1000))


def test_weights_go_on_in_a_training(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = zckpt.write_state_dict(model.state_dict(), tmp_path / "c")
    state = zckpt.TrainState(other, torch.optim.SGD(other.parameters()))
    with pytest.raises(zckpt.MismatchError, match=r"no such state(?s:.*)parts=\["):
        zckpt.restore(state, path)
    zckpt.restore(state, path, parts=["param"])
    assert frozen(other.state_dict()) == frozen(model.state_dict())


def test_older_state_dicts_of_the_same_names_are_removed(tmp_path: Path) -> None:
    for step in range(4):
        zckpt.write_state_dict({"w": torch.ones(3) * step}, tmp_path / f"s{step}", step=step, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("s*")) == ["s2", "s3"]


SHAPES = [(), (1,), (7,), (2, 5), (5, 4), (4, 3, 2), (0, 3)]


def full(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def divided(ranks: int) -> dict[str, Any]:
    """Returns tensors of several shapes with all placements on meshes of one and two dimensions."""
    meshes: list[tuple[int, ...]] = [(ranks,), *([(2, ranks // 2)] if ranks == 4 else [])]
    tensors: dict[str, Any] = {}
    for sizes in meshes:
        mesh = init_device_mesh("cpu", sizes)
        for shape in SHAPES:
            placements: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for first in placements:
                for second in placements if len(sizes) == 2 else [None]:
                    chosen = [first] if second is None else [first, second]
                    tensors[f"{list(shape)} {chosen}"] = distribute_tensor(full(shape), mesh, chosen)
    return tensors


def write_divided(path: str) -> None:
    tensors = divided(dist.get_world_size())
    zckpt.write_state_dict({"d": tensors, "p": {"plain": full((7, 3))}, "value": {"k": [1, None]}}, path)


def load_divided(path: str) -> None:
    """Loads every tensor into every placement of this number of ranks."""
    checkpoint = zckpt.open(path)
    here = divided(dist.get_world_size())
    for key, info in checkpoint.items():
        name = info.name.removeprefix("d.")
        for other, like in here.items():
            if like.shape == info.shape:
                target: Any = torch.zeros_like(like)
                checkpoint.load_into({"d": {name: target}})
                assert torch.equal(target.full_tensor(), full(tuple(info.shape))), (key, other)
    whole = {"p": {"plain": torch.zeros(7, 3)}, "value": {"k": None}}
    checkpoint.load_into(whole)
    assert frozen(whole) == frozen({"p": {"plain": full((7, 3))}, "value": {"k": [1, None]}})


def test_every_placement_is_loaded_into_every_other_one(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    cluster.run(write_divided, 4, path)
    assert zckpt.validate(path).ok
    checkpoint = zckpt.open(path)
    assert all(torch.equal(tensor, full(tuple(tensor.shape))) for tensor in checkpoint.load().values())
    assert {piece.rank for piece in checkpoint["param/p.plain"].pieces} == {0, 1, 2, 3}
    cluster.run(load_divided, 3, path)


@pytest.mark.matrix
@pytest.mark.parametrize(("there", "here"), [(1, 4), (2, 3), (3, 4), (4, 4), (4, 2)])
def test_every_placement_at_every_number_of_ranks(cluster: Cluster, tmp_path: Path, there: int, here: int) -> None:
    path = str(tmp_path / "c")
    cluster.run(write_divided, there, path)
    cluster.run(load_divided, here, path)


def refusals(path: str) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"m": {"w": torch.full((3,), float(rank))}}, "param/m.w has other values on rank 1 than on rank 0"),
        ({"v": {"n": rank, "same": 1}}, "v.n is another value on rank 1 than on rank 0"),
        ({"d": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, "d is a Partial DTensor"),
        ({"r": DTensor.from_local(torch.ones(2) * rank, mesh, [Replicate()], run_check=False)}, "param/r has other"),
        ({"x": 1 if rank else WEIGHT}, "x is a tensor on one rank and a plain value on another"),
        ({"s": torch.zeros(3 + rank)}, r"param/s is F32 \[4\] on rank 1, F32 \[3\] on rank 0"),
        ({"f": print if rank else 1}, "f: builtin_function_or_method"),
    ]
    for state_dict, message in cases:
        with pytest.raises(zckpt.ZckptError, match=message):
            zckpt.write_state_dict(state_dict, path)
    with pytest.raises(zckpt.RankError, match="different per_rank arguments"):
        zckpt.write_state_dict({"v": 1}, path, per_rank=["v"] if rank else [])


def test_ranks_that_differ_are_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refusals, 2, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def write_of_ranks(path: str) -> None:
    """Writes what some ranks have alone: values and tensors of each, and those of a pair of ranks on a mesh."""
    rank = dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage, mesh = rank // 2, pairs["dp"]
    state_dict = {
        "all": WEIGHT,
        f"loader.{rank}": {"at": [rank, 5]},
        f"only.{rank}": torch.full((4,), float(rank)),
        f"stage.{stage}": {"w": distribute_tensor(WEIGHT + stage, mesh, [Shard(0)]), "plain": WEIGHT * stage},
        "from 1 on": {} if rank == 0 else {"w": WEIGHT - 1, "v": "x", "empty": torch.empty(0)},
    }
    zckpt.write_state_dict(state_dict, path)
    target = blank(state_dict)
    zckpt.open(path).load_into(target)
    assert target[f"loader.{rank}"] == {"at": [rank, 5]}
    for name, leaf in leaves_of(state_dict).items():
        read = leaves_of(target)[name].value
        same = torch.equal(local_of(read), local_of(leaf.value)) if leaf.is_tensor else read == leaf.value
        assert same, name


def test_ranks_may_have_names_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    cluster.run(write_of_ranks, 4, path)
    assert zckpt.validate(path).ok
    checkpoint = zckpt.open(path)
    whole = {f"stage.{stage}": {"w": torch.zeros(5, 3), "plain": torch.zeros(5, 3)} for stage in range(2)}
    values = {f"loader.{rank}": {"at": None} for rank in range(4)}
    checkpoint.load_into({**whole, **values, "from 1 on": (more := {"v": None, "empty": torch.empty(0)})})
    assert more["v"] == "x"
    assert frozen(whole) == frozen({f"stage.{s}": {"w": WEIGHT + s, "plain": WEIGHT * s} for s in range(2)})
    assert values == {f"loader.{rank}": {"at": [rank, 5]} for rank in range(4)}


def state_dict_of(state: zckpt.TrainState) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizers)
    del model["seen"]  # a buffer that each rank has of its own
    return {"model": model, "optim": optimizer}


def write_training(path: str, layout: str) -> Any:
    state = make_state(layout)
    train(state, 2)
    zckpt.write_state_dict(state_dict_of(state), path)
    zckpt.write(state, f"{path}-engine")
    return gathered(state_dict_of(state))


def load_training(path: str, layout: str) -> Any:
    state = make_state(layout, seed=1)
    train(state, 1)
    state_dict = state_dict_of(state)
    zckpt.open(path).load_into(state_dict)
    assert frozen(gathered(state_dict_of(state))["model.frozen.weight"])
    weights = {name: torch.zeros_like(value) for name, value in state_dict["model"].items()}
    zckpt.open(f"{path}-engine").load_into(weights)
    assert frozen(gathered({"model": weights})) == frozen(gathered({"model": state_dict["model"]}))
    return gathered(state_dict)


@pytest.mark.parametrize(
    ("there", "ranks", "here", "others"),
    [("hsdp", 4, "fsdp", 3), pytest.param("rows", 4, "fsdp", 2, marks=pytest.mark.matrix)],
)
def test_the_state_dict_of_a_training(
    cluster: Cluster, tmp_path: Path, there: str, ranks: int, here: str, others: int
) -> None:
    path = str(tmp_path / "c")
    written, *_ = cluster.run(write_training, ranks, path, there)
    for loaded in cluster.run(load_training, others, path, here):
        assert frozen(loaded) == frozen(written)


def fail_on_one_rank(path: str) -> str:
    state_dict = {"w": torch.ones(1 << 10)}
    with pytest.raises(zckpt.ZckptError) as raised:
        zckpt.write_state_dict(state_dict, path if dist.get_rank() == 0 else f"{path}-other")
    return str(raised.value)


def test_ranks_with_other_paths(cluster: Cluster, tmp_path: Path) -> None:
    for message in cluster.run(fail_on_one_rank, 2, str(tmp_path / "c")):
        assert "the ranks have different paths" in message
        assert message.endswith("make a path with the time or the process id in it on rank 0, and broadcast it")


@pytest.mark.parametrize("kind", ["expanded", "strided", "tied", "overlapping"])
def test_no_place_in_memory_gets_several_values(tmp_path: Path, kind: str) -> None:
    """Values would be lost without an error, or digests would not fit."""
    saved = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(20.0, 32).view(4, 3)}
    zckpt.write_state_dict(saved, tmp_path / "c")
    memory = torch.full((20,), -1.0)
    targets = {
        "expanded": {"a": memory[:3].expand(4, 3)},
        "strided": {"a": memory.as_strided((4, 3), (1, 1))},
        "tied": {"a": memory[:12].view(4, 3), "b": memory[:12].view(4, 3)},
        "overlapping": {"b": memory[6:18].view(4, 3), "a": memory[:12].view(4, 3)},
    }[kind]
    checkpoint = zckpt.open(tmp_path / "c")
    with pytest.raises(zckpt.MismatchError, match=r"share(s)? memory.*key param/a"):
        checkpoint.load_into(targets)
    if kind in ("tied", "overlapping"):
        with pytest.raises(zckpt.MismatchError, match="shares memory with param/b"):
            checkpoint.load(out={f"param/{name}": target for name, target in targets.items()})
    assert (memory == -1).all()


def test_views_of_one_memory_and_tied_names_are_loaded(tmp_path: Path) -> None:
    a, b = torch.arange(12.0).view(4, 3), torch.arange(20.0, 32).view(4, 3)
    zckpt.write_state_dict({"a": a, "b": b}, tmp_path / "two")
    columns = torch.zeros(4, 6)
    zckpt.open(tmp_path / "two").load_into({"a": columns[:, :3], "b": columns[:, 3:]})
    assert torch.equal(columns, torch.cat([a, b], 1))
    zckpt.write_state_dict({"a": a, "b": a}, tmp_path / "tied")
    tied = torch.zeros(4, 3)
    zckpt.open(tmp_path / "tied").load_into({"a": tied, "b": tied})
    assert torch.equal(tied, a)


def test_a_failed_write_whose_error_is_kept_belongs_to_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback keeps the state dict of the failed write alive, and it must not count as another engine."""
    state = {"a": torch.ones(1000)}
    zckpt.write_state_dict(state, tmp_path / "s1", step=1)
    with monkeypatch.context() as patch:
        patch.setattr("zckpt.transfer.write._put", mock.Mock(side_effect=OSError("no space")))
        with pytest.raises(OSError, match="no space") as kept:
            zckpt.write_state_dict(state, tmp_path / "s2", step=2)
    for step in (3, 4, 5):
        zckpt.write_state_dict(state, tmp_path / f"s{step}", step=step, keep_last=2)
    assert kept.value is not None
    assert (tmp_path / "latest").read_text().strip() == "s5"
    assert {path.name for path in tmp_path.iterdir()} == {"s4", "s5", "latest"}


def write_empty(shape_of_second: list[int], path: str) -> None:
    rank = dist.get_rank()
    shape = shape_of_second if rank else [3]
    state = {"a": torch.arange(4.0), "own": torch.full(shape, float(rank))}
    with pytest.raises(zckpt.StateError, match=r"own is not empty on rank 0, and \['F32', 0\] on rank 1"):
        zckpt.write_state_dict(state, path, per_rank=["own"])


def test_a_tensor_without_elements_on_one_rank_alone_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_empty, 2, [0], str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


class Slow(dict[str, Any]):
    """Takes a second to be looked at, so that the other ranks wait."""

    def items(self) -> Any:
        time.sleep(1)
        return super().items()


def write_interrupted(path: str) -> None:
    rank = dist.get_rank()
    kind, error = (dict, KeyboardInterrupt) if rank else (Slow, zckpt.RankError)
    if rank:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(error, match="" if rank else "rank 1 was interrupted"):
        zckpt.write_state_dict({"model": kind(a=torch.ones(3))}, path)


def test_an_interrupt_while_a_rank_waits_is_told_to_the_others(cluster: Cluster, tmp_path: Path) -> None:
    """It comes in the first step, in which the state dicts are compared, and is raised in a later one."""
    cluster.run(write_interrupted, 2, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def fail_outside_of_the_steps(path: str, function: str) -> list[str]:
    """Rank 1 runs out of memory in this function, which is between two steps or after the last one. Then both ranks
    write again."""
    give_up_after(4)
    errors = []
    failing = mock.patch(function, side_effect=MemoryError("no memory"))
    for name, fails in (("first", True), ("second", False)):
        with failing if fails and dist.get_rank() else nullcontext():
            try:
                zckpt.write_state_dict({"a": torch.ones(3)}, f"{path}/{name}")
            except (MemoryError, zckpt.RankError) as error:
                errors.append(str(error))
        dist.barrier()
    return errors


@pytest.mark.parametrize(
    ("function", "message", "written"),
    [
        ("zckpt.checkpoint.state_dict.write_together", "rank 1 has shown no sign of life for 4 s", ["second"]),
        ("zckpt.engines.contract.StateAdapter.after_write", None, ["first", "second"]),
    ],
    ids=["between", "after"],
)
def test_a_failure_outside_of_the_steps_lets_no_rank_wait_for_ever(
    cluster: Cluster, tmp_path: Path, function: str, message: str | None, written: list[str]
) -> None:
    first, second = cluster.run(fail_outside_of_the_steps, 2, str(tmp_path), function, timeout=120)
    assert second == ["no memory"]
    assert first == [] if message is None else message in first[0]
    assert {path.name for path in tmp_path.iterdir()} == {*written, "latest"}
