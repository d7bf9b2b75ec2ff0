"""Two checkpoints compared: what differs is counted as torch counts it, and little is read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import zckpt
from tests.support.faults import Fault, faulty
from tests.support.progress import Told
from tests.support.states import write_state
from zckpt.cli import main
from zckpt.ranks import heartbeat

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

NAN, INF = float("nan"), float("inf")


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "large": torch.randn(70, 601),
        "half": torch.randn(3001).bfloat16(),
        "double": torch.randn(50, dtype=torch.float64),
        "whole": torch.randint(-1000, 1000, (4001,)),
        "unsigned": torch.arange(9).to(torch.uint16),
        "bytes": torch.randn(77).to(torch.float8_e5m2),
        "complex": torch.randn(31, dtype=torch.complex64),
        "flags": torch.arange(20) % 3 == 0,
        "empty": torch.empty(0, 3),
        "one": torch.tensor(1.5),
    }


def changed(tensors: dict[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """A third of them, in some elements each."""
    torch.manual_seed(seed)
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("large", "half", "whole", "complex", "flags", "bytes", "unsigned"):
        flat = found[name].reshape(-1)
        for place in torch.randperm(flat.numel())[: 1 + flat.numel() // 7].tolist():
            flat[place] = 1 if flat[place] != 1 else 0
    return found


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    x, y = a.reshape(-1).to(wide), b.reshape(-1).to(wide)
    difference, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = torch.where(larger > 0, difference / larger, 0.0)
    return int((x != y).sum()), float(difference.max()), float(relative.max())


@pytest.mark.parametrize("layouts", [("zero3", "zero3", 3), ("zero3", "random", 3), ("random", "zero3", 2)], ids=str)
def test_what_differs_is_counted(tmp_path: Path, layouts: tuple[str, str, int]) -> None:
    """Whether both are cut alike, so that digests are compared first, or not."""
    first, second, world_size = layouts
    one = values()
    other = changed(one)
    write_state(tmp_path / "a", 3, one, layout=first, parts=("master",))
    write_state(tmp_path / "b", world_size, other, layout=second, parts=("master",), seed=5)
    found = zckpt.diff(tmp_path / "a", tmp_path / "b")
    counted = {name: expected(one[name], other[name]) for name in one if one[name].numel()}
    told = {row.key.partition("/")[2]: (row.changed, row.max_abs, row.max_rel) for row in found.tensors}
    assert told == {name: row for name, row in counted.items() if row[0]}
    assert len(told) == 7
    assert {row.compared for row in found.tensors} <= {tensor.numel() for tensor in one.values()}
    assert (found.equal, found.compared, found.only_in_a, found.only_in_b) == (False, len(one), (), ())
    assert found.state == ()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equal_ones_are_equal_however_they_are_cut(tmp_path: Path, world_size: int) -> None:
    odd = {"nan": torch.tensor([NAN, 1.0, -NAN, INF, -0.0]), **values()}
    write_state(tmp_path / "a", 3, odd, layout="random", client_state={"x": NAN, "t": torch.ones(3)})
    write_state(tmp_path / "b", world_size, odd, seed=4, client_state={"x": NAN, "t": torch.ones(3)}, block_bytes=8192)
    found = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert found.equal, str(found)
    assert found.bytes_read > 2 * sum(tensor.nbytes for tensor in odd.values())


def test_bits_and_tolerances(tmp_path: Path) -> None:
    a = torch.tensor([NAN, NAN, 0.0, 1.0, 2.0, INF, INF, 100.0])
    b = torch.tensor([NAN, 1.0, -0.0, 1.5, 2.0, INF, -INF, 101.0])
    write_state(tmp_path / "a", 1, {"w": a}, parts=("master",))
    write_state(tmp_path / "b", 2, {"w": b}, parts=("master",))

    def compare(**tolerance: float) -> tuple[int, int, float]:
        (row,) = zckpt.diff(tmp_path / "a", tmp_path / "b", **tolerance).tensors  # type: ignore[arg-type]
        return row.changed, row.nonfinite, row.max_abs

    assert compare() == (5, 2, 1.0), "a NaN equals itself, -0.0 differs from 0.0"
    assert compare(atol=0.6) == (3, 2, 1.0)
    assert compare(rtol=0.01) == (3, 2, 0.5)
    assert compare(atol=1.0) == (2, 2, 0.0), "no tolerance makes NaN and infinities equal to others"
    for name in ("rtol", "atol"):
        for wrong in (-1.0, NAN, INF):
            with pytest.raises(ValueError, match=f"{name} must be"):
                zckpt.diff(tmp_path / "a", tmp_path / "b", **{name: wrong})  # type: ignore[arg-type]


def test_structure_and_settings(tmp_path: Path) -> None:
    one, other = values(), values()
    other["large"] = other["large"].T.contiguous()
    other["half"] = other["half"].float()
    one["old"] = other["new"] = torch.ones(2)
    settings = {"groups": [{"lr": 0.1}, {"lr": 0.2}], "names": ["a"], "there": 1, "count": 1}
    others = {"groups": [{"lr": 0.1}, {"lr": 0.3}], "names": ["a", "b"], "count": 1.0}
    write_state(tmp_path / "a", 2, one, parts=("master",), engine_state=settings, aliases={"tied": "one"})
    write_state(tmp_path / "b", 2, other, parts=("master", "exp_avg"), engine_state=others, step=7)
    found = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert found.only_in_a == ("master/old",)
    assert ", 1 more only in a, " in str(found)
    assert set(found.only_in_b) == {"master/new", *(f"exp_avg/{name}" for name in other)}
    rows = {row.key: (row.dtype_a, row.shape_a, row.dtype_b, row.shape_b, row.changed) for row in found.tensors}
    assert rows == {
        "master/large": ("float32", (70, 601), "float32", (601, 70), 0),
        "master/half": ("bfloat16", (3001,), "float32", (3001,), 0),
    }
    assert {(row.path, row.a, row.b) for row in found.state} == {
        ("step", "5", "7"),
        ("aliases.tied", "'one'", None),
        ("engine.groups[1].lr", "0.2", "0.3"),
        ("engine.names[1]", None, "'b'"),
        ("engine.there", "1", None),
        ("engine.count", "1", "1.0"),
    }
    text = str(found)
    for line in ("only in a  master/old", "engine.groups[1].lr: 0.2 in a, 0.3 in b", "bfloat16 [3001] in a, float32"):
        assert line in text


def test_keys_and_further_names_of_tied_weights(tmp_path: Path) -> None:
    w = torch.randn(9)
    write_state(tmp_path / "a", 1, {"embed": w, "x": w}, parts=("master",), aliases={"head": "embed"})
    write_state(tmp_path / "b", 2, {"head": w, "x": w + 1}, parts=("master",), aliases={"embed": "head"}, step=6)
    found = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert (found.compared, [row.key for row in found.tensors]) == (2, ["master/x"])
    assert found.only_in_a == found.only_in_b == ()
    for keys in ("master/embed", "master/head", ["master/h*"], lambda key: key != "master/x"):
        found = zckpt.diff(tmp_path / "a", tmp_path / "b", keys)
        assert (found.compared, found.equal) == (1, True), "and no settings"
    with pytest.raises(zckpt.KeyNotFoundError, match="nearest"):
        zckpt.diff(tmp_path / "a", tmp_path / "b", "master/y")


def test_what_one_ties_and_the_other_does_not_is_compared_under_both_names(tmp_path: Path) -> None:
    embedding = torch.randn(4, 4)
    write_state(tmp_path / "tied", 1, {"embed": embedding}, parts=("param",), aliases={"head": "embed"})
    write_state(tmp_path / "untied", 1, {"embed": embedding, "head": embedding + 1}, parts=("param",))
    for a, b in (("tied", "untied"), ("untied", "tied")):
        found = zckpt.diff(tmp_path / a, tmp_path / b, "param/*")
        assert [(one.key, one.changed) for one in found.tensors] == [("param/head", 16)]
        assert found.compared == 2


def test_each_rank_s_own_buffers_and_trees(tmp_path: Path) -> None:
    same, mine = torch.ones(6), torch.zeros(6)
    for name, of_ranks in (("a", [same, same, mine]), ("b", [same, mine, mine]), ("c", [same, same, mine])):
        write_state(tmp_path / name, 3, {"w": (4,)}, buffers={"mean": of_ranks})
    write_state(tmp_path / "d", 2, {"w": (4,)}, buffers={"mean": [same, mine]})
    assert zckpt.diff(tmp_path / "a", tmp_path / "c").equal
    found = zckpt.diff(tmp_path / "a", tmp_path / "b")
    (row,) = found.tensors
    assert (row.key, row.changed, row.max_abs) == ("buffer/mean", 6, 1.0)
    assert found.state == ()
    assert zckpt.diff(tmp_path / "a", tmp_path / "d").equal, "another number of ranks: what everybody reads"


def test_only_what_may_differ_is_read(tmp_path: Path) -> None:
    one = {"large": torch.randn(3_000_000)}
    other = {"large": one["large"].clone()}
    write_state(tmp_path / "a", 2, one, parts=("master",), block_bytes=1 << 20)
    write_state(tmp_path / "b", 2, other, parts=("master",), block_bytes=1 << 20)
    assert zckpt.diff(tmp_path / "a", tmp_path / "b").bytes_read < 20_000
    other["large"][2_000_000] += 1
    write_state(tmp_path / "b", 2, other, parts=("master",), block_bytes=1 << 20, overwrite=True)
    found = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert (found.tensors[0].changed, found.tensors[0].compared) == (1, 3_000_000)
    assert 2 << 20 <= found.bytes_read < (2 << 20) + 20_000, "one block of each"
    write_state(tmp_path / "c", 3, other, parts=("master",), block_bytes=1 << 20)
    for pair in (("a", "c"), ("c", "b")):
        nbytes = zckpt.diff(*(tmp_path / name for name in pair)).bytes_read
        assert 24_000_000 < nbytes < 1.5 * 24_000_000, "another layout: each byte about once"


def test_damage_is_an_error_that_says_where(tmp_path: Path) -> None:
    write_state(tmp_path / "a", 2)
    write_state(tmp_path / "b", 3)
    file = sorted((tmp_path / "b").glob("data-*/rank-00001/master.safetensors"))[0]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(zckpt.DigestError, match="D003") as caught:
        zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert caught.value.file == str(file)
    file.unlink()
    with pytest.raises(zckpt.MissingFileError, match="F001"):
        zckpt.diff(tmp_path / "a", tmp_path / "b")
    with pytest.raises(zckpt.CheckpointNotFoundError):
        zckpt.diff(tmp_path / "a", tmp_path / "nothing")


def test_progress(tmp_path: Path) -> None:
    for name, world_size in (("a", 2), ("b", 3)):
        write_state(tmp_path / name, world_size, {"w": (900, 70), "b": (70,)})
    told = Told()
    zckpt.diff(tmp_path / "a", tmp_path / "b", progress=told)
    assert told.assert_complete("compare") == 2 * sum(one.nbytes for one in zckpt.open(tmp_path / "a").values())


# By several


def compare_together(path: str, dies: bool = False) -> tuple[str, int]:
    heartbeat.PERIOD_SECONDS = 0.2
    if dies:
        fault = Fault(lambda operation, file: os.kill(os.getpid(), signal.SIGKILL), names=("read_into", "read_direct"))
        refused = pytest.raises(zckpt.RankError, match="rank 1")
        with faulty(fault if os.environ["RANK"] == "1" else None), refused as caught:
            zckpt.diff(f"{path}/a", f"{path}/b")
        return "", caught.value.rank or 0
    with faulty() as operations:
        found = zckpt.diff(f"{path}/a", f"{path}/b", budget=zckpt.Budget(8 << 20, 1))
    return found.to_json(), sum(name in ("read_into", "read_direct") for name, _ in operations.done)


def test_ranks_share_the_work_and_each_gets_the_result(cluster: Cluster, tmp_path: Path) -> None:
    one = {f"{name}{number}": tensor for number in range(9) for name, tensor in values(number).items()}
    other = {**one, **changed(values(4), 3)}
    one["long"], other["long"] = torch.zeros(3_000_000), torch.zeros(3_000_000)
    other["long"][::1000] = 1
    write_state(tmp_path / "a", 2, one, parts=("master",), client_state={"x": 1})
    write_state(tmp_path / "b", 3, other, parts=("master",), client_state={"x": 2})
    alone = json.loads(zckpt.diff(tmp_path / "a", tmp_path / "b").to_json())
    (first, reads), (second, other_reads) = cluster.run(compare_together, 2, str(tmp_path), init=True)
    assert first == second
    assert {**json.loads(first), "bytes_read": 0} == {**alone, "bytes_read": 0}
    assert min(reads, other_reads) > (reads + other_reads) / 4
    outcome, killed = cluster.outcomes(compare_together, 2, str(tmp_path), dies=True, init=True, grace=30)
    assert (outcome.value, killed.signal) == (("", 1), signal.SIGKILL), outcome


def launched(path: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(["diff", f"{path}/a", f"{path}/b", "--json"]), out.getvalue()


def test_the_command_line(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.randn(20)
    for name, value, world_size in (("a", w, 1), ("b", w + 1, 2), ("c", w, 2)):
        write_state(tmp_path / name, world_size, {"w": value}, parts=("master",))
    first, second = cluster.run(launched, 2, str(tmp_path), init=False)
    assert (first[0], json.loads(first[1])["equal"], second) == (1, False, (1, "")), "rank 0 prints"
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["diff", a, c]) == 0
    assert "1 tensor compared: equal" in capsys.readouterr().out
    assert main(["diff", a, b]) == 1
    assert "master/w: 20 of 20 elements (100.000%), max abs 1, " in capsys.readouterr().out
    assert main(["diff", a, b, "--atol", "1.1"]) == 0
    assert main(["diff", a, b, "master/w", "--json"]) == 1
    capsys.readouterr()
    assert main(["diff", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["tensors"][0]["share"], found["tensors"][0]["key"]) == (False, 1.0, "master/w")
    for wrong in ([a, str(tmp_path / "nothing")], [a, b, "master/x"]):
        assert main(["diff", *wrong]) == 2
    for wrong in ("-1", "nan", "x"):
        with pytest.raises(SystemExit) as caught:
            main(["diff", a, b, f"--rtol={wrong}"])
        assert caught.value.code == 2
        assert f"must be a number of 0 or more, got '{wrong}'" in capsys.readouterr().err


@pytest.mark.linux
def test_bounded_memory(tmp_path: Path) -> None:
    numel = 30 << 20
    for name, world_size in (("a", 1), ("b", 3)):
        write_state(
            tmp_path / name, world_size, {"a": torch.from_numpy(np.zeros(numel, np.float32))}, parts=("master",),
            block_bytes=1 << 20,
        )  # fmt: skip
        write_state(tmp_path / "small" / name, world_size, {"a": (5,)})
    script = """
import sys, zckpt
from tests.support.memory import peak_growth
_, path = sys.argv
budget = zckpt.Budget(nbytes=16 << 20, threads=2)
zckpt.diff(path + "/small/a", path + "/small/b", budget=budget)
print(peak_growth(lambda: zckpt.diff(path + "/a", path + "/b", budget=budget)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=True, text=True, timeout=100
    )
    assert int(ran.stdout) < 16 + 16 << 20 < 4 * numel
