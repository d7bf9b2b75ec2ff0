"""Measures what ranks send, keep open and wait for, at 16 to 4096 ranks.

    python bench/thousand_ranks.py [--quick] [--dir DIR] [--results DIR]

There are three measurements, each in fresh processes:

- Ranks that are threads of one process (``tests.support.thread_ranks``) write a checkpoint of tiny tensors, open it and
  restore it, bit for bit. Then a rank dies in the middle of a write. All of this is the code of real ranks; only gloo
  and the store of the job are replaced. Each figure is that of rank 0, of an inner rank of the tree and of a leaf.
- 64 ranks that are processes and use gloo do the same. Their open descriptors and their memory are looked at.
- Rank 0 writes a checkpoint of 1000 parameters with 3 parts, while one thread plays all other ranks: it answers with
  what they would send. So the time and the memory are those of rank 0 alone.

``--dir`` should be on a file system in memory, because what is measured is not the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from common import MIB, Options, Result, parse_options
from played_ranks import measure_played
from ranks_as_processes import measure_processes
from ranks_as_threads import kinds, measure_threads
from zckpt.ranks import tree

if TYPE_CHECKING:
    from collections.abc import Callable

NAME, TITLE = "thousand_ranks", "Many ranks"
THREADS = (16, 64, 256, 1024, 4096)
PROCESSES = 64
PLAYED = (1024, 4096)
PARAMETERS = 1000
MEASURED: dict[str, Callable[..., dict[str, Any]]] = {
    "threads": measure_threads,
    "processes": measure_processes,
    "played": measure_played,
}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--part":
        print(json.dumps(MEASURED[sys.argv[2]](*sys.argv[3:])), flush=True)
        os._exit(0)  # The ranks that were killed have left threads.
    options = parse_options(__doc__, runs=1, size=0)
    quick = "--quick" in sys.argv
    result = Result(NAME, TITLE, options)
    threads = [
        part("threads", options, ranks, "yes" if ranks < 4096 else "no")
        for ranks in (THREADS[:2] if quick else THREADS)
    ]
    processes = part("processes", options, 4 if quick else PROCESSES)
    played = [
        part("played", options, ranks, 50 if quick else PARAMETERS) for ranks in (PLAYED[:1] if quick else PLAYED)
    ]
    result.extra = {
        "threads": threads,
        "processes": processes,
        "played": played,
        "notes": notes(threads, processes, played),
    }
    judge(result, threads, processes, played)
    result.finish()


def part(name: str, options: Options, *arguments: object) -> dict[str, Any]:
    """Runs one measurement in a fresh process, and returns its figures."""
    print(f"{name} {' '.join(map(str, arguments))}", flush=True)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        command = [sys.executable, __file__, "--part", name, directory, *map(str, arguments)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


def judge(result: Result, threads: list[Any], processes: dict[str, Any], played: list[Any]) -> None:
    small, large = next(each for each in threads if each["ranks"] >= 64), threads[-1]
    for what in ("write", "restore"):
        leaf, leaf_of_small = large["phases"][what]["leaf"], small["phases"][what]["leaf"]
        for figure in ("sent_bytes", "received_bytes", "sent_messages"):
            ratio = leaf[figure] / leaf_of_small[figure]
            name = figure.replace("_", " ")
            text = f"{what}: {name} of a leaf at {large['ranks']} ranks, times that at {small['ranks']}"
            result.at_most(text, ratio, 1.05)
        calls = (sum(of["store_of_checkpoints"].values()) for of in (leaf, leaf_of_small))
        result.at_most(
            f"{what}: calls of the store of checkpoints by a leaf, {large['ranks']} to {small['ranks']} ranks",
            next(calls) / max(next(calls), 1),
            1.05,
        )
    connections = max(each["phases"]["restore"][kind]["connections"] for each in threads for kind in kinds(1))
    result.at_most("connections of any rank", connections, 2 * tree.FAN_OUT, "")
    all_lost = [lost for each in threads for lost in each["lost"].values()]
    for who, cases in (("threads", all_lost), (f"{processes['ranks']} processes", [processes["lost"]])):
        share = min(lost["named_it"] / lost["others"] for lost in cases)
        result.at_least(f"{who}: share of the others that name a rank that died, least of {len(cases)}", share, 1, "")
    for each in played:
        about = f"{each['ranks']} ranks x {each['parameters']} parameters x 3 parts"
        result.at_most(f"{about}: own time of rank 0", each["own_seconds"], 5 * each["ranks"] / 1024, "s")
        result.at_most(
            f"{about}: memory of rank 0, times the decompressed index",
            each["peak_bytes"] / each["index_bytes_decompressed"],
            2,
        )
        result.at_most(f"{about}: open and one key", each["one_key"]["seconds"] * 1e3, 50, "ms")
        result.at_most(f"{about}: manifest and index for each piece", each["bytes_per_piece"], 4, "B")


def notes(threads: list[Any], processes: dict[str, Any], played: list[Any]) -> list[str]:
    """Returns the tables of the page of results."""
    lines = ["![many ranks](many_ranks.svg)", ""]
    for what in ("write", "restore"):
        lines += [
            f"Ranks that are threads: {what}. KiB sent and received, and calls of the store of checkpoints:",
            "",
            "| ranks | seconds | rank 0 | inner rank | leaf | calls, all ranks |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for each in threads:
            phase = each["phases"][what]
            kib = [
                [f"{of[way] / 1024:.0f}" for way in ("sent_bytes", "received_bytes")] for of in map(phase.get, kinds(1))
            ]
            calls = [sum(phase[kind]["store_of_checkpoints"].values()) for kind in kinds(1)]
            cells = [f"{' and '.join(moved)}; {count}" for moved, count in zip(kib, calls, strict=True)]
            lines.append(
                f"| {each['ranks']} | {phase['wall_seconds']:.1f} | {' | '.join(cells)} | {phase['all_calls']} |"
            )
        lines.append("")
    lines += [
        "A rank dies in the middle of a write. The last of the others names it after so many periods of looks:",
        "",
        "| ranks | rank 0 | inner rank | leaf |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for each in threads:
        cells = [f"{each['lost'][kind]['periods']:.1f}" if kind in each["lost"] else "" for kind in kinds(1)]
        lines.append(f"| {each['ranks']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{processes['ranks']} processes on gloo:",
        "",
        "| | rank 0 | leaf |",
        "| --- | ---: | ---: |",
    ]
    of_kinds = [processes["rank 0"], processes["leaf"]]
    for label, value in (
        ("descriptors that zckpt keeps open", lambda of: of["descriptors_after"] - of["descriptors_before"]),
        ("memory of a write, MiB", lambda of: f"{of['write_peak_bytes'] / MIB:.1f}"),
        ("memory of a restore, MiB", lambda of: f"{of['restore_peak_bytes'] / MIB:.1f}"),
        ("seconds of a write", lambda of: f"{of['seconds']['write']:.2f}"),
        ("seconds of a restore", lambda of: f"{of['seconds']['restore']:.2f}"),
    ):
        lines.append(f"| {label} | {' | '.join(str(value(of)) for of in of_kinds)} |")
    lines += [
        "",
        "Rank 0 commits a checkpoint of many pieces, and all other ranks are played:",
        "",
        "| ranks | pieces | own seconds | memory, MiB | received, MiB | two files, MiB | open and one key, ms |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in played:
        lines.append(
            f"| {each['ranks']} | {each['pieces']:,} | {each['own_seconds']:.1f} | {each['peak_bytes'] / MIB:.0f} | "
            f"{each['received_bytes'] / MIB:.1f} | {(each['manifest_bytes'] + each['index_bytes']) / MIB:.1f} | "
            f"{each['one_key']['seconds'] * 1e3:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
