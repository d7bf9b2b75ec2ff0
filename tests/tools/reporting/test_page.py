"""The data and the text of the page of zckpt.report. ``test_browser.py`` opens the page in a browser."""

from __future__ import annotations

import base64
import gzip
import importlib.metadata
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.progress import RecordedProgress
from tests.support.states import Written, write_state
from zckpt.checkpoint.open import open_loader
from zckpt.cli import main
from zckpt.tools.reporting.page_data import in_order, layer_of, layers, treemap
from zckpt.tools.reporting.values import look

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

HOSTILE = "</script><img src=x onerror=alert(1)>.weight"
QUOTES = "\"'><svg onload=alert(2)>{{ 7 * 7 }}.0.\u202eweight"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model.layers.12.experts.7.w1", "model.layers.12"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head"),
        ("layers.3", "layers"),
        ("h2o.weight", "h2o"),
        ("weight", "weight"),
    ],
)
def test_the_name_of_a_tensor_says_its_layer(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_layers_are_in_the_order_of_their_numbers() -> None:
    names = ["l.10", "l.2", "head", "l.2", "l.1", "²", "l", "10"]
    assert in_order(names) == ["10", "head", "l", "l.1", "l.2", "l.10", "²"]


def test_the_treemap_has_every_byte_once() -> None:
    sizes = {
        "master/model.layers.0.a": 3, "master/model.layers.0.b": 4, "master/model.layers.1.a": 5, "master/alone": 0,
        "exp_avg/one.two.three": 7, "exp_avg/one.two.three.four": 8, "exp_avg/one.two.": 1, "exp_avg/a..b": 2,
    }  # fmt: skip
    nodes = treemap(sizes.items())
    children: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        assert node.parent < number
        children.setdefault(node.parent, []).append(number)
    assert children[-1] == [0]
    assert (nodes[0].nbytes, nodes[0].tensors) == (sum(sizes.values()), len(sizes))
    for parent, numbers in children.items():
        if parent >= 0:
            assert nodes[parent].nbytes == sum(nodes[number].nbytes for number in numbers)
            assert nodes[parent].tensors == sum(nodes[number].tensors for number in numbers)
    leaves = [node for number, node in enumerate(nodes) if number not in children]
    assert sorted(node.nbytes for node in leaves) == sorted(sizes.values())
    assert "model.layers" in {node.label for node in nodes}, "a module with only one child is joined with it"
    assert [nodes[number].label for number in children[0]] == ["master", "exp_avg"]
    assert treemap([])[0].nbytes == 0
    deep = treemap((f"master/{'a.' * n}b", 1) for n in range(2000))
    assert (deep[0].nbytes, deep[0].tensors) == (2000, 2000)


def test_the_norms_of_layers_are_those_of_all_their_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [{f"l.{n}.{name}": torch.randn(50) for n in range(3) for name in "ab"} for _ in range(2)]
    for number, state in enumerate(states):
        write_state(tmp_path / str(number), 2, state, parts=("master",), step=number)
    checkpoints = [open_loader(tmp_path / str(number)) for number in range(2)]
    table = layers(["master", "exp_avg"], look(checkpoints)[0])
    assert table.names == ("l.0", "l.1", "l.2")
    for n, name in enumerate(table.names):
        joined = [torch.cat([state[f"{name}.a"], state[f"{name}.b"]]).double() for state in states]
        assert table.norms[0][n] == pytest.approx([float(values.norm()) for values in joined])
        assert list(table.updates[0][n]) == [None, pytest.approx(float((joined[1] - joined[0]).norm()))]
        assert table.norms[1][n] == (None, None), "there is no such part"


# The page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    """Returns two checkpoints with hostile names, as keys, as values of settings and as names of files."""
    directory = tmp_path_factory.mktemp("run") / "<img src=x onerror=alert(3)>"
    states: list[dict[str, torch.Tensor]] = [
        {HOSTILE: torch.full((9, 9), 1.0 + n), QUOTES: torch.ones(4), "l.0.w": torch.zeros(5)} for n in range(2)
    ]
    states[1]["<b>new</b>"] = torch.tensor([float("nan"), 1.0])
    return [
        write_state(
            directory / f"global_step{step}", 2, state, step=step, aliases={"<i>tied</i>": HOSTILE},
            client_state={"<u>note</u>": f"</script>{step}"}, parts=("master", "exp_avg"), seed=step,
        )
        for step, state in zip((9, 10), states, strict=True)
    ]  # fmt: skip


class Parsed(HTMLParser):
    """A parsed page: its tags and attributes, its text, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.scripts: dict[str | None, str] = {}
        self._script: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "script":
            self._script.append(dict(attributes).get("id"))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script.pop()

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script[-1]] = data
        else:
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts["packed-data"])))


def page_of(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


def test_names_are_text_and_nothing_else(run: list[Written], tmp_path: Path) -> None:
    zckpt.report([written.path for written in run], tmp_path / "r.html")
    raw = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Parsed(raw)
    assert set(page.tags).isdisjoint({"img", "svg", "iframe", "object", "embed", "u", "i"})
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("script") == 4
    assert "onerror=alert(3)" in page.text, "the path is shown"
    assert "client_state.<u>note</u>" in page.text
    assert "{{ 7 * 7 }}" not in page.scripts[None] + page.text
    names = [row[1] for row in page.data["tensors"]]
    assert {HOSTILE, QUOTES} <= {*names}
    for hostile in ("<img", "onerror=alert(1)", "<svg onload"):
        assert hostile not in raw
    urls = [value for name, value in page.attributes if name in ("src", "href", "action", "data")]
    assert all(value is not None and value.startswith(("#", "data:")) for value in urls), "no network"
    policy = next(value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    assert "default-src 'none'" in policy
    assert re.findall("script-src ([^;]*)", policy) == [re.search("'sha256-[^']*' blob:", policy)[0]]  # type: ignore[index]


def test_the_page_has_the_numbers(run: list[Written], tmp_path: Path) -> None:
    progress = RecordedProgress()
    path = zckpt.report([written.path for written in reversed(run)], tmp_path / "r.html", progress=progress)
    assert path == str(tmp_path / "r.html")
    page = page_of(tmp_path / "r.html")
    data = page.data
    last = zckpt.open(run[1].path)
    assert data["steps"] == [9, 10]
    assert data["rankBytes"].keys() >= {"master", "exp_avg", "state"}
    assert sum(map(sum, data["rankBytes"].values())) == last.nbytes
    assert data["treemap"]["nbytes"][0] == sum(info.nbytes for info in last.values())
    rows = {f"{row[0]}/{row[1]}": row for row in data["tensors"]}
    assert list(rows) == list(last)
    row = rows[f"master/{HOSTILE}"]
    assert row[2:6] == ["float32", [9, 9], 324, ["<i>tied</i>"]]
    assert row[7:14] == [2.0, 2.0, 2.0, 18.0, 0, 0, 0]
    assert row[14:] == [[[1025, 81]], [9.0, 81]]
    assert rows["master/<b>new</b>"][11:] == [1, 0, 0, [[1024, 1]], None]
    assert "2 tensors were added" in page.text
    assert "2 tensors have other values, 4 the same: 162 of 180 elements" in page.text
    assert "no rule is broken" in page.text
    nbytes = sum(info.nbytes for written in run for info in zckpt.open(written.path).values())
    equal = sum(last[f"{part}/{name}"].nbytes for part in ("master", "exp_avg") for name in (QUOTES, "l.0.w"))
    assert ("report", nbytes - equal) in progress.calls, "equal tensors are not read again"


def test_without_statistics_no_tensor_is_read(run: list[Written], tmp_path: Path) -> None:
    damaged = write_state(tmp_path / "c", 2, {"a.w": (3000,)}, parts=("master",), step=11)
    for file in damaged.path.glob("data-*/*/master.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    zckpt.report([run[1].path, damaged.path], tmp_path / "r.html", statistics=False)
    page = page_of(tmp_path / "r.html")
    assert {len(row) for row in page.data["tensors"]} == {7}
    assert page.data["layers"] is None
    assert "no rule is broken" in page.text
    assert "rules are broken" not in page.text
    assert "were not looked at" in page.text
    assert "have other values" not in page.text
    assert "client_state" in page.text


def test_a_damaged_checkpoint_has_a_page_that_says_so(tmp_path: Path) -> None:
    written = write_state(tmp_path / "c", 2, {"a.w": (3000,), "b.w": (3000,)}, parts=("master",))
    (file,) = written.path.glob("data-*/rank-00000/master.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    zckpt.report(written.path, tmp_path / "r.html")
    page = page_of(tmp_path / "r.html")
    assert "D003" in page.text
    assert "not valid" in page.text
    assert sorted(len(row) for row in page.data["tensors"]) == [7, 16]
    (index,) = written.path.glob("data-*/index.bin")
    index.write_bytes(b"\0" * index.stat().st_size)
    zckpt.report(written.path, tmp_path / "r.html", overwrite=True)
    page = page_of(tmp_path / "r.html")
    assert "I002" in page.text
    assert [row[6] for row in page.data["tensors"]] == [None, None]


def test_level_deep_adds_notes_on_odd_values(run: list[Written], tmp_path: Path) -> None:
    zckpt.report(run[1].path, tmp_path / "r.html", level="deep")
    page = page_of(tmp_path / "r.html")
    assert "2 notes about values" in page.text
    assert "master/<b>new</b>: 1 elements are NaN" in page.text
    assert page.data["layers"] is None


def test_arguments_that_cannot_work_are_refused_and_leave_nothing(
    run: list[Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.html"
    out.write_text("mine")
    with pytest.raises(zckpt.CheckpointExistsError, match="a file of another kind"):
        zckpt.report(run[0].path, out)
    assert out.read_text() == "mine"
    with pytest.raises(zckpt.CheckpointExistsError, match="there is a directory"):
        zckpt.report(run[0].path, tmp_path)
    with pytest.raises(zckpt.UnsupportedError, match="no store for the scheme"):
        zckpt.report(run[0].path, "nowhere://bucket/r.html")
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.report([run[0].path, tmp_path / "nothing"], tmp_path / "other.html")
    with pytest.raises(ValueError, match="at least"):
        zckpt.report([], tmp_path / "other.html")
    with pytest.raises(ValueError, match="level"):
        zckpt.report(run[0].path, tmp_path / "other.html", level="all")  # type: ignore[arg-type]

    def none(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("zckpt.tools.reporting.page.distribution", none)
    with pytest.raises(zckpt.UnsupportedError, match=r"(?s)plotly.*pip install 'zckpt\[report\]'"):
        zckpt.report(run[0].path, tmp_path / "other.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html"], "no other file is left"


def test_a_file_that_appears_meanwhile_is_not_replaced(run: list[Written], tmp_path: Path) -> None:
    class Late(RecordedProgress):
        def end(self) -> None:
            (tmp_path / "r.html").write_text("mine")

    with pytest.raises(zckpt.CheckpointExistsError, match="a file of another kind"):
        zckpt.report(run[0].path, tmp_path / "r.html", progress=Late())
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"r.html": "mine"}


def test_the_command_writes_the_page(run: list[Written], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r.html")
    paths = [str(written.path) for written in run]
    assert main(["report", *paths, "-o", out, "--no-statistics"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["report", paths[0], "-o", out]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["report", paths[0], "-o", out, "--overwrite", "--level", "digests"]) == 0
    assert len(page_of(tmp_path / "r.html").data["tensors"][0]) == 16


def report_on_ranks(paths: list[str], out: str) -> str:
    return zckpt.report(paths, out)


def test_ranks_share_the_work(cluster: Cluster, run: list[Written], tmp_path: Path) -> None:
    paths = [str(written.path) for written in run]
    out = str(tmp_path / "ranks.html")
    assert cluster.run(report_on_ranks, 2, paths, out) == [out, out]
    zckpt.report(paths, tmp_path / "alone.html")
    assert page_of(tmp_path / "ranks.html").data == page_of(tmp_path / "alone.html").data
