"""States of PyTorch alone on several ranks: every layout restores into every other one, replicas are compared, and what
cannot be saved is refused."""

from __future__ import annotations

import os
import warnings
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import zckpt
from tests.support.grids import order_of
from tests.support.models import make_engine
from tests.support.models import train as train_engine
from tests.support.torch_models import backward, held, make_state, train
from zckpt.engines.shards import span_of
from zckpt.engines.tensors import local_of, plain_name
from zckpt.geometry import Grid
from zckpt.testing.engine_definition import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

LAYOUTS = {"alone": 1, "ddp": 2, "fsdp": 3, "hsdp": 4, "tp": 4, "rows": 4, "columns": 3}
"""The number of ranks of each layout."""


def whole(state: zckpt.TrainState) -> dict[str, Any]:
    """Returns every tensor of a state, gathered by torch."""

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        full: Any = tensor.detach()
        return (full.full_tensor() if isinstance(full, DTensor) else full).clone()

    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    names: dict[Any, str] = {
        weight: plain_name(name).removeprefix("module.") for name, weight in state.model.named_parameters()
    }
    tensors = {f"weight {name}": gathered(weight) for weight, name in names.items()}
    for optimizer in state.optimizers:
        for weight, of_weight in optimizer.state.items():
            tensors |= {f"{key} {names[weight]}": gathered(value) for key, value in of_weight.items()}
    return tensors


def write_trained(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    state = make_state(**setup)
    train(state, 3)
    tensors = whole(state)
    zckpt.write(state, path)
    assert frozen(whole(state)) == frozen(tensors)
    return tensors


def restore_whole(path: str, setup: dict[str, Any]) -> dict[str, Any]:
    state = make_state(**setup, seed=1)
    zckpt.restore(state, path)
    assert state.step == 3
    tensors = whole(state)
    train(state, 1)
    assert frozen(whole(state)) != frozen(tensors)
    return tensors


def write_each(path: str, layouts: list[str]) -> list[dict[str, Any]]:
    return [write_trained(f"{path}/{layout}", {"layout": layout}) for layout in layouts]


def restore_each(path: str, layouts: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Restores the checkpoints of all layouts into these ones, one after the other. The first one is restored into a
    state that is not trained, and each other one into a state that was trained since the one before.

    Returns, for each, the layout of the checkpoint and of the state, and the tensors.
    """
    results = []
    for layout in layouts:
        state = make_state(layout, seed=1)
        for there in LAYOUTS:
            zckpt.restore(state, f"{path}/{there}")
            assert state.step == 3
            results.append((there, layout, whole(state)))
            train(state, 1)
        assert frozen(whole(state)) != frozen(results[-1][2])
    return results


def test_every_layout_restores_into_every_other_one(cluster: Cluster, tmp_path: Path) -> None:
    of_ranks: dict[int, list[str]] = {}
    for layout, ranks in LAYOUTS.items():
        of_ranks.setdefault(ranks, []).append(layout)
    written: dict[str, dict[str, Any]] = {}
    for ranks, layouts in of_ranks.items():
        first = cluster.run(write_each, ranks, str(tmp_path), layouts)[0]
        written |= {layout: frozen(tensors) for layout, tensors in zip(layouts, first, strict=True)}
    assert all(zckpt.validate(tmp_path / layout).ok for layout in LAYOUTS)
    for ranks, layouts in of_ranks.items():
        for there, here, restored in chain(*cluster.run(restore_each, ranks, str(tmp_path), layouts)):
            assert frozen(restored) == written[there], (there, here)


MESHES = [
    ("alone", 1), ("ddp", 3), ("ddp", 6), *(("fsdp", ranks) for ranks in range(1, 7)), ("hsdp", 4), ("hsdp", 6),
    ("tp", 2), ("tp", 4), ("tp", 6), ("rows", 4), ("rows", 6), ("columns", 2), ("columns", 5),
]  # fmt: skip
"""Layouts, each with a number of ranks."""


@pytest.mark.matrix
@pytest.mark.parametrize(("there", "ranks"), MESHES)
def test_every_mesh_restores_into_every_other_one(cluster: Cluster, tmp_path: Path, there: str, ranks: int) -> None:
    path = str(tmp_path / "c")
    written = cluster.run(write_trained, ranks, path, {"layout": there})
    for layout, here in MESHES:
        for restored in cluster.run(restore_whole, here, path, {"layout": layout}):
            assert frozen(restored) == frozen(written[0]), (layout, here)


@pytest.mark.matrix
def test_a_mesh_of_three_dimensions(cluster: Cluster, tmp_path: Path) -> None:
    for number, (there, here) in enumerate([("hsdp-tp", "fsdp"), ("fsdp", "hsdp-tp")]):
        path = str(tmp_path / str(number))
        written = cluster.run(write_trained, {"hsdp-tp": 8, "fsdp": 3}[there], path, {"layout": there})
        for restored in cluster.run(restore_whole, {"hsdp-tp": 8, "fsdp": 3}[here], path, {"layout": here}):
            assert frozen(restored) == frozen(written[0])


def test_a_model_that_was_made_without_memory(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    written = cluster.run(write_trained, 2, path, {"layout": "fsdp"})
    for restored in cluster.run(restore_whole, 3, path, {"layout": "fsdp", "meta": True}):
        assert frozen(restored) == frozen(written[0])


def spans() -> dict[Any, Grid]:
    """Compares the span of each rank with the numbers that its elements have in the whole tensor. Returns the grids."""
    ranks, seen = dist.get_world_size(), dict[Any, Grid]()
    meshes = [((ranks,), None)] + [((a, ranks // a), ("dp", "tp")) for a in range(2, ranks) if ranks % a == 0]
    shards: list[Any] = [lambda parameter: Shard(0), lambda parameter: Shard(1)]
    for shape, names in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for rows, columns in ((1, 8), (2, 1), (5, 2), (7, 3), (12, 8)):
            for by_tp, by_dp in product((0, 1) if names else (None,), (0, 1)):
                module = nn.Linear(columns, rows, bias=False)
                numbers = torch.arange(rows * columns * 1.0).reshape(rows, columns)
                module.weight = nn.Parameter(numbers.clone())
                if by_tp is not None:
                    module.weight = nn.Parameter(distribute_tensor(numbers, mesh["tp"], [Shard(by_tp)]))
                try:
                    fully_shard(module, mesh=mesh["dp"] if names else mesh, shard_placement_fn=shards[by_dp])
                except NotImplementedError:  # FSDP2 shards in another dimension than the first one only evenly.
                    continue
                weight: Any = module.weight
                grid, start, stop = span_of(weight)
                expected = order_of(grid)[start:stop].tolist()
                assert weight._local_tensor.detach().flatten().tolist() == expected, (shape, by_tp, by_dp, grid)
                seen[shape, rows, columns, by_tp, by_dp] = grid
    return seen


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_the_span_of_a_rank_is_where_its_elements_are(cluster: Cluster, ranks: int) -> None:
    first, *others = cluster.run(spans, ranks)
    # FSDP2 may have refused to shard on some of the ranks.
    assert all(seen[key] == first[key] for seen in others for key in seen.keys() & first.keys())
    assert any(grid.sections for grid in first.values())


def spans_on_a_mesh(dp: int, tp: int) -> list[tuple[Any, list[float]] | None]:
    """Returns the span of each of many tensors of 1 to 30 rows, or columns, and the numbers that its local elements
    have, or None if FSDP2 refuses to cut the tensor so. The ranks do not exchange anything."""
    dist.init_process_group("fake", rank=int(os.environ["RANK"]), world_size=dp * tp, store=FakeStore())
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    shards: list[Any] = [lambda parameter: Shard(0), lambda parameter: Shard(1)]
    seen: list[tuple[Any, list[float]] | None] = []
    for size, by_tp, by_dp in product(range(1, 31), (0, 1), (0, 1)):
        for rows, columns in ((size, 3), (4, size)):
            module = nn.Linear(columns, rows, bias=False)
            numbers = torch.arange(rows * columns * 1.0).reshape(rows, columns)
            cut = distribute_tensor(numbers, mesh["tp"], [Shard(by_tp)], src_data_rank=None)
            module.weight = nn.Parameter(cut)
            try:
                fully_shard(module, mesh=mesh["dp"], shard_placement_fn=shards[by_dp])
            except NotImplementedError:
                seen.append(None)
                continue
            weight: Any = module.weight
            seen.append((span_of(weight), weight._local_tensor.detach().flatten().tolist()))
    return seen


@pytest.mark.matrix
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_every_size_is_where_its_elements_are(cluster: Cluster, dp: int, tp: int) -> None:
    """PyTorch's own description of these layouts is wrong for some of them."""
    laid_out = 0
    for of_ranks in zip(*cluster.run(spans_on_a_mesh, dp * tp, dp, tp, init=False), strict=True):
        if None in of_ranks:
            continue
        (grid,) = {span.grid for span, _ in of_ranks}
        numbers = order_of(grid).tolist()
        assert sorted(number for _, local in of_ranks for number in local) == list(range(len(numbers)))
        assert all(local == numbers[span.start : span.stop] for span, local in of_ranks)
        laid_out += 1
    assert laid_out > 100


def refusals(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Replicas of one rank are no sharding.
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises((zckpt.UnsupportedError, zckpt.RankError), match=r"fully_shard"):
        zckpt.write((model, torch.optim.AdamW(model.parameters())), path)


def test_what_cannot_be_saved_is_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refusals, 4, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def write_other_models(path: str) -> None:
    model = nn.ModuleDict({f"of_rank_{dist.get_rank()}": nn.Linear(3, 3)})
    with pytest.raises(zckpt.RankError, match=r"rank 1 .*rank 0: its weights"):
        zckpt.write((model, None), path)


def test_ranks_that_write_models_of_other_names(cluster: Cluster, tmp_path: Path) -> None:
    """Without an optimizer, nothing else of these models has to agree."""
    cluster.run(write_other_models, 2, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def write_differing(path: str, layout: str) -> str:
    state = make_state(layout)
    train(state, 1)
    zckpt.write(state, f"{path}-before")
    if dist.get_rank() == 1:  # in a way that torch does not count as a change, as the kernels of DeepSpeed do it
        with torch.no_grad():
            weight: Any = state.model.get_parameter("module.embed.weight" if layout == "ddp" else "blocks.1.norm.bias")
            local_of(weight).detach().view(-1).numpy()[-1] += 1
    with pytest.raises(zckpt.StateError) as raised:
        zckpt.write(state, path)
    return str(raised.value)


@pytest.mark.parametrize(("layout", "ranks", "key"), [("ddp", 3, "embed.weight"), ("tp", 4, "blocks.1.norm.bias")])
def test_replicas_that_differ_are_an_error(cluster: Cluster, tmp_path: Path, layout: str, ranks: int, key: str) -> None:
    for message in cluster.run(write_differing, ranks, str(tmp_path / "c"), layout):
        assert f"master/{key} has other values on rank 1 than on rank 0" in message
    assert not (tmp_path / "c").exists()


def save_differing(directory: str) -> tuple[list[str], Any]:
    engine = zckpt.attach(make_engine(stage=0, dtype="fp32"))
    train_engine(engine, 1)
    weight = engine.module.layers[2].weight
    expected = weight.detach().clone()
    if dist.get_rank() == 1:
        weight.detach().numpy()[-1, -1] += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine.save_checkpoint(directory, tag="c")
    return [str(warning.message) for warning in caught], expected


def test_an_attached_engine_saves_replicas_that_differ_as_rank_0_has_them(cluster: Cluster, tmp_path: Path) -> None:
    (told, expected), _ = cluster.run(save_differing, 2, str(tmp_path))
    key = "master/layers.2.weight"
    assert any(f"{key} has other values on rank 1 than on rank 0" in message for message in told), told
    saved = zckpt.open(tmp_path / "c")
    assert torch.equal(saved.load(key)[key], expected)
    assert {piece.rank for piece in saved[key].pieces} == {0}


def accumulate(path: str, layout: str) -> None:
    """Checks that gradients which are not reduced yet are refused, and dropped by a restore."""
    state = make_state(layout)
    train(state, 1)
    before = held(state)
    zckpt.write(state, f"{path}/a")
    assert isinstance(state.model, FSDPModule)
    state.optimizers[0].zero_grad()
    state.model.set_requires_gradient_sync(False)
    backward(state, 1)
    assert all(weight.grad is None for weight in state.model.parameters())
    with pytest.raises((zckpt.UnsupportedError, zckpt.RankError), match=r"no step has used"):
        zckpt.write(state, f"{path}/b")
    zckpt.restore(state, f"{path}/a")
    state.model.set_requires_gradient_sync(True)
    assert frozen(held(state)) == frozen(before)
    resumed = make_state(layout, seed=1)
    zckpt.restore(resumed, f"{path}/a")
    assert train(state, 2) == train(resumed, 2)
    assert frozen(held(state)) == frozen(held(resumed))


def test_gradients_that_are_not_reduced_yet_are_seen(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(accumulate, 2, str(tmp_path), "fsdp")


def go_on(path: str, setup: dict[str, Any], options: dict[str, Any]) -> None:
    through = make_state(**setup, **options, scheduler=True)
    train(through, 2)
    zckpt.write(through, path)
    losses = train(through, 2)
    resumed = make_state(**setup, **options, scheduler=True, seed=1)
    zckpt.restore(resumed, path)
    assert train(resumed, 2) == losses
    assert frozen(held(resumed)) == frozen(held(through))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    {"reshard_after_forward": False},
    {"mixed": True},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, options: dict[str, Any]) -> None:
    cluster.run(go_on, 2, str(tmp_path / "c"), {"layout": "fsdp"}, options)


def replicate_all(path: str) -> None:
    """Writes a model of DTensors that every rank has whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    for name, weight in [*model.named_parameters()]:
        setattr(model, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()])))
    zckpt.write((model, torch.optim.SGD(model.parameters())), path)


def test_replicated_tensors_are_written_once(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(replicate_all, 2, str(tmp_path / "c"))
    checkpoint = zckpt.open(tmp_path / "c")
    torch.manual_seed(0)
    assert frozen(checkpoint.load()) == frozen({f"master/{k}": v for k, v in nn.Linear(3, 3).state_dict().items()})
    assert {piece.rank for piece in checkpoint["master/weight"].pieces} == {0, 1}
