"""zckpt.convert turns distributed checkpoints of PyTorch (DCP) and files of torch.save into checkpoints, and
checkpoints into DCP folders."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zckpt
from tests.support.coded import Coded
from tests.support.deepspeed_folders import Runs, refused
from tests.support.models import make_engine
from tests.support.models import train as train_engine
from tests.support.state_dicts import WEIGHT, blank, gathered, nested
from tests.support.torch_models import held, make_state, train
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.checkpoint.reading.state_dict import paths_of
from zckpt.testing.engine_definition import frozen
from zckpt.tools.converting import to_dcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import Cluster


def save(state_dict: dict[str, Any], path: object, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_dict, checkpoint_id=str(path), **options)


def state_dict_of(state: zckpt.TrainState, **options: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizers, options=StateDictOptions(**options))
    made = {"model": model, "optim": optimizer, "epoch": 3, "step": state.step}
    return made if state.scheduler is None else {**made, "scheduler": state.scheduler.state_dict()}


def converted_and_written(folder: str, layout: str, options: dict[str, Any]) -> tuple[zckpt.Converted, list[Any]]:
    """Saves the same state by DCP and by zckpt.write, and converts what DCP has saved. Returns what happens to runs
    that resume from the one, the other, and what the other is converted to. All ranks have the same buffers, as DCP
    keeps those of one."""
    state = make_state(layout, scheduler=True, **options)
    train(state, 3)
    for buffer in state.model.buffers():
        dist.broadcast(buffer, 0)
    zckpt.write(state, f"{folder}/written")
    save(state_dict_of(state), f"{folder}/dcp")
    converted = zckpt.convert(f"{folder}/dcp", f"{folder}/converted")
    resumed = [resume(path, layout, options) for path in (converted.path, f"{folder}/written")]
    return converted, [*resumed, back(folder, layout, options)]


def back(folder: str, layout: str, options: dict[str, Any]) -> Any:
    """Lets PyTorch load what a conversion to DCP has made of the checkpoint that zckpt.write has written."""
    state = make_state(layout, seed=1, scheduler=True, **options)
    converted = zckpt.convert(f"{folder}/written", f"{folder}/back", to="dcp", world_size=3)
    saved = state_dict_of(state)
    del saved["epoch"], saved["step"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(saved, checkpoint_id=converted.path)
    set_state_dict(state.model, state.optimizers, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    assert state.scheduler is not None
    state.scheduler.load_state_dict(saved["scheduler"])
    state.restored(3)
    return frozen([held(state), train(state, 2), held(state)])


def resume(path: str, layout: str, options: dict[str, Any]) -> Any:
    state = make_state(layout, seed=1, scheduler=True, **options)
    zckpt.restore(state, path)
    before = held(state)
    return frozen([before, train(state, 2), held(state)])


def check_same(converted: str, written: str) -> None:
    """Checks that a conversion is what zckpt.write has written, except for what DCP does not tell."""
    ck, other = zckpt.open(converted), zckpt.open(written)
    assert zckpt.validate(converted).ok
    keys = {f"param/{key.partition('/')[2]}" if key.startswith("buffer/") else key: key for key in other}
    assert set(ck) == set(keys)
    actual, expected = ck.load("*"), other.load("*")
    for key, original in keys.items():
        assert actual[key].dtype == expected[original].dtype, key
        assert torch.equal(actual[key], expected[original]), key
    assert ck.aliases == other.aliases
    assert (ck.step, ck.world_size) == (other.step, other.world_size)
    trees = [dict(each.state["engine"]) for each in (ck, other)]
    assert trees[0]["scheduler"]["state"] == trees[1]["scheduler"]["state"]
    assert frozen(trees[0]["optimizer"]) == frozen(trees[1]["optimizer"])
    assert trees[0]["counters"] == trees[1]["counters"]


LAYOUTS = [
    ("fsdp", {}, 2),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in [
            ("fsdp", {"optimizer": "amsgrad"}, 3),
            ("fsdp", {"optimizer": "adam"}, 2),
            ("fsdp", {"optimizer": "momentum"}, 2),
            ("ddp", {}, 2),
            ("hsdp", {}, 4),
            ("tp", {}, 4),
            ("hsdp-tp", {}, 8),
            ("rows", {}, 4),
            ("columns", {}, 2),
        ]
    ),
]


@pytest.mark.parametrize(("layout", "options", "ranks"), LAYOUTS)
def test_a_training_state_is_resumed(
    cluster: Cluster, tmp_path: Path, layout: str, options: dict[str, Any], ranks: int
) -> None:
    results = cluster.run(converted_and_written, ranks, str(tmp_path), layout, options)
    for _, (from_dcp, expected, from_back) in results:
        assert from_dcp == expected
        assert from_back == expected
    converted = results[0][0]
    assert converted.found_format == "DCP folder, a training state"
    if options.get("optimizer") != "momentum":  # of which DCP does not tell the class
        check_same(converted.path, str(tmp_path / "written"))
    assert zckpt.open(converted.path).state["client_state"] == {"epoch": 3, "step": 3}


def test_other_contents_become_a_state_dict(tmp_path: Path) -> None:
    save(nested(), tmp_path / "dcp")
    torch.save(nested(), tmp_path / "saved.pt")
    zckpt.write_state_dict(nested(), tmp_path / "written")
    expected = zckpt.open(tmp_path / "written")
    for name in ("dcp", "saved.pt"):
        converted = zckpt.convert(tmp_path / name, tmp_path / "converted", overwrite=True)
        ck = zckpt.open(converted.path)
        assert converted.found_format.endswith(", a state dict")
        assert converted.missing == ()
        assert zckpt.validate(converted.path).ok
        assert ck.state_dict().keys() == expected.state_dict().keys()
        for tensor, value in expected.state_dict().items():
            assert torch.equal(ck.state_dict()[tensor], value), tensor
        assert repr(ck.state["client_state"]) == repr(expected.state["client_state"])
        assert paths_of(loader_of(ck)) == paths_of(loader_of(expected))
    assert ck.aliases == {"model.tied": "model.a.weight"}  # a file of torch.save tells this


def test_a_state_dict_becomes_a_dcp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_dcp, "CHUNK_BYTES_MIN", 16)
    state = {**nested(), "bool": torch.tensor([True, False, True]), "large": torch.randn(7, 50)}
    zckpt.write_state_dict(state, tmp_path / "written")
    converted = zckpt.convert(tmp_path / "written", tmp_path / "dcp", to="dcp", world_size=3)
    assert converted.missing == ()
    metadata: Any = FileSystemReader(tmp_path / "dcp").read_metadata()
    assert len(metadata.state_dict_metadata["large"].chunks) == 3
    loaded = blank(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert frozen(gathered(loaded)) == frozen(gathered(state))
    again = zckpt.convert(tmp_path / "dcp", tmp_path / "again")
    for name, value in zckpt.open(tmp_path / "written").state_dict().items():
        assert torch.equal(zckpt.open(again.path).state_dict()[name], value)
    with pytest.raises(zckpt.CheckpointExistsError):
        zckpt.convert(tmp_path / "written", tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "written", tmp_path / "dcp", to="dcp", overwrite=True)
    with pytest.raises(ValueError, match="not for to='dcp'"):
        zckpt.convert(tmp_path / "written", tmp_path / "other", to="dcp", stage=1)


def from_deepspeed(path: str, stage: int) -> list[float]:
    """Returns the weights, moments and steps of an engine, and those that PyTorch loads from the DCP folder which is
    made of its checkpoint."""
    engine = make_engine(stage, frozen=True)
    train_engine(engine, 3)
    converted = zckpt.convert(zckpt.write(engine, f"{path}/written"), f"{path}/dcp", to="dcp")
    assert "the counters global_samples, micro_steps" in converted.missing
    ck = zckpt.open(f"{path}/written")
    saved: dict[str, Any] = {
        "model": {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in ck.weights().items()},
        "optim": {"state": {
            info.name: {part: torch.zeros(info.shape) for part in ("exp_avg", "exp_avg_sq")} | {"step": torch.zeros(())}
            for info in ck.values() if info.part == "exp_avg"
        }},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(saved, checkpoint_id=f"{path}/dcp")
    expected = ck.load("*")
    for name, weight in saved["model"].items():
        assert torch.equal(weight, ck.state_dict()[name]), name
    for name, state in saved["optim"]["state"].items():
        assert all(torch.equal(state[part], expected[f"{part}/{name}"]) for part in ("exp_avg", "exp_avg_sq")), name
    return [state["step"].item() for state in saved["optim"]["state"].values()]


@pytest.mark.matrix
def test_an_engine_becomes_a_dcp_folder(cluster: Cluster, tmp_path: Path) -> None:
    for steps in cluster.run(from_deepspeed, 2, str(tmp_path), 2):
        assert steps
        assert set(steps) == {3.0}


@pytest.mark.parametrize("flat", [False, True])
def test_a_file_of_torch_save_with_a_full_state_dict(tmp_path: Path, flat: bool) -> None:
    """So FSDP1 and FSDP2 save full state dicts, and torchtitan the settings of each parameter."""
    state = make_state("alone", scheduler=True)
    train(state, 3)
    zckpt.write(state, tmp_path / "written")
    saved = state_dict_of(state, full_state_dict=True, flatten_optimizer_state_dict=flat)
    torch.save(saved, tmp_path / "saved.pt")
    converted = zckpt.convert(tmp_path / "saved.pt", tmp_path / "converted")
    assert converted.found_format == "file of torch.save, a training state"
    check_same(converted.path, str(tmp_path / "written"))
    assert resume(converted.path, "alone", {}) == resume(str(tmp_path / "written"), "alone", {})


def test_torchtitan_has_the_weights_at_the_top(tmp_path: Path) -> None:
    state = make_state("alone")
    train(state, 2)
    zckpt.write(state, tmp_path / "written")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = {
        **get_model_state_dict(state.model),
        "optimizer": get_optimizer_state_dict(state.model, state.optimizers, options=options),
        "train_state": {"step": torch.tensor(2)},
    }
    save(saved, tmp_path / "dcp")
    converted = zckpt.convert(tmp_path / "dcp", tmp_path / "converted")
    assert zckpt.open(converted.path).state["client_state"] == {"train_state": {"step": torch.tensor(2)}}
    new, other = make_state("alone", seed=1), make_state("alone", seed=2)
    zckpt.restore(new, converted.path)
    zckpt.restore(other, tmp_path / "written")
    assert frozen(held(new)) == frozen(held(other))


@pytest.mark.parametrize("full", [False, True])
def test_accelerate_has_a_folder_or_a_file_for_each(tmp_path: Path, full: bool) -> None:
    state = make_state("alone", scheduler=True)
    train(state, 3)
    zckpt.write(state, tmp_path / "written")
    saved, folder = state_dict_of(state), tmp_path / "checkpoint-3"
    folder.mkdir()
    if full:
        torch.save(saved["model"], folder / "pytorch_model_fsdp.bin")
        torch.save(saved["optim"], folder / "optimizer.bin")
    else:
        save({"model": saved["model"]}, folder / "pytorch_model_fsdp_0")
        save({"optimizer": saved["optim"]}, folder / "optimizer_0")
    torch.save(saved["scheduler"], folder / "scheduler.pt")
    converted = zckpt.convert(folder, tmp_path / "converted")
    assert converted.found_format == "FSDP checkpoint of Accelerate, a training state"
    check_same(converted.path, str(tmp_path / "written"))


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    state = make_state("alone")
    train(state, 1)
    saved = state_dict_of(state)
    del saved["model"]["blocks.0.up.weight"]
    save(saved, tmp_path / "dcp")
    converted = zckpt.convert(tmp_path / "dcp", tmp_path / "converted")
    assert "the optimizer has other names of parameters than the model" in converted.missing[0]
    assert "param/optim.state.blocks.0.up.weight.exp_avg" in zckpt.open(converted.path)


def sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = dist.tensor.distribute_tensor(torch.arange(21.0).reshape(7, 3), mesh, [dist.tensor.Shard(0)])
    save({"weight": weight, "lr": 0.5, "plain": WEIGHT}, folder)


@pytest.fixture(scope="module")
def folder_of_two(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp")
    cluster.run(sharded, 2, str(path))
    return path


def change(metadata: Callable[[Any], object]) -> Callable[[Path], None]:
    """Returns a function that changes the metadata of a folder."""

    def spoil(path: Path) -> None:
        content = FileSystemReader(path).read_metadata()
        metadata(content)
        (path / ".metadata").write_bytes(pickle.dumps(content))

    return spoil


def _chunks(metadata: Any) -> Any:
    return metadata.state_dict_metadata["weight"].chunks


def shorten(metadata: Any) -> None:
    """Describes the second chunk as one without rows, as DCP describes some that have one."""
    _chunks(metadata)[1].sizes = torch.Size([0, 3])
    metadata.state_dict_metadata["weight"].size = torch.Size([4, 3])


def _info(metadata: Any, name: str = "weight") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def _move(metadata: Any, nbytes: int) -> None:
    _info(metadata).offset += nbytes
    _info(metadata).length -= nbytes


def cut_off(path: Path) -> None:
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])


SPOILED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "missing file": (lambda path: (path / "__1_0.distcp").unlink(), zckpt.MissingFileError, "a file of the checkpoint"),
    "missing metadata": (lambda path: (path / ".metadata").unlink(), zckpt.MissingFileError, "file .metadata"),
    "cut off": (cut_off, zckpt.FormatError, "cut off"),
    "missing chunk": (change(lambda m: _chunks(m).pop()), zckpt.FormatError, "chunks of weight have 12 elements"),
    "chunk twice": (change(lambda m: _chunks(m).append(_chunks(m)[0])), zckpt.FormatError, "weight have 33 elements"),
    "other sizes": (change(shorten), zckpt.FormatError, r"weight is said to have a chunk of \[0, 3\]"),
    "negative": (
        change(lambda m: setattr(_chunks(m)[1], "sizes", torch.Size([-3, 3]))), zckpt.FormatError, "has a chunk of",
    ),
    "other dtype": (
        change(lambda m: setattr(m.state_dict_metadata["weight"].properties, "dtype", torch.int32)),
        zckpt.FormatError, "in torch.int32, and the file has",
    ),
    "no place": (
        change(lambda m: m.storage_data.pop(next(i for i in m.storage_data if i.fqn == "lr"))),
        zckpt.FormatError, "does not say where lr is",
    ),
    "another folder": (
        change(lambda m: setattr(_info(m), "relative_path", "../__0_0.distcp")), zckpt.FormatError, "not in the folder",
    ),
    "wrong length": (change(lambda m: setattr(_info(m), "length", 500)), zckpt.FormatError, "cut off|whole file"),
    "past the end": (change(lambda m: setattr(_info(m), "offset", 1 << 40)), zckpt.FormatError, "cut off"),
    "wrong offset": (change(lambda m: _move(m, 7)), zckpt.FormatError, "not a file of torch.save"),
    "extension": (
        change(lambda m: setattr(_info(m), "transform_descriptors", ["zstd"])), zckpt.UnsupportedError, "extension",
    ),
    "code": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps(Runs(eval, "open('touched', 'w')"))),
        zckpt.FormatError, "asks for .*eval",
    ),
    "path": (
        change(lambda m: m.planner_data.update(lr=("a", 1 << 40))), zckpt.FormatError, "'lr' has the path",
    ),
    "value for tensor": (
        change(lambda m: m.storage_data.update({i: _info(m, "lr") for i in m.storage_data if i.fqn == "plain"})),
        zckpt.FormatError, "no tensor in the place of plain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_damaged_and_hostile_folders_are_refused(
    folder_of_two: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "source"
    copy.mkdir()
    for file in folder_of_two.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    zckpt.convert(copy, tmp_path / "sound")
    spoil, error, message = SPOILED[case]
    spoil(copy)
    refused(copy, error, message)
    assert not (tmp_path / "touched").exists()


def test_a_class_of_a_value_is_named(tmp_path: Path) -> None:
    save({"weight": WEIGHT, "value": Coded}, tmp_path / "source")
    refused(tmp_path / "source", zckpt.FormatError, r"asks for tests\.support\.coded\.Coded")
    torch.save(WEIGHT, tmp_path / "tensor.pt")
    refused(tmp_path / "tensor.pt", zckpt.UnsupportedError, "has a Tensor, and no state dict")


def uneven(folder: str, rows: int) -> bool:
    """Saves layers of which DCP describes one wrongly. Returns whether DCP has saved them."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, rows, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    try:
        save({"model": get_model_state_dict(model)}, folder)
    except dcp.CheckpointException:
        return False
    return True


@pytest.mark.matrix
def test_rows_that_dcp_has_lost_are_noticed(cluster: Cluster, tmp_path: Path) -> None:
    for rows in range(1, 14):
        path = tmp_path / f"{rows}"
        if not all(cluster.run(uneven, 6, str(path), rows)):
            assert rows == 13
        elif rows == 7:
            with pytest.raises(zckpt.FormatError, match=r"0\.weight .*chunk"):
                zckpt.convert(path, tmp_path / "converted")
        else:
            zckpt.convert(path, tmp_path / "converted", overwrite=True)
