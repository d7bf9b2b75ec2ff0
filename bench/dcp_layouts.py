"""Saves and loads a weight in all layouts of FSDP2 over tensor parallelism, with DCP's own files and with zckpt.

    python bench/dcp_layouts.py [--rows 30] [--output DIR]

Tensor parallelism cuts the rows of the weight, and FSDP2 cuts the rows that each of its ranks holds. Each combination
of a mesh and a number of rows is saved, and loaded into zeros on the same mesh, by real ranks on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import CheckpointException  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

import zckpt  # noqa: E402
from tests.support.cluster import Cluster  # noqa: E402

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESHES = [(dp, tp) for dp in (2, 3, 4) for tp in (2, 3, 4) if dp * tp <= 12]
"""The numbers of ranks of FSDP2 and of tensor parallelism."""
WAYS = ("DCP's own files", "zckpt.dcp", "zckpt.write_state_dict")
EQUAL, REFUSED = "equal", "the save is refused"
UNREADABLE, WRONG = "saved, but the load fails", "saved, other rows come back"
OUTCOMES = (EQUAL, REFUSED, UNREADABLE, WRONG)


def outcomes(dp: int, tp: int, rows_max: int, directory: str) -> list[list[str]]:
    """Returns, for each number of rows, the outcome of each way. It is called on every rank."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return [[outcome(way, rows, mesh, directory) for way in WAYS] for rows in range(1, rows_max + 1)]


def outcome(way: str, rows: int, mesh: DeviceMesh, directory: str) -> str:
    """Returns what comes of a save and a load of a weight with so many rows."""
    state, path = weight(rows, mesh), f"{directory}/{WAYS.index(way)}-{rows}"
    held = state["weight"]._local_tensor.clone()
    try:
        save(way, state, path)
    except (CheckpointException, zckpt.ZckptError):
        return REFUSED
    state["weight"]._local_tensor.zero_()
    try:
        load(way, state, path)
    except (CheckpointException, zckpt.ZckptError):
        return UNREADABLE
    equal: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(equal, torch.equal(state["weight"]._local_tensor, held))
    return EQUAL if all(equal) else WRONG


def weight(rows: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the state dict of a model with a single weight, whose elements are all different and not zero."""
    module: Any = nn.Linear(2, rows, bias=False)
    values = torch.arange(1.0, 2 * rows + 1).reshape(rows, 2)
    module.weight = nn.Parameter(distribute_tensor(values, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    return {"weight": module.state_dict()["weight"].detach()}


def save(way: str, state: dict[str, Any], path: str) -> None:
    if way == "zckpt.write_state_dict":
        zckpt.write_state_dict(state, path)
    else:
        dcp.save(state, storage_writer=zckpt.dcp.Writer(path) if way == "zckpt.dcp" else dcp.FileSystemWriter(path))


def load(way: str, state: dict[str, Any], path: str) -> None:
    if way == "zckpt.write_state_dict":
        zckpt.open(path).load_into(state)
    else:
        dcp.load(state, storage_reader=zckpt.dcp.Reader(path) if way == "zckpt.dcp" else dcp.FileSystemReader(path))


def table(results: dict[str, list[list[str]]]) -> str:
    counts = [Counter(row[way] for rows in results.values() for row in rows) for way in range(len(WAYS))]
    combinations = sum(map(len, results.values()))
    rows_max = max(map(len, results.values()))
    lines = [
        "# Layouts of FSDP2 over tensor parallelism, saved by DCP and by zckpt",
        "",
        f"Tensor parallelism cuts a weight of 1 to {rows_max} rows, and FSDP2 cuts what each of its ranks holds. Each",
        "combination was saved, and loaded into zeros on the same mesh, by real ranks on the CPU. `equal` means that",
        "each rank has its elements back, bit for bit. `make bench-coverage` makes this page.",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        f"| of {combinations} combinations | {' | '.join(WAYS)} |",
        f"|---|{'---|' * len(WAYS)}",
        *(f"| {kind} | {' | '.join(str(count[kind]) for count in counts)} |" for kind in OUTCOMES),
        "",
        "The combinations in which not all of the three are equal:",
        "",
        f"| FSDP2 | tensor parallelism | rows | {' | '.join(WAYS)} |",
        f"|---|---|---|{'---|' * len(WAYS)}",
    ]  # fmt: skip
    for mesh, outcomes_of_mesh in results.items():
        groups: dict[tuple[str, ...], list[str]] = {}
        for number, row in enumerate(outcomes_of_mesh, 1):
            if set(row) != {EQUAL}:
                groups.setdefault(tuple(row), []).append(str(number))
        for same, numbers in groups.items():
            lines.append(f"| {' | '.join(mesh.split(' x '))} | {', '.join(numbers)} | {' | '.join(same)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=30, help="the largest number of rows; default 30")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write dcp_layouts.json and dcp_layouts.md here")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    cluster, results = Cluster(), {}
    with tempfile.TemporaryDirectory(prefix="zckpt-layouts-") as directory:
        try:
            for dp, tp in MESHES:
                place = f"{directory}/{dp}-{tp}"
                of_mesh, *_ = cluster.run("dcp_layouts:outcomes", dp * tp, dp, tp, options.rows, place)
                results[f"{dp} x {tp}"] = of_mesh
                print(f"{dp} x {tp}:", *(Counter(row[way] for row in of_mesh) for way in range(3)), flush=True)
                shutil.rmtree(place)
        finally:
            cluster.close()
    print(table(results))
    if options.output:
        options.output.mkdir(exist_ok=True)
        (options.output / "dcp_layouts.json").write_text(json.dumps(results, indent=2) + "\n")
        (options.output / "dcp_layouts.md").write_text(table(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
