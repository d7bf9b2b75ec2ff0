"""Makes a page of tables and the pictures from the JSON of all comparisons, and prints every target with its verdict.

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
mpl.rcParams["svg.hashsalt"] = "zckpt"  # so that equal figures give equal files
OURS, THEIRS, RAW = "#1f77b4", "#c7c7c7", "#7f7f7f"
ORDER = (
    "write_vs_raw",
    "write_vs_deepspeed",
    "write_vs_peers",
    "restore_vs_deepspeed",
    "load_vs_peers",
    "fsdp_vs_dcp",
    "masters_vs_zero_to_fp32",
    "export",
    "live_export",
    "copy_vs_plain",
    "object_store",
    "one_tensor",
    "memory",
    "memory_limit",
    "verify",
    "validate",
    "other_world_size",
    "divided",
    "background_write",
    "offload",
    "reuse",
    "small_tensors",
    "memory_over_time",
    "limits",
)
ON_A_GPU = ("load_to_gpu", "write_from_gpu")
BY_ITSELF = ("thousand_ranks",)
IN_PICTURE = ("write_vs_raw", "write_vs_deepspeed", "write_vs_peers", "restore_vs_deepspeed", "load_vs_peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    folder: Path = parser.parse_args().results
    names = (*ORDER, *ON_A_GPU, *BY_ITSELF)
    results = {name: json.loads(file.read_text()) for name in names if (file := folder / f"{name}.json").exists()}
    draw_throughput([results[name] for name in IN_PICTURE if name in results], folder / "throughput.svg")
    if "memory_over_time" in results:
        draw_memory(results["memory_over_time"], folder / "memory.svg")
    if "thousand_ranks" in results:
        draw_many_ranks(results["thousand_ranks"], folder / "many_ranks.svg")
    (folder / "README.md").write_text(page(results))
    targets = [target for result in results.values() for target in targets_of(result)]
    for target in targets:
        print(target)
    print(f"\n{sum(target.met for target in targets)} of {len(targets)} targets are met")


def targets_of(result: dict[str, Any]) -> list[Target]:
    return [Target(**{name: target[name] for name in Target.__annotations__}) for target in result["targets"]]


# The page


def page(results: dict[str, Any]) -> str:
    """Returns the page in Markdown, made from the JSON of each comparison by name."""
    lines = [
        "# What `make bench` has measured",
        "",
        "`bench/report.py` makes this page from the JSON files in this directory. The docstring of each program in",
        "`bench/` says what it measures. In each round, all contestants write or read the same bytes, in turns. A",
        'ratio is the median of the ratios of all rounds. "CPU s/GiB" is the processor time of all processes that',
        "took part, user and system, in seconds for each GiB.",
        "",
    ]
    first_machine = next(iter(results.values()))["machine"]
    description = described(first_machine)
    lines += [
        description,
        *commits_note({result.get("commit") for result in results.values()}),
        *load_note([result["machine"].get("load_average") for result in results.values()], first_machine["cpus"]),
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
    for result in results.values():
        for target in targets_of(result):
            sign = "≥" if target.at_least else "≤"
            verdict = "met" if target.met else "**missed**"
            unit = "\N{MULTIPLICATION SIGN}" if target.unit == "x" else f" {target.unit}"
            lines.append(f"| {target.what} | {target.value:.3g}{unit} | {sign} {target.bound:g}{unit} | {verdict} |")
    for result in results.values():
        lines += [
            "",
            f"## {result['title']}",
            "",
            f"`bench/{result['name']}.py`{size_of(result)}{commit_of(result)}",
            "",
        ]
        if described(result["machine"]) != description:
            lines += [described(result["machine"]), ""]
        if result["rows"]:
            lines += [
                "| | median | from | to | GiB/s | CPU s/GiB |",
                "| --- | ---: | ---: | ---: | ---: | ---: |",
            ]
        for row in result["rows"]:
            label = f"{row['group']}: {row['label']}" if row["group"] else row["label"]
            times = " | ".join(f"{value:.4g} s" for value in (row["median_seconds"], *extremes(row["seconds"])))
            cpu = f"{row['cpu_seconds_per_gib']:.3g}" if "cpu_seconds_per_gib" in row else ""
            speed = f"{row['gib_per_second']:.2f}" if "gib_per_second" in row else ""
            lines.append(f"| {label} | {times} | {speed} | {cpu} |")
        if "notes" in result:
            lines += ["", *result["notes"]]
        if "by_size" in result:
            lines += ["| | peak of extra memory | growth of the page cache |", "| --- | ---: | ---: |"]
        for size, by_doing in result.get("by_size", {}).items():
            for doing, growth in by_doing.items():
                lines.append(f"| {size}: {doing} | {growth['peak_mib']:.0f} MiB | {growth['cached_mib']:.0f} MiB |")
    return "\n".join(lines) + "\n"


def described(machine: dict[str, Any]) -> str:
    """Returns a sentence that names the day and describes the machine."""
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return (
        f"{machine['date']}: {machine['cpus']} cores, {machine['memory_bytes'] / GIB:.0f} GiB of memory, "
        f"{machine['file_system']}, Linux {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}{gpu}."
    )


def size_of(result: dict[str, Any]) -> str:
    return f", {result['size_bytes'] / GIB:g} GiB" if result["size_bytes"] else ""


def commit_of(result: dict[str, Any]) -> str:
    return f", at commit {result['commit']}" if result.get("commit") else ""


def commits_note(commits: set[str | None]) -> list[str]:
    if len(commits) == 1:
        return []
    return [
        "The sections were not all measured at the same commit, so their figures may contradict each other. Some",
        "sections name the commit at which they were measured. The others are older.",
    ]


def load_note(loads: list[float | None], cpus: int) -> list[str]:
    """Returns a sentence on other programs that ran meanwhile. A load of None means that it was not measured."""
    known = [load for load in loads if load is not None]
    if max(known, default=0) <= cpus + 1 and None not in loads:
        return []
    where = "" if None not in loads else ", where it was noted"
    return [f"The machine was not idle: its load averages were {min(known):.1f} to {max(known):.1f}{where}."]


def extremes(values: list[float]) -> tuple[float, float]:
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
    """Draws how resident memory, with the page cache on top, grows in a save (left column) and in a resume (right)."""
    seconds = {row["label"]: row["median_seconds"] for row in result["rows"]}
    figure, rows = pyplot.subplots(2, 2, figsize=(9, 4.5), sharey=True, sharex="col")
    for row, kind in zip(rows, ("DeepSpeed", "zckpt"), strict=True):
        for axes, doing in zip(row, ("save", "resume"), strict=True):
            label = f"{doing}: {kind}"
            samples = result["samples"][label]
            before = [sample for sample in samples if sample[0] < 0][-1]
            samples.append([1e3, *samples[-1][1:]])  # draws the last sample up to the right edge
            times = [sample[0] for sample in samples]
            resident, cached = ([max(0, sample[i] - before[i]) / GIB for sample in samples] for i in (1, 2))
            axes.stackplot(
                times, resident, cached, labels=("resident, both ranks", "page cache"), colors=(OURS, THEIRS)
            )
            axes.axvline(seconds[label], color="black", linewidth=0.8, linestyle=":")
            axes.set_title(f"{kind}: {doing}, {seconds[label]:.1f} s", fontsize=10, loc="left")
            axes.set_xlim(0, 1.3 * max(seconds[f"{doing}: {library}"] for library in ("DeepSpeed", "zckpt")))
            axes.spines[["top", "right"]].set_visible(False)
    for axes in rows[:, 0]:
        axes.set_ylabel("GiB more than before")
    for axes in rows[-1]:
        axes.set_xlabel("seconds")
    rows[1, 0].legend(fontsize=8, loc="upper right", frameon=False)
    save(figure, file)


def draw_many_ranks(result: dict[str, Any], file: Path) -> None:
    """Draws how what a rank does grows with the number of ranks."""
    threads = result["threads"]
    ranks = [each["ranks"] for each in threads]
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 5.5), sharex=True)

    def line(axes: Any, kind: str, values: list[float]) -> None:
        colour = {"rank 0": OURS, "inner rank": "#ff7f0e", "leaf": "#2ca02c"}[kind]
        axes.plot(ranks, values, marker="o", color=colour, label=kind)

    for kind in ("rank 0", "inner rank", "leaf"):
        write, restore = ([each["phases"][what][kind] for each in threads] for what in ("write", "restore"))
        line(panels[0][0], kind, [of["sent_bytes"] / 1024 for of in write])
        line(panels[0][1], kind, [of["received_bytes"] / 1024 for of in write])
        line(panels[1][0], kind, [of["connections"] for of in restore])
        both = zip(write, restore, strict=True)
        line(panels[1][1], kind, [sum(sum(of["store_of_checkpoints"].values()) for of in pair) for pair in both])
    titles = ("KiB sent in a write", "KiB received in a write", "connections", "calls of the store, write and restore")
    for axes, title in zip(panels.flat, titles, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(number) for number in ranks])
        axes.spines[["top", "right"]].set_visible(False)
    for top, bottom in zip(*panels, strict=True):
        top.set_yscale("log")
        bottom.set_ylim(0)
        bottom.set_xlabel("ranks")
    panels[0][0].legend(fontsize=8, frameon=False)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
