"""Levels of validation: what each level reads, what "deep" finds in the values, and how ranks share the work."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import zckpt
from tests.support.memory import peak_growth
from tests.support.states import write_state
from zckpt.checkpoint.open import open_loader
from zckpt.cli import main
from zckpt.tools.validating.check import ValidationShare
from zckpt.tools.validating.report import LEVELS, Observation
from zckpt.tools.validating.values import ValueChecks

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

NAN, INF = float("nan"), float("inf")


def observed(path: Path) -> list[tuple[str, str, int]]:
    report = zckpt.validate(path, level="deep")
    assert report.ok, str(report)
    return [(observation.key, observation.kind, observation.count) for observation in report.observations]


def spoilt(values: dict[int, float], numel: int = 5000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.rand(numel).to(dtype)
    for place, value in values.items():
        tensor[place] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_odd_values_are_counted_by_key(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "good": spoilt({}, dtype=dtype),
        "odd": spoilt({0: NAN, 4999: INF, 2500: -INF, 7: NAN}, dtype=dtype),
        "minus": spoilt({1: -1e-3, 4000: -0.0}, dtype=dtype),
        "whole": torch.arange(-3, 3),
    }
    write_state(tmp_path / "c", 3, tensors, parts=("master", "exp_avg_sq"), layout="random", client_state={"x": NAN})
    expected = [
        ("exp_avg_sq/minus", "negative", 1),
        ("exp_avg_sq/odd", "inf", 2),
        ("exp_avg_sq/odd", "nan", 2),
        ("exp_avg_sq/odd", "negative", 1),
        ("master/odd", "inf", 2),
        ("master/odd", "nan", 2),
    ]
    assert observed(tmp_path / "c") == expected
    report = zckpt.validate(tmp_path / "c", level="deep")
    assert report.counts == {
        "nan": {"exp_avg_sq": 2, "master": 2},
        "inf": {"exp_avg_sq": 2, "master": 2},
        "negative": {"exp_avg_sq": 2},
    }
    assert zckpt.validate(tmp_path / "c").observations == ()


def test_8_bit_values_are_looked_at_too(tmp_path: Path) -> None:
    value = torch.tensor([1.0, NAN, INF], dtype=torch.float32).to(torch.float8_e5m2)
    write_state(tmp_path / "c", 1, {"a": value, "z": torch.tensor([1j * NAN])}, parts=("param",))
    observations = observed(tmp_path / "c")
    assert [observation for observation in observations if observation[0] == "param/a"] == [
        ("param/a", "inf", 1),
        ("param/a", "nan", 1),
    ]
    assert ("param/z", "nan", 2) in observations  # 1j * NaN has two NaNs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_compared_with_their_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights and masters are cut into different pieces."""
    master = {name: torch.randn(300_000) for name in ("same", "other")} | {"alone": torch.randn(3)}
    weights = {name: master[name].to(dtype) for name in ("same", "other")} | {"frozen": torch.randn(3).to(dtype)}
    weights["other"][123_456] += 1
    values = ValueChecks(
        {"same": "BF16", "other": "BF16"} if dtype is torch.bfloat16 else {"same": "F16", "other": "F16"}
    )
    for part, tensors, step in (("master", master, 77_777), ("param", weights, 100_001)):
        for name, tensor in tensors.items():
            for start in reversed(range(0, tensor.numel(), step)):
                data = tensor[start : start + step].clone().view(torch.uint8).numpy()
                name_of = "F32" if part == "master" else {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
                values.look(part, name, name_of, start, data)
    assert values.observations() == (Observation("param/other", "unlike_master", 1),)


def test_weights_in_a_checkpoint_are_compared_with_their_masters(tmp_path: Path) -> None:
    master = {"same": torch.randn(3000, 1001), "other": torch.randn(40, 50), "nan": torch.full((5,), NAN)}
    both = {f"master/{name}": value for name, value in master.items()}
    both |= {f"param/{name}": value.bfloat16() for name, value in master.items()}
    both["param/other"][7, 7] *= 2
    write_parts(tmp_path / "c", both)
    observations = observed(tmp_path / "c")
    assert [observation for observation in observations if observation[1] == "unlike_master"] == [
        ("param/other", "unlike_master", 1)
    ]
    assert ("master/nan", "nan", 5) in observations


def write_parts(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint of one rank with the given tensors, by key."""
    from tests.support.states import fragment
    from zckpt.plan import catalog
    from zckpt.testing.fragments import write_fragments

    fragments = []
    for key, value in tensors.items():
        part, name = key.split("/")
        middle = value.numel() // (3 if part == "master" else 2)
        fragments += [fragment(part, name, value, a, b) for a, b in ((0, middle), (middle, value.numel()))]
    write_fragments(str(path), [fragments], catalog.SaveMetadata(0, 1 << 20, {}, b"\xc0", {}))


def test_each_level_reads_what_it_says(tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, {"a": (900_000,), "b": (7,)})
    data_bytes = 3 * 4 * 900_007
    read = {}
    for level in LEVELS:
        checkpoint_bytes = sum(file.stat().st_size for file in (tmp_path / "c").rglob("*") if file.is_file())
        report = zckpt.validate(tmp_path / "c", level=level)
        assert (report.ok, report.level) == (True, level)
        read[level] = report.bytes_read
    assert read["structure"] < checkpoint_bytes - data_bytes + 4096
    assert data_bytes < read["digests"] < checkpoint_bytes * 1.01, "once"
    assert read["deep"] == read["digests"], "the values are looked at on the way"


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="structure, digests, deep"):
        zckpt.validate(tmp_path, level="data")  # type: ignore[arg-type]


def test_the_json_is_stable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_state(tmp_path / "c", 1, {"a": spoilt({3: NAN}, 10)}, parts=("master",))
    assert main(["validate", "--level", "deep", "--json", str(tmp_path / "c")]) == 0, "values break no rule"
    output = json.loads(capsys.readouterr().out)
    assert list(output) == ["path", "level", "ok", "files", "bytes_read", "findings", "observations", "counts"]
    assert output["observations"] == [{"key": "master/a", "kind": "nan", "count": 1}]
    assert (output["counts"], output["ok"], output["findings"]) == ({"nan": {"master": 1}}, True, [])
    (file,) = (tmp_path / "c").glob("data-*/rank-00000/master.safetensors")
    with file.open("r+b") as out:
        out.seek(4096)
        out.write(b"\1")
    assert main(["validate", "--json", str(tmp_path / "c")]) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["ok"] is False
    (finding,) = output["findings"]
    assert finding == {
        "rule": "D003",
        "message": "the data is damaged",
        "file": str(file.relative_to(tmp_path / "c")),
        "key": "master/a",
        "start": 4096,
        "stop": 4136,
    }


@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (1, 3), (3, 2), (5, 8), (8, 8), (9, 4)])
def test_every_read_is_done_by_one_process(world_size: int, size: int) -> None:
    shares = [ValidationShare(number, size) for number in range(size)]
    assert_every_read_is_done_once(shares, world_size)
    assert max(len(share.units(world_size)) for share in shares) <= -(-2 * world_size // size) + 1


def test_every_read_is_done_by_a_process_that_sees_the_file() -> None:
    """Processes 1 and 3 see the files of ranks 0, 2 and 4, process 0 those of ranks 1 and 3, and process 2 none."""
    seers = [(1, 3), (0,), (1, 3), (0,), (1, 3)]
    shares = [ValidationShare(number, 4, seers) for number in range(4)]
    assert_every_read_is_done_once(shares, 5)
    assert all(share.number in seers[rank] for share in shares for rank, _, _ in share.units(5))
    assert [len(share.units(5)) for share in shares] == [2, 2, 0, 1]


def assert_every_read_is_done_once(shares: list[ValidationShare], world_size: int) -> None:
    reads = range(13)
    done = [(rank, read) for share in shares for rank, k, n in share.units(world_size) for read in reads[k::n]]
    assert sorted(done) == [(rank, read) for rank in range(world_size) for read in reads]


def together(path: str) -> tuple[str, int]:
    checked = zckpt.validate(path, level="deep")
    mine = open_loader(path)
    return checked.to_json(), sum(mine.manifest.files.nbytes)


def test_ranks_share_the_work_and_each_gets_the_report(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_state(path, 1, {"a": spoilt({3: NAN, 4_999_999: NAN}, 5_000_000), "b": (7,)}, parts=("master", "exp_avg_sq"))
    alone = zckpt.validate(path, level="deep").to_json()
    reports = cluster.run(together, 2, str(path), init=True)
    assert reports[0] == reports[1]
    bytes_read = json.loads(alone)["bytes_read"]
    assert bytes_read < json.loads(reports[0][0])["bytes_read"] < bytes_read * 1.01, "headers and index twice"
    same = [{**json.loads(entry), "bytes_read": 0} for entry in (alone, reports[0][0])]
    assert same[0] == same[1]
    (file,) = path.glob("data-*/rank-00000/exp_avg_sq.safetensors")
    raw = bytearray(file.read_bytes())
    raw[4096 + 10_000_000] ^= 1
    raw[-1] ^= 1
    file.write_bytes(raw)
    for report, _ in cluster.run(together, 2, str(path), init=True):
        rules = [(entry["rule"], entry["key"]) for entry in json.loads(report)["findings"]]
        assert rules == [("D003", "exp_avg_sq/a"), ("D003", "exp_avg_sq/b")]
    path = Path(__file__).parents[1] / "broken" / "T001-key"  # The tree that all ranks share is damaged.
    for report, _ in cluster.run(together, 2, str(path), init=True):
        assert [entry["rule"] for entry in json.loads(report)["findings"]] == ["T001"]


def launched(path: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(["validate", "--json", path]), out.getvalue()


def test_a_launcher_s_ranks_validate_together(cluster: Cluster, tmp_path: Path) -> None:
    write_state(tmp_path / "c", 2, {"a": (50, 3)})
    first, second = cluster.run(launched, 2, str(tmp_path / "c"), init=False)
    assert (first[0], json.loads(first[1])["ok"]) == (0, True)
    assert second == (0, ""), "rank 0 prints"


def growth(path: str, small: str) -> int:
    zckpt.validate(small, level="deep")
    budget = zckpt.Budget(nbytes=16 << 20, threads=2)
    return peak_growth(lambda: zckpt.validate(path, level="deep", budget=budget))


@pytest.mark.linux
def test_bounded_memory(cluster: Cluster, tmp_path: Path) -> None:
    """Validation never holds a whole file in memory, however large the file is."""
    numel = 40 << 20
    write_state(tmp_path / "c", 1, {"a": torch.from_numpy(np.zeros(numel, np.float32))}, parts=("master",))
    write_state(tmp_path / "small", 1, {"a": (5,)})
    (grown,) = cluster.run(growth, 1, str(tmp_path / "c"), str(tmp_path / "small"), init=False)
    assert grown < 16 + 32 << 20 < 4 * numel
