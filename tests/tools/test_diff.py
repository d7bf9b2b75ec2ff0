"""zckpt.diff counts what differs between two checkpoints as torch would count it, and reads little."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.faults import Fault, faulty, kill
from tests.support.memory import peak_growth
from tests.support.progress import RecordedProgress
from tests.support.states import write_state
from zckpt.cli import main
from zckpt.ranks import heartbeat

if TYPE_CHECKING:
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
    """Returns copies of the tensors. In seven of them, some elements have other values."""
    torch.manual_seed(seed)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("large", "half", "whole", "complex", "flags", "bytes", "unsigned"):
        flat = copies[name].reshape(-1)
        for place in torch.randperm(flat.numel())[: 1 + flat.numel() // 7].tolist():
            flat[place] = 1 if flat[place] != 1 else 0
    return copies


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    x, y = a.reshape(-1).to(wide), b.reshape(-1).to(wide)
    difference, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = torch.where(larger > 0, difference / larger, 0.0)
    return int((x != y).sum()), float(difference.max()), float(relative.max())


@pytest.mark.parametrize("layouts", [("zero3", "zero3", 3), ("zero3", "random", 3), ("random", "zero3", 2)], ids=str)
def test_different_elements_are_counted(tmp_path: Path, layouts: tuple[str, str, int]) -> None:
    """The layouts of the two checkpoints may be equal, so that their digests are compared first, or different."""
    first, second, world_size = layouts
    tensors_a = values()
    tensors_b = changed(tensors_a)
    write_state(tmp_path / "a", 3, tensors_a, layout=first, parts=("master",))
    write_state(tmp_path / "b", world_size, tensors_b, layout=second, parts=("master",), seed=5)
    diff = zckpt.diff(tmp_path / "a", tmp_path / "b")
    counted = {name: expected(tensors_a[name], tensors_b[name]) for name in tensors_a if tensors_a[name].numel()}
    rows = {row.key.partition("/")[2]: (row.changed, row.max_abs, row.max_rel) for row in diff.tensors}
    assert rows == {name: row for name, row in counted.items() if row[0]}
    assert len(rows) == 7
    assert {row.compared for row in diff.tensors} <= {tensor.numel() for tensor in tensors_a.values()}
    assert (diff.equal, diff.compared, diff.only_in_a, diff.only_in_b) == (False, len(tensors_a), (), ())
    assert diff.state == ()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equal_checkpoints_are_equal_whatever_their_layouts(tmp_path: Path, world_size: int) -> None:
    odd = {"nan": torch.tensor([NAN, 1.0, -NAN, INF, -0.0]), **values()}
    write_state(tmp_path / "a", 3, odd, layout="random", client_state={"x": NAN, "t": torch.ones(3)})
    write_state(tmp_path / "b", world_size, odd, seed=4, client_state={"x": NAN, "t": torch.ones(3)}, block_bytes=8192)
    diff = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert diff.equal, str(diff)
    assert diff.bytes_read > 2 * sum(tensor.nbytes for tensor in odd.values())


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


def numbers(number: float, byte: bytes) -> dict[str, Any]:
    """Returns settings that differ from those of another number and byte only in their values."""
    one = torch.full((1, 1), number, dtype=torch.bfloat16)
    return {"scalar": torch.tensor(number), "one": one, "several": torch.full((2,), number), "raw": byte * 5056}


def test_structure_and_settings(tmp_path: Path) -> None:
    tensors_a, tensors_b = values(), values()
    tensors_b["large"] = tensors_b["large"].T.contiguous()
    tensors_b["half"] = tensors_b["half"].float()
    tensors_a["old"] = tensors_b["new"] = torch.ones(2)
    settings = {"groups": [{"lr": 0.1}, {"lr": 0.2}], "names": ["a"], "there": 1, "count": 1, **numbers(5.0, b"a")}
    others = {"groups": [{"lr": 0.1}, {"lr": 0.3}], "names": ["a", "b"], "count": 1.0, **numbers(6.0, b"b")}
    write_state(tmp_path / "a", 2, tensors_a, parts=("master",), engine_state=settings, aliases={"tied": "one"})
    write_state(tmp_path / "b", 2, tensors_b, parts=("master", "exp_avg"), engine_state=others, step=7)
    diff = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert diff.only_in_a == ("master/old",)
    assert ", 1 more only in a, " in str(diff)
    assert set(diff.only_in_b) == {"master/new", *(f"exp_avg/{name}" for name in tensors_b)}
    rows = {row.key: (row.dtype_a, row.shape_a, row.dtype_b, row.shape_b, row.changed) for row in diff.tensors}
    assert rows == {
        "master/large": ("float32", (70, 601), "float32", (601, 70), 0),
        "master/half": ("bfloat16", (3001,), "float32", (3001,), 0),
    }
    assert {(row.path, row.a, row.b) for row in diff.state} == {
        ("step", "5", "7"),
        ("aliases.tied", "'one'", None),
        ("engine.groups[1].lr", "0.2", "0.3"),
        ("engine.names[1]", None, "'b'"),
        ("engine.there", "1", None),
        ("engine.count", "1", "1.0"),
        ("engine.scalar", "Tensor float32 [] of 5.0", "Tensor float32 [] of 6.0"),
        ("engine.one", "Tensor bfloat16 [1, 1] of 5.0", "Tensor bfloat16 [1, 1] of 6.0"),
        ("engine.several", "Tensor float32 [2]", "other values"),
        ("engine.raw", "5,056 bytes", "other bytes"),
    }
    text = str(diff)
    for line in ("only in a  master/old", "engine.groups[1].lr: 0.2 in a, 0.3 in b", "bfloat16 [3001] in a, float32"):
        assert line in text


def test_keys_and_aliases(tmp_path: Path) -> None:
    w = torch.randn(9)
    write_state(tmp_path / "a", 1, {"embed": w, "x": w}, parts=("master",), aliases={"head": "embed"})
    write_state(tmp_path / "b", 2, {"head": w, "x": w + 1}, parts=("master",), aliases={"embed": "head"}, step=6)
    diff = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert (diff.compared, [row.key for row in diff.tensors]) == (2, ["master/x"])
    assert diff.only_in_a == diff.only_in_b == ()
    for keys in ("master/embed", "master/head", ["master/h*"], lambda key: key != "master/x"):
        diff = zckpt.diff(tmp_path / "a", tmp_path / "b", keys)
        assert (diff.compared, diff.equal) == (1, True), "and no settings"
    with pytest.raises(zckpt.KeyNotFoundError, match="nearest"):
        zckpt.diff(tmp_path / "a", tmp_path / "b", "master/y")


def test_weights_that_only_one_checkpoint_ties_are_compared_under_both_names(tmp_path: Path) -> None:
    embedding = torch.randn(4, 4)
    write_state(tmp_path / "tied", 1, {"embed": embedding}, parts=("param",), aliases={"head": "embed"})
    write_state(tmp_path / "untied", 1, {"embed": embedding, "head": embedding + 1}, parts=("param",))
    for a, b in (("tied", "untied"), ("untied", "tied")):
        diff = zckpt.diff(tmp_path / a, tmp_path / b, "param/*")
        assert [(row.key, row.changed) for row in diff.tensors] == [("param/head", 16)]
        assert diff.compared == 2


def test_buffers_and_trees_of_each_rank(tmp_path: Path) -> None:
    same, mine = torch.ones(6), torch.zeros(6)
    for name, of_ranks in (("a", [same, same, mine]), ("b", [same, mine, mine]), ("c", [same, same, mine])):
        write_state(tmp_path / name, 3, {"w": (4,)}, buffers={"mean": of_ranks})
    write_state(tmp_path / "d", 2, {"w": (4,)}, buffers={"mean": [same, mine]})
    assert zckpt.diff(tmp_path / "a", tmp_path / "c").equal
    diff = zckpt.diff(tmp_path / "a", tmp_path / "b")
    (row,) = diff.tensors
    assert (row.key, row.changed, row.max_abs) == ("buffer/mean", 6, 1.0)
    assert diff.state == ()
    assert zckpt.diff(tmp_path / "a", tmp_path / "d").equal, "another number of ranks: what everybody reads"


def test_only_blocks_that_may_differ_are_read(tmp_path: Path) -> None:
    tensors_a = {"large": torch.randn(3_000_000)}
    tensors_b = {"large": tensors_a["large"].clone()}
    write_state(tmp_path / "a", 2, tensors_a, parts=("master",), block_bytes=1 << 20)
    write_state(tmp_path / "b", 2, tensors_b, parts=("master",), block_bytes=1 << 20)
    assert zckpt.diff(tmp_path / "a", tmp_path / "b").bytes_read < 20_000
    tensors_b["large"][2_000_000] += 1
    write_state(tmp_path / "b", 2, tensors_b, parts=("master",), block_bytes=1 << 20, overwrite=True)
    diff = zckpt.diff(tmp_path / "a", tmp_path / "b")
    assert (diff.tensors[0].changed, diff.tensors[0].compared) == (1, 3_000_000)
    assert 2 << 20 <= diff.bytes_read < (2 << 20) + 20_000, "one block of each"
    write_state(tmp_path / "c", 3, tensors_b, parts=("master",), block_bytes=1 << 20)
    for before, after in (("a", "c"), ("c", "b")):
        nbytes = zckpt.diff(tmp_path / before, tmp_path / after).bytes_read
        assert 24_000_000 < nbytes < 1.5 * 24_000_000, "another layout: each byte about once"


def test_an_error_about_damage_names_the_file(tmp_path: Path) -> None:
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


def test_pieces_that_claim_the_bytes_of_others_are_refused() -> None:
    """Otherwise a small file could have very many bytes compared."""
    broken = Path(__file__).parents[1] / "broken" / "I007-one-place"
    with pytest.raises(zckpt.FormatError, match="I007"):
        zckpt.diff(broken, broken)


def test_progress(tmp_path: Path) -> None:
    for name, world_size in (("a", 2), ("b", 3)):
        write_state(tmp_path / name, world_size, {"w": (900, 70), "b": (70,)})
    progress = RecordedProgress()
    zckpt.diff(tmp_path / "a", tmp_path / "b", progress=progress)
    assert progress.assert_complete("compare") == 2 * sum(info.nbytes for info in zckpt.open(tmp_path / "a").values())


# Several ranks


READS = ("read_portions", "read_direct")


def compare_together(path: str, dies: bool = False) -> tuple[str, int]:
    heartbeat.PERIOD_SECONDS = 0.2
    if dies:
        fault = Fault(kill, names=READS)
        refused = pytest.raises(zckpt.RankError, match="rank 1")
        with faulty(fault if os.environ["RANK"] == "1" else None), refused as caught:
            zckpt.diff(f"{path}/a", f"{path}/b")
        return "", caught.value.rank or 0
    with faulty() as operations:
        diff = zckpt.diff(f"{path}/a", f"{path}/b", budget=zckpt.Budget(8 << 20, 1))
    return diff.to_json(), sum(name in READS for name, _ in operations.done)


def test_ranks_share_the_work_and_each_gets_the_result(cluster: Cluster, tmp_path: Path) -> None:
    tensors_a = {f"{name}{number}": tensor for number in range(9) for name, tensor in values(number).items()}
    tensors_b = {**tensors_a, **changed(values(4), 3)}
    tensors_a["long"], tensors_b["long"] = torch.zeros(3_000_000), torch.zeros(3_000_000)
    tensors_b["long"][::1000] = 1
    write_state(tmp_path / "a", 2, tensors_a, parts=("master",), client_state={"x": 1})
    write_state(tmp_path / "b", 3, tensors_b, parts=("master",), client_state={"x": 2})
    alone = json.loads(zckpt.diff(tmp_path / "a", tmp_path / "b").to_json())
    (first, reads), (second, other_reads) = cluster.run(compare_together, 2, str(tmp_path), init=True)
    assert first == second
    assert {**json.loads(first), "bytes_read": 0} == {**alone, "bytes_read": 0}
    assert min(reads, other_reads) > (reads + other_reads) / 4
    outcome, killed = cluster.outcomes(compare_together, 2, str(tmp_path), dies=True, init=True)
    assert (outcome.value, killed.signal) == (("", 1), signal.SIGKILL), outcome


def diff_on_the_command_line(path: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(["diff", f"{path}/a", f"{path}/b", "--json"]), out.getvalue()


def test_the_command_line(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.randn(20)
    for name, value, world_size in (("a", w, 1), ("b", w + 1, 2), ("c", w, 2)):
        write_state(tmp_path / name, world_size, {"w": value}, parts=("master",))
    first, second = cluster.run(diff_on_the_command_line, 2, str(tmp_path), init=False)
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
    output = json.loads(capsys.readouterr().out)
    assert (output["equal"], output["tensors"][0]["share"], output["tensors"][0]["key"]) == (False, 1.0, "master/w")
    for wrong in ([a, str(tmp_path / "nothing")], [a, b, "master/x"]):
        assert main(["diff", *wrong]) == 2
    for rtol in ("-1", "nan", "x"):
        with pytest.raises(SystemExit) as caught:
            main(["diff", a, b, f"--rtol={rtol}"])
        assert caught.value.code == 2
        assert f"must be a number of 0 or more, got '{rtol}'" in capsys.readouterr().err


def growth(path: str) -> int:
    budget = zckpt.Budget(nbytes=16 << 20, threads=2)
    zckpt.diff(f"{path}/small/a", f"{path}/small/b", budget=budget)
    return peak_growth(lambda: zckpt.diff(f"{path}/a", f"{path}/b", budget=budget))


@pytest.mark.linux
def test_bounded_memory(cluster: Cluster, tmp_path: Path) -> None:
    numel = 30 << 20
    for name, world_size in (("a", 1), ("b", 3)):
        write_state(
            tmp_path / name, world_size, {"a": torch.from_numpy(np.zeros(numel, np.float32))}, parts=("master",),
            block_bytes=1 << 20,
        )  # fmt: skip
        write_state(tmp_path / "small" / name, world_size, {"a": (5,)})
    (grown,) = cluster.run(growth, 1, str(tmp_path), init=False)
    assert grown < 16 + 16 << 20 < 4 * numel
