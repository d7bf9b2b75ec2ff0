"""Commands that read many bytes share the work between the ranks of a launcher, and the loss of a rank is an error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.cluster import ROOT, held_port
from tests.support.converting import TAG, save_both
from tests.support.faults import Fault, faulty, kill
from tests.support.litter import tree
from tests.support.states import write_state
from zckpt.cli import main
from zckpt.ranks import heartbeat

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

READS = ("read_portions", "read_direct", "read_into")
COMMANDS = {
    "show": (["show", "one", "*/*", "--json"], READS),
    "validate": (["validate", "one", "--json"], READS),
    "diff": (["diff", "one", "three", "--json"], READS),
    "cp": (["cp", "one", "made/new"], READS),
    "cp-some": (["cp", "one", "made/new", "master/*", "exp_avg/*"], READS),
    "export": (["export", "one", "made/new", "--max-shard-size", "60KB"], READS),
    "convert": (["convert", f"stock/{TAG}", "made/new"], ("write",)),
    "convert-back": (["convert", "own", "made", "--to", "deepspeed", "--tag", "new"], READS),
}
"""The arguments of each command, and the operations on a store by which a rank does its share of the work."""
BUDGET = {"ZCKPT_BUDGET_BYTES": str(8 << 20)}
"""A budget that is so small that a comparison of these small checkpoints is made in several parts."""
each_command = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(scope="module")
def furnished(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with four checkpoints: of one rank, of three ranks, of an engine, and of the same engine in
    DeepSpeed's own format.
    """
    path = tmp_path_factory.mktemp("launched")
    tensors = {f"layers.{number}.weight": torch.randn(70, 200) for number in range(4)}
    write_state(path / "one", 1, tensors)
    write_state(path / "three", 3, {name: tensor + 1 for name, tensor in tensors.items()})
    cluster.run(save_both, 2, str(path), {"stage": 3})
    return path


def run(directory: Path, arguments: list[str], counted: tuple[str, ...], dies: bool = False) -> tuple[Any, ...]:
    """Runs a command. Rank 1 dies at its second operation that is counted, if ``dies`` is true.

    Returns the exit status, the output on stdout and stderr, and the number of operations of the names ``counted``.
    """
    os.chdir(directory)
    os.environ.update(BUDGET)
    heartbeat.PERIOD_SECONDS = 0.2
    fault = Fault(kill, at=1, names=counted) if dies and os.environ["RANK"] == "1" else None
    out, err = io.StringIO(), io.StringIO()
    with faulty(fault) as operations, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    work = sum(name in counted for name, file in operations.done if file.endswith(("safetensors", ".pt")))
    return status, out.getvalue(), err.getvalue(), work


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@each_command
def test_ranks_share_the_work(
    cluster: Cluster, furnished: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, counted = COMMANDS[name]
    alone, together = ([re.sub("^made", str(tmp_path / where), word) for word in arguments] for where in "at")
    monkeypatch.chdir(furnished)
    # What ``run`` sets is removed afterwards.
    monkeypatch.setenv("ZCKPT_BUDGET_BYTES", "")
    monkeypatch.setattr(heartbeat, "PERIOD_SECONDS", heartbeat.PERIOD_SECONDS)
    status, expected, _, work = run(furnished, alone, counted)
    first, second = cluster.run(run, 2, furnished, together, counted, init=False)
    assert (status, first[0], second[0]) == (name == "diff",) * 3
    assert second[1] == "", "rank 0 prints"
    assert min(first[3], second[3]) >= max(work // 4, 1), (first[3], second[3], work)
    if "--json" in arguments:
        assert sound(json.loads(first[1])) == sound(json.loads(expected))
    elif name == "export":
        assert files(tmp_path / "t") == files(tmp_path / "a")
        assert len(files(tmp_path / "t")) > 3
    elif name == "convert-back":
        assert files(tmp_path / "a") == files(tmp_path / "t")
    else:
        assert zckpt.validate(tmp_path / "t" / "new").ok
        assert zckpt.diff(tmp_path / "a" / "new", tmp_path / "t" / "new").equal
    assert not list(tmp_path.rglob("*.tmp"))


def sound(output: Any) -> Any:
    """Returns the output of a command without the figures that depend on the number of ranks.

    These figures are the number of bytes read, because some bytes are read twice, and sums, which are rounded.
    """
    if isinstance(output, dict):
        return {name: sound(value) for name, value in output.items() if name not in ("bytes_read", "mean", "norm")}
    return [sound(value) for value in output] if isinstance(output, list) else output


@each_command
def test_the_loss_of_a_rank_is_an_error(cluster: Cluster, furnished: Path, tmp_path: Path, name: str) -> None:
    arguments, counted = COMMANDS[name]
    arguments = [re.sub("^made", str(tmp_path), word) for word in arguments]
    before = tree(furnished), tree(tmp_path)
    first, second = cluster.outcomes(run, 2, furnished, arguments, counted, dies=True, init=False)
    assert (first.error, second.signal) == (None, signal.SIGKILL)
    status, out, err, _ = first.value
    assert (status, out) == (2, "")
    assert "rank 1" in err
    assert (tree(furnished), tree(tmp_path)) == before


def launch(directory: Path, arguments: list[str], **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs a command under two launchers, as on two machines of one rank each."""
    script = str(ROOT / "tests" / "support" / "scripts" / "command.py")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    variables |= {**BUDGET, **environment}
    with held_port() as port:
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                 "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", script, *arguments],
                cwd=directory, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for node in range(2)
        ]  # fmt: skip
        try:
            outputs = [node.communicate(timeout=600) for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    return [subprocess.CompletedProcess([], node.returncode, *out) for node, out in zip(nodes, outputs, strict=True)]


MATRIX = pytest.mark.matrix


@pytest.mark.linux
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "cp" else MATRIX) for name in COMMANDS])
def test_several_machines_share_the_work(furnished: Path, tmp_path: Path, name: str) -> None:
    arguments, _ = COMMANDS[name]
    arguments = [re.sub("^made", str(tmp_path), word) for word in arguments]
    first, second = launch(furnished, arguments)
    failed = [name == "diff"] * 2  # a launcher takes the exit status 1 of diff for a failure
    assert [bool(first.returncode), bool(second.returncode)] == failed, first.stderr + second.stderr
    assert bool(first.stdout)
    assert not second.stdout, "rank 0 prints"
    if name == "cp":
        assert files(tmp_path / "new") == files(furnished / "one")


@pytest.mark.linux
@MATRIX
@each_command
def test_the_loss_of_a_machine_is_an_error(furnished: Path, tmp_path: Path, name: str) -> None:
    arguments, counted = COMMANDS[name]
    arguments = [re.sub("^made", str(tmp_path), word) for word in arguments]
    before = tree(tmp_path)
    first, second = launch(furnished, arguments, DIES=",".join(counted))
    assert first.returncode != 0
    assert second.returncode != 0
    assert "zckpt: rank 1 " in first.stderr
    assert tree(tmp_path) == before
