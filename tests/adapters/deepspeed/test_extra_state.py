"""What modules add to their ``state_dict`` by themselves is saved and restored with the engine, or refused by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

import zckpt
from tests.support.extra_state import EXTRA, Model, Scaled, make_engine, train
from tests.support.lora import make_engine as make_adapters
from tests.support.plain_engine import Engine
from tests.support.states import same_all
from zckpt.engines import adapt
from zckpt.engines.away import away
from zckpt.plan.inventory import EXTRA_STATE

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from tests.support.cluster import Cluster


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Returns copies of all that ``state_dict`` of the model has."""
    return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


def write_and_restore(directory: Path, stage: int) -> None:
    engine = make_engine(stage)
    train(engine, 2)
    zckpt.write(engine, directory / "copied", background=True, snapshot="lazy")
    zckpt.wait()
    zckpt.write(engine, directory / "written")
    saved = state_of(engine)
    for name, trained in (("copied", 0), ("written", 3)):
        other = make_engine(stage, seed=3)
        train(other, trained)  # so that its extra state has other shapes, or is not there
        restored = zckpt.restore(other, directory / name)
        assert sorted(set(restored.restored["buffer"]) - {"seen"}) == EXTRA
        assert same_all(state_of(other), saved)
    assert train(other, 2) == train(engine, 2)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.matrix), 2, 3])
def test_a_fresh_engine_gets_the_extra_state_of_every_rank(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    cluster.run(write_and_restore, 2, tmp_path, stage)
    checkpoint = zckpt.open(tmp_path / "written")
    assert zckpt.validate(checkpoint.path).ok
    assert checkpoint.state["engine"][EXTRA_STATE] == EXTRA
    model = Model(size=5.0)
    model.load_state_dict(checkpoint.state_dict())
    assert {name: tensor for name, tensor in model.state_dict().items() if name in EXTRA}.keys() == set(EXTRA)
    assert torch.equal(model.scaled.scale, checkpoint.load("buffer/scaled.scale")["buffer/scaled.scale"])
    copies = {piece.copy for piece in checkpoint["buffer/hooked.factor"].pieces}
    assert copies == {0, 1}, "each rank has its own"


def write_one(path: Path, stage: int) -> dict[str, torch.Tensor]:
    engine = make_engine(stage)
    train(engine, 2)
    zckpt.write(engine, path)
    return state_of(engine)


def restore_one(path: Path, stage: int, saved: dict[str, torch.Tensor], **options: Any) -> None:
    engine = make_engine(stage, seed=3)
    zckpt.restore(engine, path, **options)
    assert same_all({name: state_of(engine)[name] for name in EXTRA}, {name: saved[name] for name in EXTRA})


@pytest.mark.parametrize(("stages", "ranks"), [((2, 3), (2, 1)), ((3, 0), (1, 2))])
def test_another_stage_and_world_size(
    cluster: Cluster, tmp_path: Path, stages: tuple[int, int], ranks: tuple[int, int]
) -> None:
    saved = cluster.run(write_one, ranks[0], tmp_path / "c", stages[0])[0]
    cluster.run(restore_one, ranks[1], tmp_path / "c", stages[1], saved)
    cluster.run(restore_one, ranks[1], tmp_path / "c", stages[1], saved, parts=["buffer", "param"])


class Unsaved(Scaled):
    """Keeps its scale out of its state dict."""

    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


def names_that_do_not_fit(directory: Path) -> None:
    """Extra state is missing or has no place, and nothing is changed."""
    model = Model()
    model.scaled = Unsaved()
    with_it, without = make_engine(2), make_engine(2, model=model)
    zckpt.write(with_it, directory / "with")
    zckpt.write(without, directory / "without")
    before = state_of(with_it)
    with pytest.raises(zckpt.MismatchError, match=r"missing: buffer/scaled\.scale \[48\]"):
        zckpt.restore(with_it, directory / "without")
    with pytest.raises(zckpt.MismatchError, match=r"unexpected: buffer/scaled\.scale"):
        zckpt.restore(without, directory / "with")
    assert same_all(before, state_of(with_it))
    zckpt.write(with_it, directory / "master", parts=["master"])
    with pytest.warns(UserWarning, match=r"kept.*buffer.*scaled\.scale"):
        zckpt.restore(with_it, directory / "master", strict=False, state=["counters"])
    assert same_all(before, state_of(with_it))


def test_a_restore_names_what_does_not_fit(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(names_that_do_not_fit, 1, tmp_path)


class Adding(nn.Linear):
    """A layer that adds one value to its state dict, and takes it back if ``takes`` is set."""

    def __init__(self, value: Any, takes: bool = True, key: str = "value") -> None:
        super().__init__(32, 32)
        self.value, self.key = value, key
        if takes:
            self.register_load_state_dict_pre_hook(self._load)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.value, Exception):
            raise self.value
        destination[prefix + self.key] = self.value

    @staticmethod
    def _load(module: Adding, state_dict: Any, prefix: str, *args: object) -> None:
        module.value = state_dict.pop(prefix + module.key, module.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a dict": ({"value": {"steps": 3}}, "it is of the type dict, and only tensors can be saved"),
    "a sparse tensor": ({"value": torch.eye(2).to_sparse()}, "it is a tensor of layout torch.sparse_coo"),
    "a dtype": ({"value": torch.ones(2, dtype=torch.complex128)}, "it has dtype torch.complex128, which"),
    "not taken back": ({"value": torch.ones(2), "takes": False}, "no module takes it back"),
    "a name": ({"value": torch.ones(2), "key": "a\nb"}, "its name is not allowed: .*N001"),
}  # fmt: skip


def refuse(directory: Path, what: str) -> None:
    options, why = REFUSED[what]
    said = rf"0\.(value|a(\n|\\n)b), which a module adds to its state_dict \({why}"
    engine = make_engine(2, model=nn.Sequential(Adding(**options), Scaled()))
    for call in (
        lambda: zckpt.write(engine, directory / "c"),
        lambda: zckpt.restore(engine, directory / "saved" / "first"),
        lambda: zckpt.export(engine, directory / "out"),
    ):
        with pytest.raises(zckpt.UnsupportedError, match=f"(?s)does not support.*{said}"):
            call()
    assert not (directory / "c").exists()
    assert not (directory / "out").exists()
    zckpt.where(engine)
    # An attached engine saves all that can be saved, because DeepSpeed would have saved the rest as well.
    zckpt.attach(engine)
    train(engine, 1)
    with pytest.warns(UserWarning, match=f"(?s)does not hold {said}"):
        engine.save_checkpoint(directory / "saved", "first")
    scale = engine.module[1].scale
    engine.module[1].scale = scale * 2
    engine.load_checkpoint(directory / "saved")
    assert torch.equal(engine.module[1].scale, scale)
    assert engine.module[0].value is options["value"]


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(cluster: Cluster, tmp_path: Path, what: str) -> None:
    cluster.run(refuse, 1, tmp_path, what)


def fail_in_state_dict(path: Path) -> None:
    engine = make_engine(2, model=nn.Sequential(Adding(NotImplementedError("saving is not implemented"))))
    failure = r"state_dict of the model fails in .*: NotImplementedError: saving is"
    with pytest.raises(zckpt.UnsupportedError, match=failure):
        zckpt.write(engine, path)
    assert not path.exists()


def test_a_state_dict_that_fails_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(fail_in_state_dict, 1, tmp_path / "c")


def restore_what_nothing_takes(path: Path) -> None:
    """A hook of the whole model might take the tensor back, but it does not."""
    engine = make_engine(2, model=nn.Sequential(Adding(torch.ones(2), takes=False)))
    engine.module.register_load_state_dict_pre_hook(lambda *_: None)
    zckpt.write(engine, path)
    with pytest.raises(zckpt.MismatchError, match=r"no module .*0\.value"):
        zckpt.restore(engine, path)
    zckpt.restore(engine, path, parts=["master"])


def test_a_tensor_that_no_module_takes_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(restore_what_nothing_takes, 1, tmp_path / "c")


class Broken(Engine):
    def state(self) -> dict[str, object]:
        return {EXTRA_STATE: ["w", 3]}


@pytest.mark.usefixtures("engines_are_adapters")
def test_a_broken_list_of_extra_state(tmp_path: Path) -> None:
    zckpt.write(Broken(), tmp_path / "c")
    for call in (
        lambda: zckpt.export(tmp_path / "c", tmp_path / "out"),
        lambda: zckpt.open(tmp_path / "c").state_dict(dtype="bf16"),
        lambda: zckpt.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c"),
    ):
        with pytest.raises(zckpt.FormatError, match="state: extra_state"):
            call()
    assert list(zckpt.open(tmp_path / "c").state_dict()) == ["w"]


def rename(module: nn.Module, state_dict: Any, prefix: str, metadata: object) -> None:
    """A hook that gives weights other names, and that saves views of them, as the wrappers of torch do."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}first.")]:
        state_dict[name.replace("first.", "renamed.")] = state_dict.pop(name)
        state_dict[name.replace("first.", "row.")] = state_dict[name.replace("first.", "renamed.")][:1]


def write_renamed(path: Path, stage: int) -> None:
    model = Model()
    model.register_state_dict_post_hook(rename)
    engine = make_engine(stage, model=model)
    train(engine, 1)
    assert any("renamed" in name for name in engine.module.state_dict())
    engine.module.state_dict = lambda **_: pytest.fail("only the class's own function is called")
    zckpt.write(engine, path)
    assert sorted(zckpt.open(path).state["engine"][EXTRA_STATE]) == EXTRA
    other = make_engine(stage, seed=3, model=model)
    zckpt.restore(other, path)


def test_other_names_of_weights_are_no_extra_state(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_renamed, 1, tmp_path / "c", 3)


def quantize_later(directory: Path) -> None:
    """The extra state appears and disappears between two writes of one engine."""
    engine = make_engine(2)
    zckpt.write(engine, directory / "first")
    train(engine, 1)
    zckpt.write(engine, directory / "second")
    engine.module.hooked.factor = None
    zckpt.write(engine, directory / "third")
    extra = [zckpt.open(directory / name).state["engine"][EXTRA_STATE] for name in ("first", "second", "third")]
    without = [name for name in EXTRA if name != "hooked.factor"]
    assert extra == [without, EXTRA, without]
    compiled = make_engine(2, model=nn.Sequential(cast("nn.Module", torch.compile(Model()))))
    train(compiled, 0)
    zckpt.write(compiled, directory / "compiled")
    scale = compiled.module[0].scaled.scale
    compiled.module[0].scaled.scale = scale * 2
    zckpt.restore(compiled, directory / "compiled")
    assert "buffer/0.scaled.scale" in zckpt.open(directory / "compiled")
    assert torch.equal(compiled.module[0].scaled.scale, scale)


def test_each_write_looks_for_extra_state_anew(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(quantize_later, 1, tmp_path)


def write_offloaded(directory: Path) -> None:
    engine = make_engine(3)
    train(engine, 1)
    saved = state_of(engine)
    zckpt.offload(engine, directory / "scratch")
    zckpt.write(engine, directory / "c")
    offloaded = away(engine)
    assert offloaded is not None
    assert {"master", "param"} <= set(offloaded.parts), "the write has brought nothing back"
    other = make_engine(3, seed=3)
    zckpt.restore(other, directory / "c")
    assert same_all(state_of(other), saved)
    zckpt.restore(engine, directory / "c")
    assert same_all(state_of(engine), saved)


@pytest.mark.offload
def test_a_write_of_an_offloaded_engine_brings_nothing_back(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_offloaded, 1, tmp_path)


def export(directory: Path) -> None:
    engine = make_engine(2)
    train(engine, 1)
    zckpt.write(engine, directory / "c")
    zckpt.export(engine, directory / "live.pt", format="pt", dtype="bf16")


def test_an_export_has_the_extra_state_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(export, 1, tmp_path)
    stored = zckpt.open(tmp_path / "c").state_dict()
    zckpt.export(tmp_path / "c", tmp_path / "stored.pt", format="pt", dtype="bf16")
    as_fp32 = zckpt.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c")
    converted = zckpt.open(tmp_path / "c").state_dict(dtype="bf16")
    for loaded in (torch.load(tmp_path / "stored.pt"), torch.load(tmp_path / "live.pt"), as_fp32, converted):
        assert same_all({name: loaded[name] for name in EXTRA}, {name: stored[name] for name in EXTRA})
    assert torch.load(tmp_path / "stored.pt")["seen"].dtype == torch.bfloat16
    assert converted["first.weight"].dtype == torch.bfloat16


def convert(directory: Path, stage: int) -> None:
    engine = make_engine(stage)
    train(engine, 2)
    saved = state_of(engine)
    engine.save_checkpoint(directory / "ds", "tag")
    zckpt.write(engine, directory / "c")
    zckpt.convert(directory / "ds" / "tag", directory / "from")
    zckpt.convert(directory / "c", directory / "to", to="deepspeed")
    for path in (directory / "from", directory / "c"):
        other = make_engine(stage, seed=3)
        zckpt.restore(other, path)
        assert same_all(state_of(other), saved)
    stock = make_engine(stage, seed=3)
    train(stock, 1)  # DeepSpeed refuses extra state that the modules do not have yet
    stock.load_checkpoint(directory / "to")
    assert same_all(state_of(stock), saved)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.matrix), 2, 3])
def test_conversions_keep_the_extra_state(cluster: Cluster, tmp_path: Path, stage: int) -> None:
    cluster.run(convert, 1, tmp_path, stage)


def count_calls(path: Path) -> list[int]:
    """Returns how often a write calls ``state_dict`` of a module, for an engine without extra state and for another
    one."""
    calls = []
    for number, engine in enumerate((make_adapters("plain", stage=3), make_engine(3))):
        called: list[str] = []

        def look(frame: FrameType, event: str, value: object, called: list[str] = called) -> None:
            if event == "call" and frame.f_code is nn.Module.state_dict.__code__:
                called.append(event)

        sys.setprofile(look)
        zckpt.write(engine, path / str(number))
        sys.setprofile(None)
        calls.append(len(called))
    return calls


def test_an_engine_without_extra_state_calls_no_state_dict(cluster: Cluster, tmp_path: Path) -> None:
    ((without, with_it),) = cluster.run(count_calls, 1, tmp_path)
    assert without == 0
    assert with_it == len([*Model().children()]) - 1, "once for each module that adds to it"


def test_the_adapter_reports_the_memory_of_the_extra_state(cluster: Cluster) -> None:
    cluster.run(look_at_memory, 1)


def look_at_memory() -> None:
    engine = make_engine(2)
    train(engine, 1)
    places = {holding.name: holding.data for holding in adapt(engine).memory() if holding.part == "buffer"}
    place = places["scaled.scale"]
    assert isinstance(place, torch.Tensor)
    assert place.data_ptr() == engine.module.scaled.scale.data_ptr()
