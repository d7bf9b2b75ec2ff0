"""zckpt.convert makes folders in DeepSpeed's own format from checkpoints. Stock ``engine.load_checkpoint`` resumes from
them."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch

import zckpt
from tests.support.faults import NO_SPACE, Fault, faulty, kill
from tests.support.forks import fork, result_of
from tests.support.memory import peak_growth
from tests.support.models import OPTIMIZERS, make_engine, make_model, train
from tests.support.runs import AFTER, BEFORE, everything, settings
from tests.support.states import engine_state, write_state
from zckpt.errors import CheckpointExistsError, FormatError, NoSpaceError, UnsupportedError
from zckpt.storage.local_store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tests.support.cluster import Cluster

CPU = {"offload_optimizer": {"device": "cpu"}}
MODES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp16": {"stage": 0, "dtype": "fp16"},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1},
    "1-fp16": {"stage": 1, "dtype": "fp16"},
    "1-bf16-optimizer": {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "1-aligned": {"stage": 1, "parameter_alignment": True},
    "2": {"stage": 2},
    "2-fp32": {"stage": 2, "dtype": "fp32"},
    "2-cpu": {"stage": 2, **CPU},
    "2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "3": {"stage": 3},
    "3-fp16": {"stage": 3, "dtype": "fp16"},
    "3-fp32": {"stage": 3, "dtype": "fp32"},
    "3-cpu": {"stage": 3, **CPU, "offload_param": {"device": "cpu"}},
    "3-sub-groups": {"stage": 3, "sub_group_size": 1000},
    "3-muon": {"stage": 3, "optimizer": "muon", "reduce_scatter": False},
}
SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"model": "odd", "groups": True, "scheduler": True},
    "frozen-gpt2": {"model": "gpt2", "frozen": True, "groups": True},
}
RESHARDED = [
    ("3", 2, "1", 3),
    ("3", 2, "0", 1),
    ("2-round-robin", 2, "3-sub-groups", 3),
    ("2-round-robin", 3, "2-round-robin", 2),
    ("0-fp32", 1, "3-fp32", 2),
    ("3-fp32", 2, "0-fp32", 2),
    ("1-aligned", 2, "1-aligned", 3),
    ("1-bf16-optimizer", 2, "2", 1),
    ("0", 2, "2-cpu", 2),
    ("3-fp16", 2, "0-fp16", 2),
]


def marked(every: Iterable[tuple[Any, ...]], on_every_commit: Collection[tuple[Any, ...]]) -> list[Any]:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in on_every_commit else pytest.mark.matrix)
        for case in every
    ]


def go_on(engine: Any) -> dict[str, Any]:
    """Returns what the engine holds, its next losses, and what it holds then. Sets the random states, because
    DeepSpeed's folders have none."""
    before = held(engine)
    torch.manual_seed(engine.global_rank)
    losses = train(engine, AFTER, BEFORE)
    return {"before": before, "losses": losses, "after": held(engine)}


def held(engine: Any) -> dict[str, Any]:
    """Returns what the engine holds, without ``lr`` and the counter of micro steps. DeepSpeed does not restore this
    counter, which means nothing if no gradients are accumulated."""
    about = {key: value for key, value in settings(engine).items() if key not in ("micro_steps", "lr")}
    return {**everything(engine), "settings": about}


def write_and_go_on(path: str, setup: dict[str, Any], stock: str | None = None) -> dict[str, Any]:
    engine = make_engine(**setup)
    train(engine, BEFORE)
    zckpt.write(engine, path, client_state={"note": [1, "two"], "where": torch.arange(3)})
    if stock is not None:
        engine.save_checkpoint(stock)
    return go_on(engine)


def load_and_go_on(folder: str, setup: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    return {**go_on(engine), "client": {key: client_state.get(key) for key in ("note", "where")}}


def get_and_go_on(source: str, setup: dict[str, Any], *, stock: bool) -> dict[str, Any]:
    engine = make_engine(**setup, seed=1)
    if stock:
        assert engine.load_checkpoint(source)[0] is not None
    else:
        zckpt.restore(engine, source)
    return go_on(engine)


def assert_goes_on_alike(through: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for expected, actual in zip(through, resumed, strict=True):
        assert expected["before"] == actual["before"]
        assert expected["losses"] == actual["losses"]
        assert expected["after"] == actual["after"]


@pytest.mark.parametrize(
    ("mode", "shape"),
    marked(
        itertools.product(MODES, SHAPES),
        {("0-fp32", "odd"), ("1-bf16-optimizer", "frozen-gpt2"), ("2-round-robin", "odd"), ("3-fp16", "odd")},
    ),
)
def test_stock_deepspeed_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path, mode: str, shape: str) -> None:
    setup = {"optimizer": "torch_adamw", **MODES[mode], **SHAPES[shape]}
    path, folder = str(tmp_path / "run" / "global_step3"), str(tmp_path / "deepspeed")
    through = cluster.run(write_and_go_on, 2, path, setup)
    missing = zckpt.convert(path, folder, to="deepspeed").missing
    assert any("random number generators" in line for line in missing)
    resumed = cluster.run(load_and_go_on, 2, folder, setup)
    if setup["stage"] < 3 and shape == "odd":  # the folder holds only the buffers of rank 0
        through, resumed = through[:1], resumed[:1]
        assert any("running_mean" in line for line in missing)
    assert_goes_on_alike(through, resumed)
    for state in resumed:
        assert state["client"]["note"] == [1, "two"]
        assert torch.equal(state["client"]["where"], torch.arange(3))


@pytest.mark.parametrize(("source", "ranks", "target", "new_ranks"), marked(RESHARDED, [RESHARDED[0], RESHARDED[2]]))
def test_another_stage_and_world_size(
    cluster: Cluster, tmp_path: Path, source: str, ranks: int, target: str, new_ranks: int
) -> None:
    """The engine that stock DeepSpeed has resumed equals the one that zckpt has restored, and so do their next steps,
    bit for bit."""
    shape = {"model": "gpt2", "frozen": True, "groups": True, "scheduler": True, "optimizer": "torch_adamw"}
    path, folder = str(tmp_path / "run" / "global_step3"), str(tmp_path / "deepspeed")
    kept = ("sub_group_size", "round_robin_gradients", "parameter_alignment")  # the conversion keeps these settings
    there = {**{key: value for key, value in MODES[target].items() if key in kept}, **MODES[source]}
    here = {**there, **MODES[target]}
    cluster.run(write_and_go_on, ranks, path, {**shape, **there})
    zckpt.convert(path, folder, to="deepspeed", stage=here["stage"], world_size=new_ranks)
    setup = {**shape, **here}
    restored = cluster.run(get_and_go_on, new_ranks, path, setup, stock=False)
    resumed = cluster.run(get_and_go_on, new_ranks, folder, setup, stock=True)
    assert_goes_on_alike(restored, resumed)


LOSSY: dict[str, dict[str, Any]] = {
    "1-adam": {"stage": 1, "optimizer": "adamw", "model": "gpt2", **CPU},
    "2-adam": {"stage": 2, "optimizer": "adamw", "model": "gpt2", **CPU},
    "3-adam": {"stage": 3, "optimizer": "adamw", "model": "gpt2", **CPU},
    "1-muon": {"stage": 1, "optimizer": "muon", "model": "gpt2", "groups": True},
    "2-muon": {"stage": 2, "optimizer": "muon", "model": "gpt2", "groups": True},
    "2-muon-cpu": {"stage": 2, "optimizer": "muon", "model": "gpt2", "groups": True, **CPU},
}
"""Modes in which DeepSpeed itself loses something: the products that its Adam in C++ keeps, or the dtype of the
momentum of Muon."""


@pytest.mark.parametrize("mode", marked([(mode,) for mode in LOSSY], [("2-adam",)]))
def test_stock_deepspeed_goes_on_as_from_its_own_folder(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    setup = LOSSY[mode]
    path, stock, folder = (str(tmp_path / name) for name in ("run/global_step3", "stock", "converted"))
    cluster.run(write_and_go_on, 2, path, setup, stock)
    missing = zckpt.convert(path, folder, to="deepspeed").missing
    assert any("running products" in line for line in missing) or "adam" not in mode
    resumed = [cluster.run(get_and_go_on, 2, source, setup, stock=True) for source in (stock, folder)]
    assert_goes_on_alike(*resumed)


def make_with_frozen(seed: int = 0) -> Any:
    """Makes an engine of stage 0 in fp32. Its optimizer was given the frozen parameters too."""
    torch.manual_seed(seed)
    model: Any = make_model("mlp")
    frozen, trained = list(model.layers[0].parameters()), list(model.layers[2].parameters())
    for parameter in frozen:
        parameter.requires_grad_(False)
    groups = [{"params": [*frozen, trained[0]]}, {"params": [trained[1]], "lr": 2e-2}]
    settings = {"train_micro_batch_size_per_gpu": 4, "optimizer": OPTIMIZERS["torch_adamw"]}
    return deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]


def with_frozen(written: str, stock: str, read: str | None = None) -> dict[str, Any]:
    engine = make_with_frozen(1 if read else 0)
    if read is None:
        train(engine, BEFORE)
        zckpt.write(engine, written)
        engine.save_checkpoint(stock)
    else:
        assert engine.load_checkpoint(read)[0] is not None
    return go_on(engine)


def test_frozen_parameters_in_the_optimizer(cluster: Cluster, tmp_path: Path) -> None:
    path, stock, folder = (str(tmp_path / name) for name in ("run/global_step3", "stock", "converted"))
    through = cluster.run(with_frozen, 1, path, stock)
    zckpt.convert(path, folder, to="deepspeed")
    assert_goes_on_alike(through, cluster.run(with_frozen, 1, path, stock, folder))
    back = zckpt.convert(stock, tmp_path / "back").path
    assert zckpt.open(back).state["engine"]["deepspeed"] == zckpt.open(path).state["engine"]["deepspeed"]


def write_own(path: str, stock: str, stage: int) -> None:
    engine = make_engine(stage=stage, optimizer="torch_adamw")
    train(engine, 1)
    for folder in (stock, path):
        engine.save_checkpoint(folder, client_state={"rank": engine.global_rank})
        zckpt.attach(engine)


def load_own(folder: str, stage: int) -> Any:
    return make_engine(stage=stage, optimizer="torch_adamw").load_checkpoint(folder)[1]["rank"]


@pytest.mark.parametrize(("stage", "told"), [(3, [0, 1]), pytest.param(2, [0, 0], marks=pytest.mark.matrix)])
def test_the_client_state_of_each_rank(cluster: Cluster, tmp_path: Path, stage: int, told: list[int]) -> None:
    cluster.run(write_own, 2, str(tmp_path / "run"), str(tmp_path / "stock"), stage)
    missing = zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed").missing
    assert ("the client_state of ranks other than 0" in missing) == (stage < 3)
    assert cluster.run(load_own, 2, str(tmp_path / "out"), stage) == told
    if stage == 3:
        converted = zckpt.convert(tmp_path / "stock", tmp_path / "converted").path
        for number, source in enumerate([str(tmp_path / "run"), converted]):
            missing = zckpt.convert(source, tmp_path / f"on one {number}", to="deepspeed", world_size=1).missing
            assert "the client_state of ranks other than 0" in missing


def write_run(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Writes a checkpoint like that of a run with ZeRO-3 in bf16, without an engine. Returns its tensors by key."""
    return write_state(
        path, 2, shapes, engine_state=engine_state([*shapes]), client_state={"module": 1, "epoch": 2}
    ).full


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=False)
    assert [str(key) for key in torch.load(path, weights_only=False, mmap=True)] == [str(key) for key in content]
    return content


def test_the_files_are_those_of_torch(tmp_path: Path) -> None:
    full = write_run(tmp_path / "run" / "global_step5", {"a": (3, 5), "b": (7,), "none": (0, 2)})
    converted = zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", stage=1, world_size=3, tag="here")
    assert converted.path == str(tmp_path / "out" / "here")
    assert any("the entries module" in line for line in converted.missing)
    assert (tmp_path / "out" / "latest").read_text() == "here"
    model = load(tmp_path / "out" / "here" / "mp_rank_00_model_states.pt")
    assert model["epoch"] == 2
    for name in ("a", "b", "none"):
        assert torch.equal(model["module"][name], full[f"master/{name}"].bfloat16())
    flat = torch.cat([full[f"exp_avg/{name}"].reshape(-1) for name in ("a", "b", "none")] + [torch.zeros(2)])
    for rank in range(3):
        zero = load(tmp_path / "out" / "here" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        inner = zero["optimizer_state_dict"]["base_optimizer_state"]
        assert torch.equal(inner["state"][0]["exp_avg"], flat[8 * rank : 8 * rank + 8])
        assert inner["param_groups"] == [{"lr": 0.1, "params": [0]}]
        assert len(zero["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]) == (6 if rank == 2 else 8)


def test_memory_is_bounded_by_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "run" / "global_step5"
    write_run(path, {"a": (24 << 20,)})  # 96 MiB in each of three parts
    budget = zckpt.Budget(nbytes=16 << 20)
    small = tmp_path / "small" / "global_step5"
    write_run(small, {"a": (1000,)})
    zckpt.convert(small, tmp_path / "warm", to="deepspeed", budget=budget)
    grown = peak_growth(lambda: zckpt.convert(path, tmp_path / "out", to="deepspeed", stage=2, budget=budget))
    assert grown < budget.nbytes + (8 << 20)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "run" / "global_step5", tmp_path / "not" / "yet"
    write_run(path, {"a": (300, 50)})
    data = next(path.glob("data-*/rank-00001/exp_avg_sq.safetensors"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(FormatError):
        zckpt.convert(path, out, to="deepspeed")
    assert not out.parent.exists()
    data.write_bytes(whole)
    folder = zckpt.convert(path, out, to="deepspeed").path
    with pytest.raises(CheckpointExistsError):
        zckpt.convert(path, out, to="deepspeed")
    before = sorted(out.rglob("*"))
    data.write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(FormatError):
        zckpt.convert(path, out, to="deepspeed", overwrite=True)
    assert sorted(out.rglob("*")) == before
    data.write_bytes(whole)
    assert zckpt.convert(path, out, to="deepspeed", overwrite=True, stage=0).path == folder
    assert [file.name for file in (out / "global_step5").iterdir()] == ["mp_rank_00_model_states.pt"]
    assert sorted(file.name for file in out.iterdir()) == ["global_step5", "latest"]


@pytest.mark.parametrize("name", ["create", "write", "sync", "prepare", "commit"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, name: str) -> None:
    path, out = tmp_path / "run" / "global_step5", tmp_path / "out"
    write_run(path, {"a": (300, 50)})
    fault = Fault(NO_SPACE, names=(name,), path="/out")
    with faulty(fault), pytest.raises(NoSpaceError):
        zckpt.convert(path, out, to="deepspeed")
    assert not out.exists()
    zckpt.convert(path, out, to="deepspeed")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with faulty(fault), pytest.raises(NoSpaceError):
        zckpt.convert(path, out, to="deepspeed", stage=0, overwrite=True)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run" / "global_step5", {"a": (300, 50)})
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 1000)
    with pytest.raises(NoSpaceError, match="1,000 are free"):
        zckpt.convert(tmp_path / "run", tmp_path / "out", to="deepspeed")
    assert not (tmp_path / "out").exists()


@pytest.mark.linux
@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.matrix)])
def test_after_a_killed_conversion_the_next_one_works(tmp_path: Path, every: int) -> None:
    """Each conversion is killed before another one of its operations on the store. Afterwards ``latest`` names a
    complete folder, or does not exist."""
    path, out = tmp_path / "run" / "global_step5", tmp_path / "out"
    write_run(path, {"a": (30, 50), "b": (7,)})
    one_thread = zckpt.Budget(threads=1)  # so that each conversion has the same operations
    with faulty() as operations:
        whole = zckpt.convert(path, tmp_path / "once", to="deepspeed", budget=one_thread).path
    expected = {file.name: file.read_bytes() for file in Path(whole).iterdir()}
    count = len(operations.done)
    assert count > 20
    finished = 0
    for at in sorted({*range(0, count, every), *range(count - 4, count)}):  # the last four are always tried

        def convert(at: int = at) -> None:
            with faulty(Fault(kill, at)):
                zckpt.convert(path, out, to="deepspeed", budget=one_thread)

        result_of(fork(convert))
        if (out / "latest").exists():
            finished += 1
            assert (out / "latest").read_text() == "global_step5"
        zckpt.convert(path, out, to="deepspeed", overwrite=True)
        assert {file.name: file.read_bytes() for file in (out / "global_step5").iterdir()} == expected
        assert not list(out.glob("global_step5.*"))
        shutil.rmtree(out)
    assert finished < 4


def test_a_file_that_somebody_else_has_written_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path, out = tmp_path / "run" / "global_step5", tmp_path / "out"
    write_run(path, {"a": (3,)})

    class Meanwhile:
        def begin(self, action: str, nbytes: int) -> None:
            (out / "global_step5").mkdir()
            (out / "global_step5" / "thesis.txt").write_text("unsaved")

        def advance(self, nbytes: int) -> None: ...

        def end(self) -> None: ...

    with pytest.raises(CheckpointExistsError, match=r"has: thesis\.txt"):
        zckpt.convert(path, out, to="deepspeed", progress=Meanwhile())
    assert [str(entry.relative_to(out)) for entry in sorted(out.rglob("*"))] == [
        "global_step5",
        "global_step5/thesis.txt",
    ]


def test_places_and_sources_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run" / "global_step5"
    write_run(path, {"a": (3,)})
    with pytest.raises(CheckpointExistsError, match="run of zckpt"):
        zckpt.convert(path, tmp_path / "run", to="deepspeed", tag="other", overwrite=True)
    (tmp_path / "else" / "here").mkdir(parents=True)
    (tmp_path / "else" / "here" / "thesis.txt").write_text("unsaved")
    with pytest.raises(CheckpointExistsError, match=r"has: thesis\.txt"):
        zckpt.convert(path, tmp_path / "else", to="deepspeed", tag="here", overwrite=True)
    with pytest.raises(CheckpointExistsError, match="is a checkpoint"):
        zckpt.convert(path, path / "inside", to="deepspeed")
    for tag in ("..", "a/..", "", "latest", "a/b", "/tmp/a", "a\0b"):
        with pytest.raises(ValueError, match="tag"):
            zckpt.convert(path, tmp_path / "out", to="deepspeed", tag=tag)
    refused: tuple[dict[str, Any], ...] = ({"stage": 4}, {"world_size": 0})
    for wrong in refused:
        with pytest.raises(ValueError, match="must be"):
            zckpt.convert(path, tmp_path / "out", to="deepspeed", **wrong)
    write_state(tmp_path / "weights", 2, {"a": (3,)}, parts=["master"])
    with pytest.raises(UnsupportedError, match="training run"):
        zckpt.convert(tmp_path / "weights", tmp_path / "out", to="deepspeed")
    model = torch.nn.Linear(3, 2)
    zckpt.write(zckpt.TrainState(model, torch.optim.AdamW(model.parameters())), tmp_path / "pytorch")
    for to in ("deepspeed", "universal"):
        with pytest.raises(UnsupportedError, match=r"(?s)by PyTorch alone.*restore it into an engine of DeepSpeed"):
            zckpt.convert(tmp_path / "pytorch", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
