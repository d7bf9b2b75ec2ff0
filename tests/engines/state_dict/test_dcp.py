"""PyTorch's distributed checkpoints through ``zckpt.dcp.Writer`` and ``zckpt.dcp.Reader``."""

from __future__ import annotations

import pickle
import warnings
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as ShardOfTensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import zckpt
from tests.support.models import make_engine
from tests.support.state_dicts import WEIGHT, blank, gathered, nested
from tests.support.torch_models import held, make_state, train
from zckpt.checkpoint.write import write_engine as write_state
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.engines.state_dict import FlatState
from zckpt.engines.state_dict import held as held_tensor
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.object_servers import ObjectServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state_dict: dict[str, Any], path: object, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.save(state_dict, storage_writer=zckpt.dcp.Writer(str(path)), **options)


def load(state_dict: dict[str, Any], path: object, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state_dict, storage_reader=zckpt.dcp.Reader(str(path)), **options)


def refused(message: str) -> Any:
    return pytest.raises(CheckpointException, match=message)


def test_a_nested_state_dict_comes_back(tmp_path: Path) -> None:
    metadata = save(nested(), tmp_path / "c")
    assert zckpt.validate(tmp_path / "c").ok
    assert {"model.a.weight", "epoch", "optim.param_groups.0.lr"} <= metadata.state_dict_metadata.keys()
    target = blank(nested())
    load(target, tmp_path / "c")
    assert frozen(target) == frozen(nested())
    everything: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(
            everything, zckpt.dcp.Reader(tmp_path / "c"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    assert frozen(everything["model"]) == frozen(nested()["model"])
    assert everything["optim"]["param_groups"] == nested()["optim"]["param_groups"]


def test_each_of_the_two_interfaces_reads_what_the_other_has_written(tmp_path: Path) -> None:
    zckpt.write_state_dict(nested(), tmp_path / "c")
    load(target := blank(nested()), tmp_path / "c")
    assert frozen(target) == frozen(nested())
    save(nested(), tmp_path / "d")
    zckpt.open(tmp_path / "d").load_into(target := blank(nested()))
    assert frozen(target) == frozen(nested())


def test_no_pickle_is_on_the_disk(tmp_path: Path) -> None:
    save({"w": WEIGHT, "values": {"a": [1, (2, None)], "b": torch.Size([3])}}, tmp_path / "c")
    assert not any(b"\x80\x02" in path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file())
    with refused("options cannot be kept without a pickle: its pickle asks for argparse.Namespace"):
        save({"options": Namespace(a=1)}, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_load_of_a_part(tmp_path: Path) -> None:
    save(nested(), tmp_path / "c")
    target = {"model": {"tied": torch.zeros(5, 3)}}
    load(target, tmp_path / "c")
    assert torch.equal(target["model"]["tied"], WEIGHT)
    more = {"model": {"more": torch.ones(1), "tied": torch.zeros(5, 3, dtype=torch.float64)}}
    with refused("Missing key in checkpoint state_dict: model.more"):
        load(more, tmp_path / "c")
    load(more, tmp_path / "c", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(more["model"]["tied"], WEIGHT.double())
    with refused("Size mismatch"):
        load({"model": {"tied": torch.zeros(5, 2)}}, tmp_path / "c")


def test_the_reader_says_who_reads_a_folder_of_dcp_itself(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path / "c")
    with refused("this is a DCP checkpoint(?s:.*)without storage_reader, dcp.load reads it; to convert it, "):
        load({"w": torch.zeros(5, 3)}, tmp_path / "c")


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save({"w": torch.ones(100)}, tmp_path / "c")
    file = next((tmp_path / "c").glob("data-*/rank-00000/*param.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with refused("DigestError"):
        load({"w": torch.zeros(100)}, tmp_path / "c")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"paths": [[("list",), [1 << 40]]]}, "paths is not a list of paths"),
        ({"paths": [[("list",), 3]]}, "paths is not a list of paths"),
        ({"paths": 3}, "paths is not a list of paths"),
        ({"ranks": {"v": 7}}, "ranks has no rank of v"),
        ({"ranks": {"v": 0}}, "v is not in the tree of rank 0"),
    ],
)
def test_a_tree_that_was_made_to_do_harm(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    """DCP would make a list with as many items as the path says."""
    state = FlatState((held_tensor("w", WEIGHT, 1),), {}, tree)
    write_state(state, tmp_path / "c", WriteOptions())
    everything: dict[str, Any] = {}
    with refused(message):
        load(everything, tmp_path / "c", planner=_EmptyStateDictLoadPlanner())


def test_an_object_store(seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.support.buckets import use  # needs boto3

    use(seaweedfs, monkeypatch)
    run = f"s3://{seaweedfs.bucket}{tmp_path}/run"
    save(nested(), f"{run}/c")
    load(target := blank(nested()), run)
    assert frozen(target) == frozen(nested())


def test_one_writer_writes_several_checkpoints(tmp_path: Path) -> None:
    writer = zckpt.dcp.Writer()
    for number in range(2):  # A planner may keep its plan.
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": WEIGHT * number}, checkpoint_id=tmp_path / str(number), storage_writer=writer, planner=planner)
    for number in range(2):
        assert torch.equal(zckpt.open(tmp_path / str(number)).load()["param/w"], WEIGHT * number)
    with pytest.raises(CheckpointException, match=r"path .*zckpt.dcp.Writer"):
        dcp.save({"w": WEIGHT}, storage_writer=zckpt.dcp.Writer())


def test_a_writer_names_the_arguments_that_it_has() -> None:
    for wrong, meant in (("keep_lsat", "keep_last"), ("process_groups", "process_group"), ("single_file_per_rank", "")):
        question = rf" \(did you mean '{meant}'\?\)" if meant else ""
        with pytest.raises(TypeError, match=f"Writer has no {wrong}{question}: it has path, .*, step$"):
            zckpt.dcp.Writer("c", **{wrong: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Writer has no background"):  # ``write_state_dict`` has it.
        zckpt.dcp.Writer("c", background=True)  # type: ignore[call-arg]


def test_the_checkpoint_of_an_engine_is_read_by_dcp(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    written, *_ = cluster.run(write_engine, 2, path)
    for loaded in cluster.run(load_weights, 2, path):
        assert frozen(loaded) == frozen(written)


def write_engine(path: str) -> Any:
    zckpt.write(make_engine(stage=2, dtype="fp32"), path)
    return zckpt.open(path).state_dict()


def load_weights(path: str) -> Any:
    """Loads the weights of an engine of DeepSpeed into DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    infos = zckpt.open(path).weights()
    weights: Any = {
        name: distribute_tensor(torch.zeros(info.shape), mesh, [Shard(0)]) if info.shape else torch.zeros(())
        for name, info in infos.items()
    }
    load(weights, path)
    return gathered(weights)


def trained(layout: str, steps: int, seed: int = 0) -> tuple[zckpt.TrainState, dict[str, Any]]:
    state = make_state(layout, seed=seed)
    train(state, steps)
    state.model.get_buffer("seen").zero_()  # Each rank has other values in it.
    model, optimizer = get_state_dict(state.model, state.optimizers)
    return state, {"model": model, "optim": optimizer, "epoch": 3}


def save_training(path: str, layout: str) -> Any:
    state, state_dict = trained(layout, 2)
    before = held(state)
    save(state_dict, path)
    assert frozen(held(state)) == frozen(before)
    return gathered(state_dict)


def load_training(path: str, layout: str) -> Any:
    state, state_dict = trained(layout, 1, seed=1)
    load(state_dict, path)
    set_state_dict(
        state.model, state.optimizers, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
    )
    model, optimizer = get_state_dict(state.model, state.optimizers)
    return gathered({"model": model, "optim": optimizer, "epoch": state_dict["epoch"]})


def test_a_training_is_resumed_once_it_is_converted(tmp_path: Path) -> None:
    state, state_dict = trained("alone", 2)
    save(state_dict, tmp_path / "c")
    with pytest.raises(zckpt.MismatchError, match="optimizer of a state dict"):
        zckpt.restore(state, tmp_path / "c")
    zckpt.convert(tmp_path / "c", tmp_path / "folder", to="dcp")
    zckpt.convert(tmp_path / "folder", tmp_path / "new")
    other, _ = trained("alone", 1, seed=1)
    assert zckpt.restore(other, tmp_path / "new") == {"epoch": 3}
    assert frozen(held(other)) == frozen(held(state))


TRAININGS = [
    ("hsdp", 4, "fsdp", 3),
    pytest.param("fsdp", 3, "rows", 4, marks=pytest.mark.matrix),
    pytest.param("rows", 4, "hsdp", 4, marks=pytest.mark.matrix),
    pytest.param("tp", 4, "columns", 3, marks=pytest.mark.matrix),
    pytest.param("columns", 3, "fsdp", 2, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("there", "ranks", "here", "others"), TRAININGS)
def test_a_training_goes_to_another_mesh(
    cluster: Cluster, tmp_path: Path, there: str, ranks: int, here: str, others: int
) -> None:
    path = str(tmp_path / "c")
    written, *_ = cluster.run(save_training, ranks, path, there)
    assert zckpt.validate(path).ok
    for loaded in cluster.run(load_training, others, path, here):
        assert frozen(loaded) == frozen(written)


def rows_on(dp: int, tp: int, rows: int) -> Any:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(2, rows, bias=False)
    numbers = torch.arange(2.0 * rows).reshape(rows, 2)
    module.weight = nn.Parameter(distribute_tensor(numbers, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    return module


def seven_rows(path: str) -> None:
    """DCP's own writer says that it has saved this, and its reader cannot load it."""
    for rows in (7, 13):
        module = rows_on(3, 2, rows)
        with refused("DCP says that this rank holds"):
            save(module.state_dict(), path)
        zckpt.write_state_dict(module.state_dict(), f"{path}-{rows}")
        with refused("DCP says that this rank holds"):
            load(module.state_dict(), f"{path}-{rows}")
        module.weight.detach()._local_tensor.zero_()
        zckpt.open(f"{path}-{rows}").load_into(module.state_dict())
        assert torch.equal(module.weight.full_tensor(), torch.arange(2.0 * rows).reshape(rows, 2))


def test_a_layout_that_dcp_describes_wrongly_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(seven_rows, 6, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def differing(path: str) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"v": {"n": rank}}, "v.n is another value on rank 1 than on rank 0"),
        ({"w": torch.ones(3) * rank}, "param/w has other values on rank 1 than on rank 0"),
        ({"p": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, "partial placements"),
    ]
    for state_dict, message in cases:
        with refused(message):
            save(state_dict, path)
    assert rank or not zckpt.dcp.Writer.validate_checkpoint_id("")


def test_ranks_that_differ_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(differing, 2, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def own_statistics(path: str) -> None:
    """Saves what each rank has of its own: the statistics of a BatchNorm, and the place of a loader."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model(torch.arange(6.0).reshape(2, 3) * (rank + 1))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    with refused(r"0.running_mean has other values on rank 1(?s:.*)per_rank="):
        save(model.state_dict(), path)
    own = {"model": model.state_dict(), "loader": {"at": rank}, "epoch": 3}
    writer = zckpt.dcp.Writer(path, per_rank=["model.0.running_*", "loader.*"])
    dcp.save(own, storage_writer=writer)
    load(target := blank(own), path)
    assert frozen(target) == frozen(own)
    zckpt.open(path).load_into(target := blank(own))
    assert frozen(target) == frozen(own)


def test_each_rank_gets_its_own_back(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "c"
    cluster.run(own_statistics, 2, str(path))
    target: Any = {"loader": {"at": -1}, "model": {"0.running_var": torch.zeros(3), "1.weight": torch.zeros(3, 3)}}
    load(target, path)
    assert target["loader"]["at"] == 0
    model: Any = nn.BatchNorm1d(3)
    model(torch.arange(6.0).reshape(2, 3))
    assert torch.equal(target["model"]["0.running_var"], model.running_var)
    assert len({piece.copy for piece in zckpt.open(path)["buffer/model.0.running_var"].pieces}) == 2


def of_some_ranks(path: str) -> None:
    rank = dist.get_rank()
    own = {"all": WEIGHT, f"loader.{rank}": {"at": rank}}
    save(own, f"{path}-own")
    load(target := {"all": torch.zeros(5, 3), f"loader.{rank}": {"at": -1}}, f"{path}-own")
    assert frozen(target) == frozen(own)
    if rank == 0:
        save({"w": WEIGHT}, f"{path}-alone", no_dist=True)
    pair = dist.new_group([1, 2])
    if rank:
        with refused("pass the process_group of dcp.save to zckpt.dcp.Writer, too"):
            save({"w": WEIGHT}, f"{path}-pair", process_group=pair)
        dcp.save(
            {"w": WEIGHT + 1}, storage_writer=zckpt.dcp.Writer(f"{path}-pair", process_group=pair), process_group=pair
        )
    with pytest.raises(zckpt.UnsupportedError, match="use_collectives=False"):
        save({"w": WEIGHT}, path, use_collectives=False)


def test_some_of_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "c"
    cluster.run(of_some_ranks, 3, str(path))
    assert torch.equal(zckpt.open(f"{path}-alone").load()["param/w"], WEIGHT)
    assert zckpt.open(f"{path}-pair").world_size == 2
    assert not path.exists()


def save_in_the_background(path: str) -> None:
    state, state_dict = trained("fsdp", 2)
    expected = gathered(state_dict)
    group = dist.new_group()  # DCP uses it in a thread while the training uses the other one.
    # Most of the state is written before it may change.
    writer = zckpt.dcp.Writer(f"{path}/a", snapshot_bytes=100, process_group=group)
    pending: Any = dcp.async_save(state_dict, storage_writer=writer, process_group=group)
    train(state, 1)
    pending.result()
    staged = dcp.async_save(
        get_state_dict(state.model, [])[0],
        storage_writer=zckpt.dcp.Writer(f"{path}/b", per_rank=["seen"]),
        async_stager=BlockingAsyncStager(),
    )
    staged.result()  # type: ignore[union-attr]
    loaded = {"model": {name: torch.zeros_like(value) for name, value in state_dict["model"].items()}}
    zckpt.open(f"{path}/a").load_into(loaded)
    assert all(frozen(value) == frozen(expected[name]) for name, value in gathered(loaded).items())
    zckpt.open(f"{path}/b").load_into(weights := loaded["model"])
    assert frozen(gathered(weights)) != frozen({k.removeprefix("model."): v for k, v in expected.items()})


def test_async_save(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_in_the_background, 2, str(tmp_path))
    assert zckpt.validate(tmp_path / "a").ok


def test_a_writer_goes_to_another_process_unless_it_stages(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(zckpt.dcp.Writer(tmp_path / "c", step=3)))
    dcp.save({"w": WEIGHT}, storage_writer=writer)
    assert zckpt.open(tmp_path / "c").step == 3
    writer.stage({"w": WEIGHT})
    with pytest.raises(zckpt.UnsupportedError, match=r"AsyncCheckpointerType\.PROCESS"):
        pickle.dumps(writer)
    zckpt.wait()


def test_async_save_reports_a_failure(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("no directory")
    with pytest.raises(zckpt.ZckptError):
        dcp.async_save({"w": WEIGHT}, storage_writer=zckpt.dcp.Writer(tmp_path / "c"))


class Renaming(DefaultSavePlanner):
    """Saves tensors under other names, and in half of the precision."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"new.{name}": value for name, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)

    def resolve_data(self, write_item: Any) -> Any:
        made = super().resolve_data(write_item)
        return made.half() if isinstance(made, torch.Tensor) else made


def chunked(path: str) -> None:
    """Saves tensors of which a rank has several chunks, or columns, and loads them whole and in other chunks."""
    values, whole = torch.arange(60.0).reshape(6, 10), [[0, 0, 6, 10]]
    layouts = {
        "rows": [[0, 0, 1, 10], [1, 0, 2, 10], [3, 0, 3, 10]],
        "columns": [[0, 0, 6, 4], [0, 4, 6, 6]],
        "both": [[y, x, 3, 5] for y in (0, 3) for x in (0, 5)],
    }
    saved = {name: sharded(values, chunks) for name, chunks in layouts.items()}
    save(saved, path)
    for chunks in (*layouts.values(), whole):
        target = {name: sharded(torch.zeros(6, 10), chunks) for name in layouts}
        load(target, path)
        for tensor in target.values():
            for shard in tensor.local_shards():
                (y, x), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                assert torch.equal(shard.tensor, values[y : y + height, x : x + width])
    with refused("the chunks of w do not lie in rows and columns"):
        save({"w": sharded(values, [[0, 0, 3, 10], [3, 0, 3, 4], [3, 4, 3, 6]])}, f"{path}-refused")


def sharded(values: torch.Tensor, chunks: list[list[int]]) -> ShardedTensor:
    """Returns a tensor that is cut into these chunks, which the two ranks hold in turns."""
    rank = dist.get_rank()
    placed = [ShardMetadata(chunk[:2], chunk[2:], f"rank:{number % 2}/cpu") for number, chunk in enumerate(chunks)]
    local = [
        ShardOfTensor(values[y : y + height, x : x + width].clone(), placed[number])
        for number, (y, x, height, width) in enumerate(chunks)
        if number % 2 == rank
    ]
    metadata = ShardedTensorMetadata(placed, values.shape, TensorProperties(dtype=values.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def test_several_chunks_on_one_rank(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(chunked, 2, str(tmp_path / "c"))
    assert zckpt.validate(tmp_path / "c").ok
    values = torch.arange(60.0).reshape(6, 10)
    loaded = zckpt.open(tmp_path / "c").load()
    assert all(torch.equal(loaded[f"param/{name}"], values) for name in ("rows", "columns", "both"))
    assert not (tmp_path / "c-refused").exists()


def test_the_planner_is_told_of_the_save(tmp_path: Path) -> None:
    writer, told = zckpt.dcp.Writer(), []

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            told.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    for name in ("c", "d"):
        made = dcp.save(
            {"w": WEIGHT}, checkpoint_id=tmp_path / name, storage_writer=writer, planner=Planner(), no_dist=True
        )
        assert made.storage_meta == told[-1]
    assert [meta.checkpoint_id for meta in told] == [str(tmp_path / "c"), str(tmp_path / "d")]
    assert told[0].save_id != told[1].save_id


def test_a_checkpoint_that_exists(tmp_path: Path) -> None:
    save({"w": WEIGHT}, tmp_path / "c")
    with refused("Checkpoint already exists"):
        dcp.save({"w": WEIGHT}, storage_writer=zckpt.dcp.Writer(tmp_path / "c", overwrite=False))


def test_a_planner_of_ones_own(tmp_path: Path) -> None:
    save({"w": WEIGHT, "v": 1}, tmp_path / "c", planner=Renaming())
    checkpoint = zckpt.open(tmp_path / "c")
    assert frozen(checkpoint.load()) == frozen({"param/new.w": WEIGHT.half()})
    with refused("the planner of async_save has new.v, which the state dict does not have"):
        dcp.async_save(
            {"w": WEIGHT, "v": 1}, storage_writer=zckpt.dcp.Writer(tmp_path / "d"), planner=Renaming()
        ).result()  # type: ignore[union-attr]
