"""From the JSON of every comparison: a page of tables, the pictures, and on stdout every target with its verdict.

python bench/report.py [--results DIR]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

from common import GIB, ROOT, Target

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "zckpt"  # equal figures give equal files
OURS, THEIRS, RAW = "#1f77b4", "#c7c7c7", "#7f7f7f"
ORDER = (
    "write_vs_raw",
    "write_vs_deepspeed",
    "write_vs_peers",
    "restore_vs_deepspeed",
    "load_vs_peers",
    "masters_vs_zero_to_fp32",
    "export",
    "live_export",
    "copy_vs_plain",
    "one_tensor",
    "memory",
    "memory_limit",
    "verify",
    "validate",
    "other_world_size",
    "background_write",
    "offload",
    "reuse",
    "small_tensors",
    "memory_over_time",
    "limits",
)
ON_A_GPU = ("load_to_gpu", "write_from_gpu")
IN_PICTURE = ("write_vs_raw", "write_vs_deepspeed", "write_vs_peers", "restore_vs_deepspeed", "load_vs_peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    folder: Path = parser.parse_args().results
    names = (*ORDER, *ON_A_GPU)
    found = {name: json.loads(file.read_text()) for name in names if (file := folder / f"{name}.json").exists()}
    draw_throughput([found[name] for name in IN_PICTURE if name in found], folder / "throughput.svg")
    if "memory_over_time" in found:
        draw_memory(found["memory_over_time"], folder / "memory.svg")
    (folder / "README.md").write_text(page(found))
    targets = [target for one in found.values() for target in targets_of(one)]
    for target in targets:
        print(target)
    print(f"\n{sum(target.met for target in targets)} of {len(targets)} targets are met")


def targets_of(result: dict[str, Any]) -> list[Target]:
    return [Target(**{name: one[name] for name in Target.__annotations__}) for one in result["targets"]]


# The page


def page(found: dict[str, Any]) -> str:
    lines = [
        "# What `make bench` has measured",
        "",
        "Made by `bench/report.py` from the JSON files beside it; the docstring of each program says what is measured.",
        "A ratio is the median of the rounds, in each of which all contestants take turns on the same bytes.",
        "CPU s/GiB: seconds of processor time for a GiB, user and system, of all processes that took part together.",
        "",
    ]
    one = next(iter(found.values()))["machine"]
    here = described(one)
    lines += [
        here,
        *commits_note({result.get("commit") for result in found.values()}),
        *load_note([result["machine"].get("load_average") for result in found.values()], one["cpus"]),
        "",
        "![memory over time](memory.svg)",
        "",
        "![throughput](throughput.svg)",
        "",
        "## Targets",
        "",
        "| what | measured | target | |",
        "| --- | ---: | ---: | --- |",
    ]
    for result in found.values():
        for target in targets_of(result):
            sign = "≥" if target.at_least else "≤"
            verdict = "met" if target.met else "**missed**"
            unit = "\N{MULTIPLICATION SIGN}" if target.unit == "x" else f" {target.unit}"
            lines.append(f"| {target.what} | {target.value:.3g}{unit} | {sign} {target.bound:g}{unit} | {verdict} |")
    for result in found.values():
        lines += [
            "",
            f"## {result['title']}",
            "",
            f"`bench/{result['name']}.py`, {result['size_bytes'] / GIB:g} GiB{commit_of(result)}",
            "",
        ]
        if described(result["machine"]) != here:
            lines += [described(result["machine"]), ""]
        if result["rows"]:
            lines += [
                "| | median | from | to | GiB/s | CPU s/GiB |",
                "| --- | ---: | ---: | ---: | ---: | ---: |",
            ]
        for row in result["rows"]:
            label = f"{row['group']}: {row['label']}" if row["group"] else row["label"]
            times = " | ".join(f"{value:.4g} s" for value in (row["median_seconds"], *span(row["seconds"])))
            cpu = f"{row['cpu_seconds_per_gib']:.3g}" if "cpu_seconds_per_gib" in row else ""
            lines.append(f"| {label} | {times} | {row['gib_per_second']:.2f} | {cpu} |")
        if "notes" in result:
            lines += ["", *result["notes"]]
        if "by_size" in result:
            lines += ["| | peak | Cached |", "| --- | ---: | ---: |"]
        for size, by_doing in result.get("by_size", {}).items():
            for doing, one in by_doing.items():
                lines.append(f"| {size}: {doing} | {one['peak_mib']:.0f} MiB | {one['cached_mib']:.0f} MiB |")
    return "\n".join(lines) + "\n"


def described(one: dict[str, Any]) -> str:
    """The machine, and the day."""
    gpu = f", {one['gpu']}" if one.get("gpu") else ""
    return (
        f"{one['date']}: {one['cpus']} cores, {one['memory_bytes'] / GIB:.0f} GiB of memory, {one['file_system']}, "
        f"Linux {one['kernel']}, Python {one['python']}, torch {one['torch']}{gpu}."
    )


def commit_of(result: dict[str, Any]) -> str:
    return f", at commit {result['commit']}" if result.get("commit") else ""


def commits_note(commits: set[str | None]) -> list[str]:
    if len(commits) == 1:
        return []
    return [
        "Not all of it was measured at the same commit, so figures of different sections may contradict each other.",
        "Each section says at which commit it was measured; those that name none are older than those that do.",
    ]


def load_note(loads: list[float | None], cpus: int) -> list[str]:
    """What to say of other programs; None: nobody looked."""
    known = [load for load in loads if load is not None]
    if max(known, default=0) <= cpus + 1 and None not in loads:
        return []
    where = "" if None not in loads else ", where it was noted"
    return [f"The machine was not idle: load averages of {min(known):.1f} to {max(known):.1f}{where}."]


def span(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


# The pictures


def draw_throughput(results: list[dict[str, Any]], file: Path) -> None:
    groups = [
        (f"{result['title']}{', ' + group if group else ''}", [row for row in result["rows"] if row["group"] == group])
        for result in results
        for group in dict.fromkeys(row["group"] for row in result["rows"])
    ]
    bars = sum(len(rows) + 2 for _, rows in groups)
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * bars + 1))
    position = 0
    for title, rows in groups:
        axes.text(0, position, title, fontsize=9, fontweight="bold", va="center")
        for row in rows:
            position += 1
            colour = OURS if row["label"].startswith("zckpt") else RAW if row["label"] == "raw" else THEIRS
            axes.barh(position, row["gib_per_second"], color=colour, height=0.8)
            axes.text(
                row["gib_per_second"],
                position,
                f" {row['gib_per_second']:.2f}  {row['label']}",
                fontsize=8,
                va="center",
            )
        position += 2
    axes.invert_yaxis()
    axes.set_xlabel("GiB/s, higher is better")
    axes.set_yticks([])
    axes.margins(x=0.3, y=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    save(figure, file)


def draw_memory(result: dict[str, Any], file: Path) -> None:
    """Growth of resident memory and page cache, one upon the other; a column for saves, one for resumes."""
    seconds = {row["label"]: row["median_seconds"] for row in result["rows"]}
    figure, rows = pyplot.subplots(2, 2, figsize=(9, 4.5), sharey=True, sharex="col")
    for row, kind in zip(rows, ("DeepSpeed", "zckpt"), strict=True):
        for axes, doing in zip(row, ("save", "resume"), strict=True):
            label = f"{doing}: {kind}"
            found = result["samples"][label]
            before = [one for one in found if one[0] < 0][-1]
            found.append([1e3, *found[-1][1:]])  # it stays like that
            times = [one[0] for one in found]
            resident, cached = ([max(0, one[i] - before[i]) / GIB for one in found] for i in (1, 2))
            axes.stackplot(
                times, resident, cached, labels=("resident, both ranks", "page cache"), colors=(OURS, THEIRS)
            )
            axes.axvline(seconds[label], color="black", linewidth=0.8, linestyle=":")
            axes.set_title(f"{kind}: {doing}, {seconds[label]:.1f} s", fontsize=10, loc="left")
            axes.set_xlim(0, 1.3 * max(seconds[f"{doing}: {other}"] for other in ("DeepSpeed", "zckpt")))
            axes.spines[["top", "right"]].set_visible(False)
    for axes in rows[:, 0]:
        axes.set_ylabel("GiB more than before")
    for axes in rows[-1]:
        axes.set_xlabel("seconds")
    rows[1, 0].legend(fontsize=8, loc="upper right", frameon=False)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
