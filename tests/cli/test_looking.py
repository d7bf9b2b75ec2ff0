"""The commands that look at checkpoints: info, ls, show and state."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.litter import litter, write_steps
from tests.support.states import Written, write_state
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading.checkpoint import loader_of
from zckpt.cli import main
from zckpt.format import names
from zckpt.storage.lock import WriteLock
from zckpt.storage.schemes import open_store
from zckpt.tools import statistics
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


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Runs a command and returns its output on stdout, or on stderr if its exit status is not 0."""
    capsys.readouterr()
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert (shown.out if status else shown.err) == ""
    return shown.err if status else shown.out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Runs a command with ``--json`` and returns its output, which has to be one line of JSON for strict parsers."""
    shown = output_of(capsys, *arguments, "--json")
    assert shown.count("\n") == 1

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(shown, parse_constant=refuse)


# info


def test_info_of_a_checkpoint_has_its_facts(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    info = json_of(capsys, "info", str(written.path))
    checkpoint = zckpt.open(written.path)
    assert (info["step"], info["world_size"], info["save_id"]) == (5, WORLD_SIZE, written.save_id)
    assert info["writer"] == dict(loader_of(checkpoint).manifest.writer)
    assert (info["files"], info["nbytes"]) == (len(loader_of(checkpoint).manifest.files), checkpoint.nbytes)
    assert (info["problem"], info["locked_by"], info["leftovers"]) == (None, None, [])
    assert 0 <= info["age_seconds"] < 86_400
    parts = {part.pop("name"): part for part in info["parts"]}
    assert tuple(parts) == checkpoint.parts
    for name, part in parts.items():
        infos = [info for info in checkpoint.values() if info.part == name]
        assert part["tensors"] == len(infos)
        assert part["nbytes"] == sum(info.nbytes for info in infos)
        assert part["numel"] == sum(math.prod(info.shape) for info in infos)
        assert part["dtypes"] == ["float32"]
    shown = output_of(capsys, "info", str(written.path))
    assert all(text in shown for text in (str(written.path), written.save_id, "exp_avg_sq  ", "by a test"))
    assert all(text in shown for text in ("complete    yes", "locked      no"))


@pytest.mark.parametrize("file", ["*/rank-00001/master.safetensors", "*/rank-00002/digests.bin", "*/index.bin"])
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "cut off"])
def test_info_names_a_file_that_is_incomplete(tmp_path: Path, file: str, gone: bool, capsys: Any) -> None:
    written = write_state(tmp_path / "c", WORLD_SIZE)
    (path,) = written.path.glob(file)
    if gone:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    problem = json_of(capsys, "info", str(written.path))["problem"]
    assert path.name in problem
    assert f"complete    no: {problem.splitlines()[0]}" in output_of(capsys, "info", str(written.path))


def test_info_of_a_run_lists_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        write_state(tmp_path / f"global_step{step}", 2, {"a": (5,)}, step=step, latest=step == 2)
        os.utime(tmp_path / f"global_step{step}" / names.MANIFEST, (1e9 + step,) * 2)
    (tmp_path / "global_step2" / names.data_dir("0" * 16)).mkdir()
    (tmp_path / "global_step9" / names.data_dir("1" * 16)).mkdir(parents=True)
    (tmp_path / "not one").mkdir()
    lock = WriteLock(open_store(tmp_path / "global_step3"))
    with lock:
        info = json_of(capsys, "info", str(tmp_path))
        shown = output_of(capsys, "info", str(tmp_path))
    assert info["latest"] == "global_step2"
    by_path = {checkpoint["path"]: checkpoint for checkpoint in info["checkpoints"]}
    assert list(by_path) == ["global_step3", "global_step2", "global_step1", "global_step9"], "newest first"
    assert [by_path[f"global_step{step}"]["step"] for step in (1, 2, 3, 9)] == [1, 2, 3, None]
    assert [checkpoint["is_latest"] for checkpoint in by_path.values()] == [False, True, False, False]
    assert by_path["global_step1"]["nbytes"] == zckpt.open(tmp_path / "global_step1").nbytes
    assert by_path["global_step2"]["leftovers"] == [names.data_dir("0" * 16)]
    assert by_path["global_step9"]["problem"] == "there is no manifest"
    assert f"process {os.getpid()} on " in by_path["global_step3"]["locked_by"]
    assert "locked by process" in shown
    assert "global_step9/data-1111111111111111" in shown
    assert json_of(capsys, "info", str(tmp_path))["checkpoints"][0]["locked_by"] is None


def test_info_orders_checkpoints_by_their_commits_however_long_it_looks_at_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, 1, 2, 3)
    clock = itertools.count(2e9, 1000)
    monkeypatch.setattr("zckpt.tools.summary.time", SimpleNamespace(time=lambda: next(clock)))
    checkpoints = json_of(capsys, "info", str(tmp_path))["checkpoints"]
    assert [checkpoint["path"] for checkpoint in checkpoints] == ["s3", "s2", "s1"]


def test_info_of_another_directory_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no checkpoint is here" in output_of(capsys, "info", str(tmp_path), status=2)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert "DeepSpeed's own format" in output_of(capsys, "info", str(tmp_path), status=2)
    assert "does not exist" in output_of(capsys, "ls", str(tmp_path / "nothing"), status=2)


# ls


def test_ls_shows_the_facts_of_each_tensor(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "ls", str(written.path))
    checkpoint = zckpt.open(written.path)
    assert [row["key"] for row in rows] == list(checkpoint)
    for row, info in zip(rows, checkpoint.values(), strict=True):
        assert (row["dtype"], tuple(row["shape"]), row["nbytes"]) == ("float32", info.shape, info.nbytes)
        assert f"torch.{row['dtype']}" == str(info.dtype)
        assert row["pieces"] == len(info.pieces)
        assert (row["ranks"], row["first_rank"], row["last_rank"]) == (
            len(info.ranks), min(info.ranks), max(info.ranks)
        )  # fmt: skip
        assert set(row["tiers"]) == {piece.tier for piece in info.pieces}
        assert row["other_names"] == (["tied"] if info.name == "big" else [])
    lines = output_of(capsys, "ls", str(written.path.parent)).splitlines()
    assert lines[0].split() == ["size", "dtype", "shape", "ranks", "key"]
    assert [line.split()[-1] for line in lines[1:-2]] == list(checkpoint)
    assert lines[-1].startswith(f"{len(checkpoint)} tensors, ")


def test_ls_selects_and_sorts(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written.path)
    assert [row["key"] for row in json_of(capsys, "ls", path, "master/a.*")] == ["master/a.bias", "master/a.weight"]
    selected = json_of(capsys, "ls", path, "--long", "master/one", "exp_avg/scalar", "--sort=key")
    assert [row["key"] for row in selected] == ["exp_avg/scalar", "master/one"]
    sizes = [row["nbytes"] for row in json_of(capsys, "ls", path, "--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)
    ranks = [row["ranks"] for row in json_of(capsys, "ls", path, "--sort", "ranks")]
    assert ranks == sorted(ranks, reverse=True)
    assert "master/big = tied" in output_of(capsys, "ls", path, "--long", "master/big")
    assert "nearest are: master/big" in output_of(capsys, "ls", path, "master/bigg", status=2)


def test_ls_shows_modules_with_their_sums(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "ls", str(written.path), "master/*", "buffer/*", "--tree").splitlines()
    total = 4 * (63 * 63 + 63)
    assert f"│   ├── a  2 tensors, {total / 1024:.1f} KiB" in lines
    assert "│   │   └── weight  float32 [63, 63], 15.5 KiB" in lines
    assert "└── buffer/mean  float32 [3], 12 bytes" in lines


# show


def test_show_of_one_tensor_has_its_pieces_and_statistics(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = json_of(capsys, "show", str(written.path), "master/big")
    value = written.full["master/big"].double()
    pieces = zckpt.open(written.path)["master/big"].pieces
    assert [(p["rank"], p["start"], p["stop"], p["file"], p["offset"]) for p in row["pieces"]] == [
        (piece.rank, piece.start, piece.stop, piece.file, piece.offset) for piece in pieces
    ]
    assert (row["min"], row["max"]) == (float(value.min()), float(value.max()))
    assert row["mean"] == pytest.approx(float(value.mean()), rel=1e-9)
    assert row["norm"] == pytest.approx(float(value.norm()), rel=1e-12)
    assert (row["nan"], row["inf"], row["zeros"]) == (0, 0, 0)
    shown = output_of(capsys, "show", str(written.path), "master/tied")
    assert f"min       {row['min']:.6g}" in shown
    assert all(piece.file in shown for piece in pieces)


ODD = [0.0, -0.0, 1.5, -3.0, math.nan, math.inf, -math.inf, math.nan, 0.5, 6.0]


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_show_counts_values_of_every_dtype(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dtype = TORCH_DTYPES[name]
    odd = torch.tensor(ODD if dtype.is_floating_point or dtype.is_complex else [0, 1, 1, 0, 1])
    value = odd.to(torch.float32 if dtype.is_floating_point else odd.dtype).to(dtype)
    write_state(tmp_path / "c", 2, {"a": value.repeat(1000)}, parts=("master",))
    (row,) = json_of(capsys, "show", str(tmp_path / "c"), "master/*")
    plain = torch.view_as_real(value) if dtype.is_complex else value
    plain = plain.double()
    finite = plain[plain.isfinite()]
    assert row["nan"] == 1000 * int(plain.isnan().sum())
    assert row["inf"] == 1000 * int(plain.isinf().sum())
    assert row["zeros"] == 1000 * int((finite == 0).sum())
    assert (row["min"], row["max"]) == (float(finite.min()), float(finite.max()))
    assert row["mean"] == pytest.approx(float(finite.mean()), rel=1e-12)
    assert row["norm"] == pytest.approx(float(finite.norm()) * math.sqrt(1000), rel=1e-12)


def test_show_of_several_tensors_leaves_out_figures_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        "nan": torch.full((3,), math.nan),
        "empty": torch.empty(0, 3),
        "huge": torch.full((2,), 1e300, dtype=torch.float64),
    }
    write_state(tmp_path / "c", 2, tensors, parts=("master",))
    rows = {row["key"]: row for row in json_of(capsys, "show", str(tmp_path / "c"), "master/*")}
    assert [rows[f"master/{name}"]["mean"] for name in ("nan", "empty", "huge")] == [None, None, 1e300]
    assert rows["master/huge"]["norm"] is None
    assert rows["master/nan"]["nan"] == 3
    heading, *lines = output_of(capsys, "show", str(tmp_path / "c"), "master/*").splitlines()
    assert heading.split() == ["min", "max", "mean", "norm", "NaN", "infinite", "zeros", "key"]
    assert {line.split()[-1] for line in lines} == rows.keys()


@pytest.mark.parametrize("layout", ["zero3", "random", "divided"])
def test_show_reads_every_byte_once_and_holds_little(tmp_path: Path, layout: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(statistics, "STRETCH_BYTES", 3 * 4096)
    written = write_state(tmp_path / "c", WORLD_SIZE, layout=layout)
    checkpoint = open_loader(written.path)
    infos = list(checkpoint.contents.values())
    stretches = list(statistics.stretches(checkpoint, infos))
    covered = {
        number: [stretch.span for stretch in stretches if stretch.number == number] for number in range(len(infos))
    }
    for number, info in enumerate(infos):
        bounds = [0, *(span.stop for span in covered[number])]
        assert [span.start for span in covered[number]] == bounds[:-1]
        assert bounds[-1] == math.prod(info.shape)
    assert max(stretch.span.numel for stretch in stretches) * 4 <= 3 * 4096
    assert len(stretches) > len(infos)
    seen: list[int] = []
    statistics.statistics(checkpoint, infos, stretches, seen.append)
    assert checkpoint.reader.count.data_bytes == sum(seen) == sum(info.nbytes for info in infos)


def shown(path: str, *arguments: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        return main(["show", path, *arguments]), out.getvalue(), err.getvalue()


def test_the_ranks_of_a_launcher_share_the_work_of_show(
    cluster: Cluster, written: Written, capsys: Any, monkeypatch: Any
) -> None:
    alone = json_of(capsys, "show", str(written.path), "*/*")
    first, second = cluster.run(shown, 2, str(written.path), "*/*", "--json", init=False)
    assert second == (0, "", ""), "rank 0 prints"
    together = json.loads(first[1])
    assert [row["key"] for row in together] == [row["key"] for row in alone]
    for row, expected in zip(together, alone, strict=True):
        for number in ("min", "max", "nan", "inf", "zeros", "pieces"):
            assert row[number] == expected[number]
        assert row["norm"] == pytest.approx(expected["norm"])
    for status, out, err in cluster.run(shown, 2, str(written.path), "no/such key", init=False):
        assert (status, out) == (2, "")
        assert "no key matches 'no/such key'" in err


# state


def test_state_is_what_was_written(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    state = json_of(capsys, "state", str(written.path), "client_state")
    assert state == {
        "epoch": 3,
        "a.b": {"7": [1, 2]},
        "tensors": [{"dtype": "int64", "shape": [2, 3]}, {"dtype": "float32", "shape": [4]}],
        "odd": ["nan", "inf", {"base64": "AAE="}, 1 << 70, None, True],
        "long": list(range(100)),
    }
    assert json_of(capsys, "state", str(written.path)) == {"engine": None, "client_state": state}
    lines = output_of(capsys, "state", str(written.path)).splitlines()
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
def test_state_shows_the_value_at_a_path(written: Written, where: str, expected: Any, capsys: Any) -> None:
    assert json_of(capsys, "state", str(written.path), where) == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("client", "it has 'engine', 'client_state'"),
        ("client_state.long[100]", "it has 100 elements"),
        ("client_state.epoch.x", "it is a single value"),
        ("client_state.tensors[0][0]", "it is a single value"),
        ("client_state[", "'[' is not a step of a path"),
    ],
)
def test_state_at_a_path_without_a_value_is_an_error(written: Written, where: str, message: str, capsys: Any) -> None:
    assert message in output_of(capsys, "state", str(written.path), where, status=2)


def test_state_shows_the_state_of_a_rank(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(WORLD_SIZE):
        assert json_of(capsys, "state", str(written.path), "--rank", str(rank)) == {"rank": rank}
    assert "there is no state of rank 3" in output_of(capsys, "state", str(written.path), "--rank", "3", status=2)


def test_the_state_of_a_rank_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_state(tmp_path / "c", 2)
    (file,) = written.path.glob("*/rank-00001/*state.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert "the data is damaged (rule D003" in output_of(capsys, "state", str(written.path), "--rank", "1", status=2)


# Imports


def test_commands_that_read_no_tensors_do_not_import_torch(written: Written, tmp_path: Path) -> None:
    """Neither do commands that fail before they would read tensors, or because a package is missing."""
    write_steps(tmp_path, 1, 2)
    litter(tmp_path / "s2")
    (tmp_path / "s2" / "manifest.msgpack").unlink()  # gc and prune find out that zckpt.repair could rebuild it
    code = """
import sys
from zckpt.cli import main
sys.modules["jinja2"] = None  # importing it raises
path, run, file = sys.argv[1:]
for words, place, status in (
    ("info", path, 0), ("info --json", path, 0), ("ls --long", path, 0), ("ls --tree", path, 0), ("ls --json", path, 0),
    ("state", path, 0), ("state --json", path, 0), ("state --rank 1", path, 0),
    ("gc --dry-run", run, 0), ("gc", run, 0), ("gc", path + "x", 2),
    ("prune --keep-last 1", run, 0), ("prune --keep-last 1", path, 2),
    ("validate --level structure", path, 0), ("validate --level structure --json", path, 0),
    ("validate", file, 2), ("validate --level deep", path + "x", 2), ("report", path, 2),
):
    assert main([*words.split(), place]) == status, words
    assert "torch" not in sys.modules, words
"""
    file = tmp_path / "file"
    file.touch()
    arguments = [str(path) for path in (written.path, tmp_path, file)]
    shown = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    assert shown.stderr.count("the path is a file") == 1
    assert "`zckpt convert` reads a file of torch.save" in shown.stderr
    assert "a report needs plotly, itables and jinja2" in shown.stderr
    assert f"recoverable                 {tmp_path / 's2'}" in shown.stdout


def test_the_structure_is_checked_without_torch_as_with_it(tmp_path: Path) -> None:
    """A process that checks the structure alone finds what one finds that has imported torch."""
    written = write_state(tmp_path / "c", WORLD_SIZE)
    (file,) = written.path.glob("data-*/rank-00001/master.safetensors")
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(raw)
    command = [sys.executable, "-m", "zckpt", "validate", "--level", "structure", "--json", str(written.path)]
    alone = subprocess.run(command, check=False, capture_output=True, text=True)
    assert alone.returncode == 1
    assert json.loads(alone.stdout) == json.loads(zckpt.validate(written.path, level="structure").to_json())


# Texts from a checkpoint


def test_control_characters_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "line\nbreak \x1b[31m \x9b \u202e"
    state = {odd: odd, "inner": {odd: {odd: [1]}}}
    path = write_state(tmp_path / odd / "c", 1, {"a": (2,)}, client_state=state).path
    for arguments in (["state", path], ["state", path, "client_state.x"], ["info", path], ["info", tmp_path / odd]):
        main([*map(str, arguments)])
        shown = "".join(capsys.readouterr())
        assert "line\\nbreak \\x1b[31m \\x9b \\u202e" in shown
        assert all(line.isprintable() for line in shown.split("\n"))
