"""A write refuses values, names and arguments that a checkpoint cannot hold before a byte is written. It also refuses a
place where the checkpoint would hide others."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.coded import Coded
from tests.support.plain_engine import Engine, everything
from tests.support.states import fragment
from zckpt.checkpoint.write import write_engine
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.errors import CheckpointExistsError, FormatError, StateError
from zckpt.geometry import Grid, Span
from zckpt.plan.inventory import Fragment
from zckpt.storage.lock import WriteLock
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("engines_are_adapters")


# What a write contains


@pytest.mark.parametrize(("part", "name", "rule"), [("../up", "w", "N003"), ("master", "w@0:2", "N002")])
def test_a_name_that_the_format_cannot_hold_stops_the_write(tmp_path: Path, part: str, name: str, rule: str) -> None:
    engine = Engine()
    odd = fragment(part, name, engine.weight, 0, len(engine.weight))
    with (
        mock.patch.object(engine, "fragments", return_value=[odd]),
        mock.patch.object(WriteLock, "acquire", side_effect=AssertionError("a byte was written")),
        pytest.raises(FormatError) as caught,
    ):
        zckpt.write(engine, tmp_path / "run" / "c")
    assert caught.value.rule == rule
    assert everything(tmp_path) == {}


def test_tensors_with_missing_elements_are_not_written(tmp_path: Path) -> None:
    engine = Engine()
    half = fragment("master", "w", engine.weight, 0, 7)
    with (
        mock.patch.object(engine, "fragments", return_value=[half]),
        mock.patch.object(WriteLock, "acquire", side_effect=AssertionError("a byte was written")),
        pytest.raises(FormatError) as caught,
    ):
        zckpt.write(engine, tmp_path / "c")
    assert caught.value.rule == "I005"
    assert everything(tmp_path) == {}


def without_memory() -> torch.Tensor:
    """Returns a view of a tensor whose memory has been freed. The address of the view is not 0."""
    tensor = torch.ones(8)
    view = tensor[2:5]
    tensor.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize(
    ("nothing", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "is on the device meta"),
        (without_memory, r"needs 20 bytes .*has 0"),
        (lambda: Coded(torch.zeros(3, dtype=torch.int8), torch.ones(1)), "is of the class Coded"),
    ],
    ids=["meta", "freed", "subclass"],
)
def test_tensors_without_values_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing: Callable[[], torch.Tensor], why: str
) -> None:
    for attribute, value, where in (
        ("weight", None, "master/w"),
        ("state", lambda: {"optimizer": {"d": nothing()}}, "optimizer.d"),
        ("rank_state", lambda: {"seen": nothing()}, r"rank_state\[0\].seen"),
    ):
        engine = Engine()
        setattr(engine, attribute, value)
        if attribute == "weight":
            fragments = [Fragment("master", "w", "F32", Span(Grid((3,)), 0, 3), data=nothing())]
            monkeypatch.setattr(engine, "fragments", lambda fragments=fragments: fragments)
        with pytest.raises(StateError, match=f"^{where} {why}"):
            zckpt.write(engine, tmp_path / "c")
        with pytest.raises(StateError, match=f"^client_state.x {why}"):
            zckpt.write(Engine(), tmp_path / "c", client_state={"x": nothing()})
        assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (torch.ones(7), r"elements 0 to 8 .*shape \[7\]"),
        (torch.ones(1).expand(8), r"shape \[8\] .*strides \[0\]"),
        (torch._neg_view(torch.ones(8)), "negated view"),
        (torch.ones(8, dtype=torch.complex64).conj(), "conjugated or negated view"),
    ],
    ids=["short", "expanded", "negated", "conjugated"],
)
def test_a_fragment_has_its_elements_as_they_are(tmp_path: Path, data: torch.Tensor, said: str) -> None:
    engine = Engine()
    wrong = Fragment("master", "w", DTYPE_NAMES[data.dtype], Span(Grid((8,)), 0, 8), data=data)
    with mock.patch.object(engine, "fragments", return_value=[wrong]), pytest.raises(StateError, match=said):
        zckpt.write(engine, tmp_path / "c")
    assert everything(tmp_path) == {}


class Number(Enum):
    ONE = 1
    NONE = None


class Level(IntEnum):
    HIGH = 3


class Colour(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    a: int
    b: float


class AttributeDict(dict[str, Any]):
    """A dict as that of many frameworks for hyperparameters."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class Settings:
    lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    mode: Number = Number.ONE
    made_later: int = field(init=False)


class Odd(Mapping[str, Any]):
    """A map that cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 1


ITSELF = SimpleNamespace(items=[])
ITSELF.items += [ITSELF, ITSELF]
NESTED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("client_state", "where"),
    [
        ({"sampler": [{"fn": len}]}, "client_state.sampler[0].fn"),
        ({"seen": {print}}, "client_state.seen[0]: builtin_function_or_method"),
        ({"root": 1j}, "client_state.root: complex"),
        ({"number": np.longdouble(1)}, "client_state.number: longdouble"),
        ({"sparse": torch.eye(2).to_sparse()}, "client_state.sparse is a tensor of layout torch.sparse_coo"),
        ({"nested": NESTED}, "client_state.nested is a tensor of layout nested"),
        ({"words": [torch.zeros(1), "a", object()]}, "client_state.words[2]: object"),
        ({"maps": {print: 1}}, "client_state.maps has the key <built-in function print>"),
        ({"maps": {(0, print): 1}}, "client_state.maps has the key (0, <built-in function print>)"),
        ({"twice": {(0, 1): 1, "(0, 1)": 2}}, "client_state.twice has the key (0, 1)"),
        ({"twice": {1: 1, Number.ONE: 2}}, "client_state.twice has the key <Number.ONE: 1>"),
        ({"kind": torch.nn.ReLU}, "client_state.kind: type"),
        ({"args": Namespace(fn=partial(int))}, "client_state.args.fn: partial"),
        ({"odd": Odd()}, "client_state.odd: Odd cannot be kept: RuntimeError('no')"),
        ({"itself": ITSELF}, "client_state.itself.items[0] is a value that contains itself"),
        ({"mask": np.ma.masked_array([1.0, 2.0], [False, True])}, "client_state.mask: MaskedArray"),
        ({"long": np.zeros(2, np.longdouble)}, "client_state.long: ndarray"),
        ({"meta": torch.empty(2, device="meta")}, "client_state.meta is on the device meta"),
    ],
)
def test_client_state_that_cannot_be_kept_stops_the_write(
    tmp_path: Path, client_state: dict[Any, Any], where: str
) -> None:
    with pytest.raises(StateError) as caught:
        zckpt.write(Engine(), tmp_path / "run" / "c", client_state=client_state)
    assert str(caught.value).startswith(where)
    assert everything(tmp_path) == {}


QUIET: dict[str, tuple[Any, Any]] = {
    "numpy": ([np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("a")], [float(np.float32(0.1)), -3, True, "a"]),
    "size": (torch.Size([2, 3]), (2, 3)),
    "default": (defaultdict(list, {"k": [np.int8(1)]}), {"k": [1]}),
    "pair": (Pair(1, np.float64(2)), (1, 2.0)),
    "enum": ([Level.HIGH, Colour.RED], [3, "red"]),
    "bytes": (bytearray(b"x"), b"x"),
    "keys": ({np.int64(1): 1, np.str_("a"): 2, Level.HIGH: 3}, {1: 1, "a": 2, 3: 3}),
    "subclass": (AttributeDict(a=AttributeDict(b=1)), {"a": {"b": 1}}),
    "proxy": (MappingProxyType({"a": 1}), {"a": 1}),
    "path": (PurePosixPath("/data/x"), "/data/x"),
    "time": (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
    "date": (date(2026, 1, 2), "2026-01-02"),
    "set": ({"b", "a"}, ["a", "b"]),
    "frozen": (frozenset({2, (1,)}), [2, (1,)]),
}  # fmt: skip
"""For values that come back in a plain form without a warning: what is given, and what comes back."""
TOLD: dict[str, tuple[Any, Any, str]] = {
    "delta": (timedelta(hours=1, microseconds=1), 3600.000001, "timedelta) as float"),
    "namespace": (Namespace(lr=np.float64(1), inner=SimpleNamespace(a=[1])), {"lr": 1.0, "inner": {"a": [1]}},
                  "Namespace) as dict"),
    "enum": (Number.ONE, 1, "Number) as int"),
    "nothing": (Number.NONE, None, "Number) as NoneType"),
    "dataclass": (Settings(), {"lr": 1.0, "betas": (0.9, 0.99), "mode": 1}, "Settings) as dict"),
    "dtype": (torch.bfloat16, "torch.bfloat16", "dtype) as str"),
    "device": (torch.device("cuda", 1), "cuda:1", "device) as str"),
    "decimal": (Decimal("1.50"), "1.50", "Decimal) as str"),
    "deque": (deque([1, Number.ONE]), [1, 1], "deque) as list"),
    "texts": (np.array([["a"], ["b"]]), [["a"], ["b"]], "ndarray) as list"),
    "objects": (np.array([1, "a"], dtype=object), [1, "a"], "ndarray) as list"),
    "tuple key": ({(0, "a"): 1}, {"(0, 'a')": 1}, "the key (0, 'a') of client_state['tuple key'] as \"(0, 'a')\""),
    "float key": ({0.5: 1}, {"0.5": 1}, "the key 0.5 of client_state['float key'] as '0.5'"),
    "other keys": ({None: 1, True: 2, Path("a"): 3}, {"None": 1, "True": 2, "a": 3}, "the key None of"),
}  # fmt: skip
"""For values that come back in another form: what is given, what comes back, and what the warning says."""


def kept(path: Path, client_state: Mapping[str, Any]) -> dict[str, Any]:
    zckpt.write(Engine(), path, client_state=client_state, overwrite=True)
    state: dict[str, Any] = zckpt.open(path).state["client_state"]
    return state


def same(a: object, b: object) -> bool:
    """Returns whether two values are equal and have the same types, with all that is in them."""
    return repr(a) == repr(b)


def test_client_state_is_converted_to_plain_values(tmp_path: Path) -> None:
    actual = kept(tmp_path / "c", {key: given for key, (given, _) in QUIET.items()})
    for key, (_, expected) in QUIET.items():
        assert same(actual[key], expected), key


def test_client_state_is_converted_to_plain_values_with_one_warning(tmp_path: Path) -> None:
    for key, (given, expected, said) in TOLD.items():
        with pytest.warns(UserWarning, match="plain form") as warned:
            actual = kept(tmp_path / "c", {key: given, "list": [1]})
        assert same(actual[key], expected), key
        assert said in str(warned[0].message)
        assert len(warned) == 1
        assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=r"client_state.delta .*float, .* and [0-9]+ more$") as warned:
        kept(tmp_path / "c", {key: given for key, (given, *_) in TOLD.items()})
    assert len(warned) == 1


def test_values_of_an_engine_come_back_unchanged(tmp_path: Path) -> None:
    for value in ({1}, Path("x"), Level.HIGH, Namespace(), {(0, 1): 2}, {0.5: 1}, AttributeDict()):
        engine = Engine()
        with mock.patch.object(engine, "state", lambda value=value: {"seen": value}), pytest.raises(zckpt.StateError):
            zckpt.write(engine, tmp_path / "d")
    assert everything(tmp_path) == {}
    engine = Engine()
    numbers = {"a": np.float64(0.1), "b": [np.int32(1)], np.int64(2): np.bool_(True)}
    with mock.patch.object(engine, "state", return_value={"seen": numbers}):
        zckpt.write(engine, tmp_path / "d")
    assert same(zckpt.open(tmp_path / "d").state["engine"]["seen"], {"a": 0.1, "b": [1], 2: True})


def test_a_configuration_of_omegaconf_is_kept_as_it_was_written(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    written = {"a": [1, {"b": "${c}"}], "c": "???", "d": None}
    actual = kept(tmp_path / "c", {"hparams": omegaconf.OmegaConf.create(written)})
    assert same(actual["hparams"], written)
    assert omegaconf.OmegaConf.create(actual["hparams"]) == omegaconf.OmegaConf.create(written)


def test_an_unknown_part_to_leave_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no part moments.*master, exp_avg"):
        zckpt.write(Engine(), tmp_path / "c", exclude=["moments"])
    with pytest.raises(ValueError, match="'refuse' or 'drop'"):
        zckpt.write(Engine(), tmp_path / "c", pending_gradients="keep")  # type: ignore[call-overload]
    assert everything(tmp_path) == {}
    zckpt.write(Engine(), tmp_path / "c", exclude=["exp_avg"])
    assert zckpt.open(tmp_path).parts == ("master",)


def test_one_part_may_be_given_as_a_string(tmp_path: Path) -> None:
    zckpt.write(Engine(), tmp_path / "c", exclude="exp_avg")
    assert zckpt.open(tmp_path / "c").parts == ("master",)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, r"client_state must .*list", {"client_state": [1]}),
        (ValueError, "pass background=True", {"snapshot": "lazy"}),
        (ValueError, "pass background=True", {"snapshot_bytes": 1 << 20}),
        (ValueError, "snapshot_bytes must", {"snapshot_bytes": "1GB", "background": True}),
        (ValueError, "snapshot_bytes must", {"snapshot_bytes": -1, "background": True}),
        (TypeError, "budget must", {"budget": 5}),
        (TypeError, "progress must", {"progress": True, "background": True}),
        (ValueError, r"no part m; .*master", {"exclude": "m"}),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        zckpt.write(Engine(), tmp_path / "c", **options)
    assert everything(tmp_path) == {}


# Where a write puts the checkpoint


TAGS = ["../x", "", ".", "/abs/x", "a\nb", "n" * 300, "\udcff", "latest", "latest/x"]


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_that_latest_cannot_name_is_refused(tmp_path: Path, tag: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"(?s)`latest`.*save_latest=False") as caught:
        write_engine(Engine(), os.path.join(run, tag), WriteOptions(run=run))
    assert type(caught.value) is ValueError, "and not that the checkpoint is damaged"
    assert everything(tmp_path) == {}
    if tag == "a\nb":
        write_engine(Engine(), os.path.join(run, tag), WriteOptions(run=run, latest=False))


@pytest.mark.parametrize("name", ["manifest.msgpack", "write.lock", f"data-{0:016x}", f"manifest.msgpack.{0:08x}.tmp"])
@pytest.mark.parametrize("tag", ["{}", "{}/x", "x/{}"])
def test_a_tag_by_which_a_run_would_look_like_a_checkpoint_is_refused(tmp_path: Path, tag: str, name: str) -> None:
    run = tmp_path / "run"
    for latest in (True, False):
        with pytest.raises(ValueError, match=f"no checkpoint may be in a directory called '{name}'"):
            write_engine(Engine(), run / tag.format(name), WriteOptions(run=run, latest=latest))
    assert everything(tmp_path) == {}
    zckpt.write(Engine(), run / "c")
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=f"no checkpoint may be in a directory called '{name}'"):
        zckpt.cp(run / "c", run / name)
    assert everything(tmp_path) == before


def test_a_directory_named_latest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointExistsError, match=f"directory .*`latest`.*{tmp_path}/latest"):
        zckpt.write(Engine(), tmp_path / "c")
    assert everything(tmp_path) == {"latest": None}
    (tmp_path / "latest").rmdir()
    (tmp_path / "latest").symlink_to("c")  # some people make such a link, which can be replaced
    zckpt.write(Engine(), tmp_path / "c")
    assert (tmp_path / "latest").read_text() == "c\n"


@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("name", ["c", "epoch0/c", "checkpoint-5/c"])
def test_no_checkpoint_hides_others(tmp_path: Path, name: str, latest: bool) -> None:
    """If a directory has a manifest, opening the directory opens that checkpoint, whatever the ``latest`` beside it
    names."""
    run, other = tmp_path / "run", tmp_path / "other"
    write_engine(Engine(step=1), run / name, WriteOptions(run=run, latest=latest))
    before = everything(tmp_path)
    hidden = "the file `latest`" if latest else name
    if latest or name != "epoch0/c":  # without `latest`, nobody would find epoch0/c from there
        for overwrite in (False, True):
            with pytest.raises(
                CheckpointExistsError, match=f"directory of a run, with {hidden}:.*\n.*run/global_step<N>"
            ):
                zckpt.write(Engine(step=2), run, overwrite=overwrite, latest=latest)
    assert everything(tmp_path) == before

    other.mkdir()
    (other / "notes").mkdir()
    (other / "config.json").write_text("{}")
    zckpt.write(Engine(step=3), other, latest=latest)
    zckpt.write(Engine(step=4), other, latest=latest, overwrite=True)
    before = everything(tmp_path)
    with pytest.raises(CheckpointExistsError, match=f"{other} is a checkpoint.*\n.*{other}/global_step<N>"):
        write_engine(Engine(step=5), other / name, WriteOptions(run=other, latest=latest))
    assert everything(tmp_path) == before
    assert zckpt.open(other).step == 4


def test_a_checkpoint_far_above_that_would_hide_the_new_one_is_found(tmp_path: Path) -> None:
    zckpt.write(Engine(step=3), tmp_path / "c", latest=False)
    before = everything(tmp_path)
    with pytest.raises(CheckpointExistsError, match=f"{tmp_path / 'c'} is a checkpoint"):
        zckpt.write(Engine(step=4), tmp_path / "c" / "run" / "step4")
    assert everything(tmp_path) == before


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path is empty"):
        zckpt.write(Engine(), "")
    assert everything(tmp_path) == {}


def test_latest_is_left_alone_if_asked(tmp_path: Path) -> None:
    zckpt.write(Engine(step=1), tmp_path / "first")
    zckpt.write(Engine(step=2), tmp_path / "second", latest=False)
    assert zckpt.open(tmp_path).step == 1


def test_without_a_path_the_step_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert zckpt.write(Engine(step=7)) == str(tmp_path / "checkpoints" / "global_step7")
    assert zckpt.open("checkpoints").step == 7


def test_latest_may_be_in_a_directory_above(tmp_path: Path) -> None:
    write_engine(Engine(), tmp_path / "epoch0" / "step1", WriteOptions(run=tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["epoch0", "latest"]
    assert (tmp_path / "latest").read_text() == "epoch0/step1\n"
    with pytest.raises(ValueError, match="latest"):
        write_engine(Engine(), tmp_path / "other" / "c", WriteOptions(run=tmp_path / "run"))
