"""The commands that look at checkpoints: info, ls, show and state."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.states import Written, write_state
from zckpt.cli import main
from zckpt.format import names
from zckpt.reading import statistics
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

WORLD_SIZE = 3
STATE = {
    "epoch": 3,
    "a.b": {7: [1, 2]},
    "tensors": (torch.arange(6).reshape(2, 3), np.zeros(4, np.float32)),
    "odd": [math.nan, math.inf, b"\0\1", 1 << 70, None, True],
    "long": list(range(100)),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    buffers = {"mean": [torch.full((3,), float(rank)) for rank in range(WORLD_SIZE)]}
    path = tmp_path_factory.mktemp("run") / "global_step5"
    return write_state(
        path, WORLD_SIZE, layout="random", buffers=buffers, aliases={"tied": "big"}, client_state=STATE, seed=3
    )


def ran(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What a command prints: on stdout, or on stderr if it fails."""
    capsys.readouterr()
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert (shown.out if status else shown.err) == ""
    return shown.err if status else shown.out


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command says to a script: one line of JSON, as strict parsers understand it."""
    shown = ran(capsys, *arguments, "--json")
    assert shown.count("\n") == 1

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(shown, parse_constant=refuse)


# info


def test_info_of_a_checkpoint(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "info", str(written.path))
    checkpoint = zckpt.open(written.path)
    assert (found["step"], found["world_size"], found["save_id"]) == (5, WORLD_SIZE, written.save_id)
    assert found["writer"] == dict(checkpoint.manifest.writer)
    assert (found["files"], found["nbytes"]) == (len(checkpoint.manifest.files), checkpoint.nbytes)
    assert (found["problem"], found["locked_by"], found["leftovers"]) == (None, None, [])
    assert 0 <= found["age_seconds"] < 600
    parts = {part.pop("name"): part for part in found["parts"]}
    assert tuple(parts) == checkpoint.parts
    for name, part in parts.items():
        infos = [info for info in checkpoint.values() if info.part == name]
        assert part["tensors"] == len(infos)
        assert part["nbytes"] == sum(info.nbytes for info in infos)
        assert part["numel"] == sum(math.prod(info.shape) for info in infos)
        assert part["dtypes"] == ["float32"]
    shown = ran(capsys, "info", str(written.path))
    assert all(one in shown for one in (str(written.path), written.save_id, "exp_avg_sq  ", "by a test"))
    assert all(one in shown for one in ("complete    yes", "locked      no"))


@pytest.mark.parametrize("file", ["*/rank-00001/master.safetensors", "*/rank-00002/digests.bin", "*/index.bin"])
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "cut off"])
def test_info_says_what_is_incomplete(tmp_path: Path, file: str, gone: bool, capsys: Any) -> None:
    written = write_state(tmp_path / "c", WORLD_SIZE)
    (found,) = written.path.glob(file)
    if gone:
        found.unlink()
    else:
        found.write_bytes(found.read_bytes()[:-1])
    problem = told(capsys, "info", str(written.path))["problem"]
    assert found.name in problem
    assert f"complete    no: {problem.splitlines()[0]}" in ran(capsys, "info", str(written.path))


def test_info_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        write_state(tmp_path / f"global_step{step}", 2, {"a": (5,)}, step=step, latest=step == 2)
    (tmp_path / "global_step2" / names.data_dir("0" * 16)).mkdir()
    (tmp_path / "global_step9" / names.data_dir("1" * 16)).mkdir(parents=True)
    (tmp_path / "not one").mkdir()
    lock = WriteLock(open_store(tmp_path / "global_step3"))
    with lock:
        found = told(capsys, "info", str(tmp_path))
        shown = ran(capsys, "info", str(tmp_path))
    assert found["latest"] == "global_step2"
    by_path = {one["path"]: one for one in found["checkpoints"]}
    assert list(by_path) == ["global_step3", "global_step2", "global_step1", "global_step9"], "newest first"
    assert [by_path[f"global_step{step}"]["step"] for step in (1, 2, 3, 9)] == [1, 2, 3, None]
    assert [one["is_latest"] for one in by_path.values()] == [False, True, False, False]
    assert by_path["global_step1"]["nbytes"] == zckpt.open(tmp_path / "global_step1").nbytes
    assert by_path["global_step2"]["leftovers"] == [names.data_dir("0" * 16)]
    assert by_path["global_step9"]["problem"] == "there is no manifest"
    assert f"process {os.getpid()} on " in by_path["global_step3"]["locked_by"]
    assert "locked by process" in shown
    assert "global_step9/data-1111111111111111" in shown
    assert told(capsys, "info", str(tmp_path))["checkpoints"][0]["locked_by"] is None


def test_info_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no checkpoint is here" in ran(capsys, "info", str(tmp_path), status=2)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert "DeepSpeed's own format" in ran(capsys, "info", str(tmp_path), status=2)
    assert "does not exist" in ran(capsys, "ls", str(tmp_path / "nothing"), status=2)


# ls


def test_ls_says_of_each_tensor_what_the_checkpoint_does(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "ls", str(written.path))
    checkpoint = zckpt.open(written.path)
    assert [one["key"] for one in found] == list(checkpoint)
    for one, info in zip(found, checkpoint.values(), strict=True):
        assert (one["dtype"], tuple(one["shape"]), one["nbytes"]) == ("float32", info.shape, info.nbytes)
        assert f"torch.{one['dtype']}" == str(info.dtype)
        assert one["pieces"] == len(info.pieces)
        assert (one["ranks"], one["first_rank"], one["last_rank"]) == (
            len(info.ranks), min(info.ranks), max(info.ranks)
        )  # fmt: skip
        assert set(one["tiers"]) == {piece.tier for piece in info.pieces}
        assert one["other_names"] == (["tied"] if info.name == "big" else [])
    lines = ran(capsys, "ls", str(written.path.parent)).splitlines()
    assert lines[0].split() == ["size", "dtype", "shape", "ranks", "key"]
    assert [line.split()[-1] for line in lines[1:-2]] == list(checkpoint)
    assert lines[-1].startswith(f"{len(checkpoint)} tensors, ")


def test_ls_selects_and_sorts(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written.path)
    assert [one["key"] for one in told(capsys, "ls", path, "master/a.*")] == ["master/a.bias", "master/a.weight"]
    both = told(capsys, "ls", path, "--long", "master/one", "exp_avg/scalar", "--sort=key")
    assert [one["key"] for one in both] == ["exp_avg/scalar", "master/one"]
    sizes = [one["nbytes"] for one in told(capsys, "ls", path, "--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)
    ranks = [one["ranks"] for one in told(capsys, "ls", path, "--sort", "ranks")]
    assert ranks == sorted(ranks, reverse=True)
    assert "master/big = tied" in ran(capsys, "ls", path, "--long", "master/big")
    assert "nearest are: master/big" in ran(capsys, "ls", path, "master/bigg", status=2)


def test_ls_shows_modules_with_their_sums(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ran(capsys, "ls", str(written.path), "master/*", "buffer/*", "--tree").splitlines()
    total = 4 * (63 * 63 + 63)
    assert f"│   ├── a  2 tensors, {total / 1024:.1f} KiB" in lines
    assert "│   │   └── weight  float32 [63, 63], 15.5 KiB" in lines
    assert "└── buffer/mean  float32 [3], 12 bytes" in lines


# show


def test_show_of_one_tensor(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    ((found, *others),) = [told(capsys, "show", str(written.path), "master/big")]
    assert not others
    value = written.full["master/big"].double()
    pieces = zckpt.open(written.path)["master/big"].pieces
    assert [(one["rank"], one["start"], one["stop"], one["file"], one["offset"]) for one in found["pieces"]] == [
        (one.rank, one.start, one.stop, one.file, one.offset) for one in pieces
    ]
    assert (found["min"], found["max"]) == (float(value.min()), float(value.max()))
    assert found["mean"] == pytest.approx(float(value.mean()), rel=1e-9)
    assert found["norm"] == pytest.approx(float(value.norm()), rel=1e-12)
    assert (found["nan"], found["inf"], found["zeros"]) == (0, 0, 0)
    shown = ran(capsys, "show", str(written.path), "master/tied")
    assert f"min       {found['min']:.6g}" in shown
    assert all(one.file in shown for one in pieces)


ODD = [0.0, -0.0, 1.5, -3.0, math.nan, math.inf, -math.inf, math.nan, 0.5, 6.0]


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_show_counts_values_of_every_dtype(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dtype = TORCH_DTYPES[name]
    odd = torch.tensor(ODD if dtype.is_floating_point or dtype.is_complex else [0, 1, 1, 0, 1])
    value = odd.to(torch.float32 if dtype.is_floating_point else odd.dtype).to(dtype)
    write_state(tmp_path / "c", 2, {"a": value.repeat(1000)}, parts=("master",))
    (found,) = told(capsys, "show", str(tmp_path / "c"), "master/*")
    plain = torch.view_as_real(value) if dtype.is_complex else value
    plain = plain.double()
    finite = plain[plain.isfinite()]
    assert found["nan"] == 1000 * int(plain.isnan().sum())
    assert found["inf"] == 1000 * int(plain.isinf().sum())
    assert found["zeros"] == 1000 * int((finite == 0).sum())
    assert (found["min"], found["max"]) == (float(finite.min()), float(finite.max()))
    assert found["mean"] == pytest.approx(float(finite.mean()), rel=1e-12)
    assert found["norm"] == pytest.approx(float(finite.norm()) * math.sqrt(1000), rel=1e-12)


def test_show_of_several_tensors_and_of_nothing_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        "nan": torch.full((3,), math.nan),
        "empty": torch.empty(0, 3),
        "huge": torch.full((2,), 1e300, dtype=torch.float64),
    }
    write_state(tmp_path / "c", 2, tensors, parts=("master",))
    found = {one["key"]: one for one in told(capsys, "show", str(tmp_path / "c"), "master/*")}
    assert [found[f"master/{name}"]["mean"] for name in ("nan", "empty", "huge")] == [None, None, 1e300]
    assert found["master/huge"]["norm"] is None
    assert found["master/nan"]["nan"] == 3
    heading, *lines = ran(capsys, "show", str(tmp_path / "c"), "master/*").splitlines()
    assert heading.split() == ["min", "max", "mean", "norm", "NaN", "infinite", "zeros", "key"]
    assert {line.split()[-1] for line in lines} == found.keys()


@pytest.mark.parametrize("layout", ["zero3", "random"])
def test_show_reads_every_byte_once_and_holds_little(tmp_path: Path, layout: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(statistics, "STRETCH_BYTES", 3 * 4096)
    written = write_state(tmp_path / "c", WORLD_SIZE, layout=layout)
    checkpoint = zckpt.open(written.path)
    infos = list(checkpoint.values())
    found = list(statistics.stretches(checkpoint, infos))
    covered = {number: [one[1:] for one in found if one.number == number] for number in range(len(infos))}
    for number, info in enumerate(infos):
        bounds = [0, *(stop for _, stop in covered[number])]
        assert [start for start, _ in covered[number]] == bounds[:-1]
        assert bounds[-1] == math.prod(info.shape)
    assert max(one.stop - one.start for one in found) * 4 <= 3 * 4096
    assert len(found) > len(infos)
    seen: list[int] = []
    statistics.statistics(checkpoint, infos, found, seen.append)
    assert checkpoint.io.data_bytes == sum(seen) == sum(info.nbytes for info in infos)


def shown(path: str, *arguments: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        return main(["show", path, *arguments]), out.getvalue(), err.getvalue()


def test_a_launcher_s_ranks_look_together(cluster: Cluster, written: Written, capsys: Any, monkeypatch: Any) -> None:
    alone = told(capsys, "show", str(written.path), "*/*")
    first, second = cluster.run(shown, 2, str(written.path), "*/*", "--json", init=False)
    assert second == (0, "", ""), "rank 0 prints"
    together = json.loads(first[1])
    assert [one["key"] for one in together] == [one["key"] for one in alone]
    for one, other in zip(alone, together, strict=True):
        for number in ("min", "max", "nan", "inf", "zeros", "pieces"):
            assert one[number] == other[number]
        assert one["norm"] == pytest.approx(other["norm"])
    for status, out, err in cluster.run(shown, 2, str(written.path), "no/such key", init=False):
        assert (status, out) == (2, "")
        assert "no key matches 'no/such key'" in err


# state


def test_state_is_what_was_written(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "state", str(written.path), "client_state")
    assert found == {
        "epoch": 3,
        "a.b": {"7": [1, 2]},
        "tensors": [{"dtype": "int64", "shape": [2, 3]}, {"dtype": "float32", "shape": [4]}],
        "odd": ["nan", "inf", {"base64": "AAE="}, 1 << 70, None, True],
        "long": list(range(100)),
    }
    assert told(capsys, "state", str(written.path)) == {"engine": None, "client_state": found}
    lines = ran(capsys, "state", str(written.path)).splitlines()
    for line in (
        "├── engine: None",
        "    ├── epoch: 3",
        "    ├── tensors: (int64 [2, 3], float32 [4])",
        "    ├── odd: [nan, inf, 2 bytes, 1180591620717411303424, None, True]",
        "        └── [99]: 99",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("client_state.epoch", 3),
        ("client_state['a.b'][7][1]", 2),
        ("client_state.long[-1]", 99),
        ("client_state.tensors[0]", {"dtype": "int64", "shape": [2, 3]}),
    ],
)
def test_state_at_a_path(written: Written, where: str, expected: Any, capsys: Any) -> None:
    assert told(capsys, "state", str(written.path), where) == expected


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("client", "it has 'engine', 'client_state'"),
        ("client_state.long[100]", "it has 100 elements"),
        ("client_state.epoch.x", "it is a single value"),
        ("client_state.tensors[0][0]", "it is a single value"),
        ("client_state[", "'[' is not a step of a path"),
    ],
)
def test_state_where_nothing_is(written: Written, where: str, said: str, capsys: Any) -> None:
    assert said in ran(capsys, "state", str(written.path), where, status=2)


def test_state_of_a_rank(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(WORLD_SIZE):
        assert told(capsys, "state", str(written.path), "--rank", str(rank)) == {"rank": rank}
    assert "there is no state of rank 3" in ran(capsys, "state", str(written.path), "--rank", "3", status=2)


def test_the_state_of_a_rank_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_state(tmp_path / "c", 2)
    (file,) = written.path.glob("*/rank-00001/*state.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert "the data is damaged (rule D003" in ran(capsys, "state", str(written.path), "--rank", "1", status=2)


# What it costs


def test_nothing_imports_torch(written: Written) -> None:
    code = """
import sys
from zckpt.cli import main
path = sys.argv[1]
for words in ("info", "info --json", "ls --long", "ls --tree", "ls --json", "state", "state --json", "state --rank 1"):
    assert main([*words.split(), path]) == 0
    assert "torch" not in sys.modules, words
"""
    subprocess.run([sys.executable, "-c", code, str(written.path)], check=True, stdout=subprocess.DEVNULL)


# texts of others


def test_what_a_terminal_would_obey_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "line\nbreak \x1b[31m \x9b \u202e"
    state = {odd: odd, "inner": {odd: {odd: [1]}}}
    path = write_state(tmp_path / odd / "c", 1, {"a": (2,)}, client_state=state).path
    for arguments in (["state", path], ["state", path, "client_state.x"], ["info", path], ["info", tmp_path / odd]):
        main([*map(str, arguments)])
        shown = "".join(capsys.readouterr())
        assert "line\\nbreak \\x1b[31m \\x9b \\u202e" in shown
        assert all(line.isprintable() for line in shown.split("\n"))
