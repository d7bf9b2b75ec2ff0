"""Compares what DeepSpeed's own checkpoints and zckpt do in the same situations, with real ranks.

    python bench/coverage.py [--only REGEX] [--output DIR]

The table has a row for each situation. For each row and library there are two runs in fresh processes. The first run
trains six steps and calls ``engine.save_checkpoint``. The second run makes an engine with other random weights, calls
``engine.load_checkpoint`` and trains on. For zckpt the same script runs after ``zckpt.attach(engine)``.

``zckpt.write`` records the state of the engine before the save, after the load and after further steps, for both
libraries alike. (The tests compare these records with what DeepSpeed's own functions return.) The records are compared
bit for bit: master weights, moments, weights in the compute dtype, frozen weights, buffers, the settings and the step
of each parameter, counters and learning rates.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

import zckpt  # noqa: E402
from tests.support.cluster import Cluster, Outcome  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("DeepSpeed", "zckpt")
STEPS, AFTER = 6, 6
TAG = "tag"
MODULE = "coverage"  # the name by which the ranks import this file

GPT2: dict[str, Any] = {"model": "gpt2", "scheduler": True}
ODD: dict[str, Any] = {"model": "odd", "groups": True}
Z1, Z2, Z3 = ({"stage": stage, **GPT2} for stage in (1, 2, 3))
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
NVME: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}}
WIDE: dict[str, Any] = {"stage": 3, "model": "thawed", "groups": True, "scheduler": True, "sub_group_size": 500000}
BIG: dict[str, Any] = {**WIDE, "groups": False}
UNIVERSAL: dict[str, Any] = {"config": {"checkpoint": {"load_universal": True}}}


@dataclass
class Row:
    """One situation, which is one row of the table."""

    group: str
    change: str
    """The title of the row, which says how the run that loads differs from the run that saves."""
    there: dict[str, Any]
    """The arguments of ``make_engine`` in the run that saves."""
    here: dict[str, Any] | None = None
    """The arguments of ``make_engine`` in the run that loads, or None if they are the same as in ``there``."""
    ranks: int = 2
    """The number of ranks of the run that loads. The run that saves has two."""
    options: dict[str, Any] = field(default_factory=dict)
    """The keyword arguments of ``load_checkpoint``."""
    trained: int = 0
    """The number of steps that the engine has trained before it loads."""
    moved: bool = False
    """Whether ``engine.offload_states`` is called before the save."""
    twice: bool = False
    """Whether the same tag is saved twice."""
    universal: bool = False
    """Whether DeepSpeed's checkpoint is converted by ds_to_universal first."""
    damage: Callable[[Path, str], None] | None = None
    kill: tuple[int, str] | None = None
    """The rank that is killed during one more save, and the tag of that save."""
    right: str = "state"
    """The right outcome: "state" or "weights" if these must be equal, or "error" if every rank must raise one."""


# The functions that run on the ranks


def save(directory: str, setup: dict[str, Any], library: str, row: dict[str, Any]) -> list[float]:
    from tests.support.models import train

    engine = make(setup, f"{directory}/swap", library)
    train(engine, STEPS)
    observe(engine, f"{directory}/truth")
    if row["moved"]:
        engine.offload_states()
    for _ in range(2 if row["twice"] else 1):
        engine.save_checkpoint(f"{directory}/saved", tag=TAG)
    if row["moved"]:
        engine.reload_states()
    losses = train(engine, AFTER, STEPS)
    observe(engine, f"{directory}/truth-later")
    return losses


def load(directory: str, setup: dict[str, Any], library: str, row: dict[str, Any]) -> dict[str, Any]:
    from tests.support.models import train

    engine = make(setup, f"{directory}/other", library, seed=1)
    train(engine, row["trained"], 100)
    rank, folder = engine.global_rank, Path(directory)
    try:
        path, _ = engine.load_checkpoint(f"{directory}/saved", **row["options"])
        assert path is not None, "load_checkpoint has returned None"
        failure = ""
    except Exception as error:
        text = str(error).strip().splitlines()
        failure = f"{type(error).__name__}{': ' + text[0] if text else ''}"
    (folder / f"{rank}.partial").write_text(failure)
    (folder / f"{rank}.partial").rename(folder / f"{rank}.loaded")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len(list(folder.glob("*.loaded"))) < row["ranks"]:
        time.sleep(0.05)
    if [file.read_text() for file in folder.glob("*.loaded")] != [""] * row["ranks"]:
        return {}
    observe(engine, f"{directory}/found")
    losses = train(engine, AFTER, STEPS)
    observe(engine, f"{directory}/found-later")
    return {"losses": losses}


def load_and_die(directory: str, setup: dict[str, Any], library: str, victim: int, tag: str) -> None:
    """Loads and saves again. The rank ``victim`` kills itself in the middle of the second file that it writes."""
    from tests.support.models import train

    engine = make(setup, f"{directory}/swap-kill", library)
    engine.load_checkpoint(f"{directory}/saved")
    train(engine, 1, STEPS)
    calls = iter(range(100))

    def half_a_save(state: Any, path: Any, *_: Any, **__: Any) -> None:
        buffer = io.BytesIO()
        save_all(state, buffer)
        time.sleep(8)  # the other rank has written its files by then
        Path(path).write_bytes(buffer.getvalue()[: buffer.tell() // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def half_a_write(fd: int, views: Any, offset: int) -> int:
        if next(calls) == 0:
            return pwritev(fd, views, offset)
        time.sleep(2)
        pwritev(fd, [views[0][: len(views[0]) // 2]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    pwritev, save_all = os.pwritev, torch.save

    def one_then_half(state: Any, path: Any, *arguments: Any, **options: Any) -> None:
        (save_all if next(calls) == 0 else half_a_save)(state, path, *arguments, **options)

    if engine.global_rank == victim:
        patch = ("os.pwritev", half_a_write) if library == "zckpt" else ("torch.save", one_then_half)
        mock.patch(*patch).start()
    engine.save_checkpoint(f"{directory}/saved", tag=tag)


def make(setup: dict[str, Any], swap: str, library: str, seed: int = 0) -> Any:
    from tests.support.models import make_engine

    engine = make_engine(**setup, swap=swap, seed=seed)
    return zckpt.attach(engine) if library == "zckpt" else engine


def observe(engine: Any, path: str) -> None:
    zckpt.write(engine, path, latest=False)
    zckpt.write(engine, f"{path}-weights", parts=["param"], latest=False)


# Damage


def files_of(saved: Path, library: str, rank: int, kind: str) -> list[Path]:
    patterns = {
        ("DeepSpeed", "moments"): f"{TAG}/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        ("DeepSpeed", "swapped"): f"{TAG}/offloaded_tensors/rank{rank:02}/**/exp_avg-*.swp",
        ("DeepSpeed", "all"): f"{TAG}/*zero_pp_rank_{rank}_*.pt",
        ("zckpt", "moments"): f"{TAG}/data-*/rank-{rank:05}/exp_avg.safetensors",
        ("zckpt", "swapped"): f"{TAG}/data-*/rank-{rank:05}/swap.exp_avg.safetensors",
        ("zckpt", "all"): f"{TAG}/data-*/rank-{rank:05}/*",
    }
    return sorted(saved.glob(patterns[library, kind]))


def flip(kind: str) -> Callable[[Path, str], None]:
    def damage(saved: Path, library: str) -> None:
        file = files_of(saved, library, 1, kind)[0]
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 8 * 4 + 3] ^= 0x40  # in the exponent of some number
        file.write_bytes(raw)

    return damage


def cut(saved: Path, library: str) -> None:
    file = files_of(saved, library, 1, "moments")[0]
    os.truncate(file, file.stat().st_size // 2)


def remove(kind: str) -> Callable[[Path, str], None]:
    return lambda saved, library: files_of(saved, library, 1, kind)[0].unlink()


def swap_ranks(saved: Path, library: str) -> None:
    pairs = list(zip(files_of(saved, library, 0, "all"), files_of(saved, library, 1, "all"), strict=True))
    for first, second in pairs:
        aside = first.with_name("aside")
        first.rename(aside)
        second.rename(first)
        aside.rename(second)


class Bomb:
    """An object whose unpickling makes the directory ``marker``."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.makedirs, (self.marker, 0o777, True)


def plant(saved: Path, library: str) -> None:
    """Puts a pickle with code into the file of the moments: a further entry for DeepSpeed, the whole file for zckpt."""
    file, bomb = files_of(saved, library, 1, "moments")[0], Bomb(str(saved.parent / "executed"))
    if library == "zckpt":
        size = file.stat().st_size
        file.write_bytes(pickle.dumps(bomb).ljust(size, b"\0"))
        return
    state = torch.load(file, weights_only=False)
    torch.save({**state, "more": bomb}, file)


RESUME, CHANGE, CONFIG, DISK, DAMAGE = (
    "Resume", "Another topology", "Another configuration", "NVMe offload", "Damage"
)  # fmt: skip
LENIENT = {"load_module_strict": False}
ROWS = [
    Row(RESUME, "ZeRO-1", Z1),
    Row(RESUME, "ZeRO-2", Z2),
    Row(RESUME, "ZeRO-3", Z3),
    Row(RESUME, "ZeRO-3, into an engine that has trained", Z3, trained=1),
    Row(RESUME, "ZeRO-3, optimizer and parameters in CPU memory", {**Z3, **CPU, "offload_param": {"device": "cpu"}}),
    Row(RESUME, "ZeRO-3, saved after offload_states()", {**Z3, "scheduler": False}, moved=True),
    Row(CHANGE, "ZeRO-3, 2 to 1 ranks", Z3, ranks=1),
    Row(CHANGE, "ZeRO-3, 2 to 4 ranks", Z3, ranks=4),
    Row(CHANGE, "ZeRO-2, 2 to 3 ranks", Z2, ranks=3),
    Row(CHANGE, "ZeRO-1 to ZeRO-2", Z1, Z2),
    Row(CHANGE, "ZeRO-3 to ZeRO-2", Z3, Z2),
    Row(CHANGE, "ZeRO-2 to ZeRO-3", Z2, Z3),
    Row(CHANGE, "ZeRO-3, 2 to 1 ranks, weights only (load_optimizer_states=False)", Z3, ranks=1, right="weights",
        options={"load_optimizer_states": False}),
    Row(CHANGE, "ZeRO-3, weights only (load_module_only=True)", Z3, right="weights",
        options={"load_module_only": True}),
    Row(CHANGE, "ZeRO-3, 2 to 3 ranks, DeepSpeed through ds_to_universal, two param groups", {**Z3, "groups": True},
        ranks=3, universal=True),
    Row(CHANGE, "the same, with frozen weights and buffers", {**ODD, "stage": 3}, ranks=3, universal=True),
    Row(CONFIG, "ZeRO-3, another sub_group_size", Z3, {**Z3, "sub_group_size": 3000}),
    Row(CONFIG, "ZeRO-3, one param group becomes two", Z3, {**Z3, "groups": True}),
    Row(CONFIG, "ZeRO-3, some layers are frozen now", Z3, {**Z3, "frozen": True}, options=LENIENT),
    Row(CONFIG, "ZeRO-3, some layers are trained now that were frozen", {**Z3, "frozen": True}, Z3, options=LENIENT),
    Row(CONFIG, "ZeRO-2, round_robin_gradients turned on", Z2, {**Z2, "round_robin_gradients": True}),
    Row(CONFIG, "ZeRO-3, optimizer: device to CPU", Z3, {**Z3, **CPU}),
    Row(CONFIG, "ZeRO-3, optimizer: CPU to NVMe", {**BIG, **CPU}, {**BIG, **NVME}),
    Row(CONFIG, "ZeRO-3, optimizer: NVMe to CPU", {**BIG, **NVME}, {**BIG, **CPU}),
    Row(CONFIG, "ZeRO-3, bf16 to fp32", Z3, {**Z3, "dtype": "fp32"}),
    Row(DISK, "NVMe, resume", {**WIDE, **NVME}),
    Row(DISK, "NVMe, all of the model too small to be swapped", {**Z3, **NVME}),
    Row(DISK, "NVMe, into an engine that has trained", {**WIDE, **NVME}, trained=1),
    Row(DISK, "NVMe, 2 to 1 ranks", {**WIDE, **NVME}, ranks=1),
    Row(DISK, "NVMe, the same tag saved twice", {**WIDE, **NVME}, twice=True),
    Row(DAMAGE, "a bit flipped in a rank's optimizer state", Z3, damage=flip("moments"), right="error"),
    Row(DAMAGE, "a bit flipped in a file of NVMe offload", {**WIDE, **NVME}, damage=flip("swapped"), right="error"),
    Row(DAMAGE, "a rank's optimizer state cut in half", Z3, damage=cut, right="error"),
    Row(DAMAGE, "a rank's optimizer state missing", Z3, damage=remove("moments"), right="error"),
    Row(DAMAGE, "a file of NVMe offload missing", {**WIDE, **NVME}, damage=remove("swapped"), right="error"),
    Row(DAMAGE, "the files of two ranks swapped", Z3, damage=swap_ranks, right="error"),
    Row(DAMAGE, "a pickle with code in a rank's optimizer state", Z3, damage=plant, right="error"),
    Row(DAMAGE, "rank 1 killed while it saves a new tag; then load `latest`", Z3, kill=(1, "new")),
    Row(DAMAGE, "rank 0 killed while it saves the same tag; then load `latest`", Z3, kill=(0, TAG)),
]  # fmt: skip


# The program


def measure(cluster: Cluster, row: Row, library: str, cache: dict[str, Path], directory: Path) -> str:
    """Returns the outcome in a few words. It begins with "+" if the outcome is right and with "-" if it is not."""
    row_data = {
        "moved": row.moved,
        "twice": row.twice,
        "options": row.options,
        "trained": row.trained,
        "ranks": row.ranks,
    }
    key = repr((row.there, row.moved, row.twice, library))
    if key not in cache:
        cache[key] = Path(tempfile.mkdtemp(dir=directory))
        outcomes = cluster.outcomes(f"{MODULE}:save", 2, str(cache[key]), row.there, library, row_data)
        if any(outcome.failed for outcome in outcomes):
            shutil.rmtree(cache[key])
            del cache[key]
            return f"- saving: {died(outcomes) or error_line(outcomes)}"
    place = Path(tempfile.mkdtemp(dir=directory))
    shutil.copytree(cache[key], place, dirs_exist_ok=True)
    saved, here = place / "saved", row.here or row.there
    if row.universal and library == "DeepSpeed":
        convert(saved)
        here = {**here, **UNIVERSAL}
    if row.damage:
        row.damage(saved, library)
    if row.kill:
        outcomes = cluster.outcomes(f"{MODULE}:load_and_die", 2, str(place), row.there, library, *row.kill, grace=8)
        assert outcomes[row.kill[0]].signal == signal.SIGKILL, outcomes
    outcomes = cluster.outcomes(f"{MODULE}:load", row.ranks, str(place), here, library, row_data, timeout=60, grace=12)
    text = verdict(row, place, outcomes)
    shutil.rmtree(place)
    return text


def convert(saved: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(saved / TAG)]
    command += ["--output_folder", str(saved / "universal"), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (saved / "latest").write_text("universal")
    (saved / "latest_universal").write_text("universal")


def verdict(row: Row, place: Path, outcomes: list[Outcome]) -> str:
    executed = "; **the code was executed**" if (place / "executed").exists() else ""
    if crash := died(outcomes):
        return f"- **{crash}**{executed}"
    failures = {rank: read(place / f"{rank}.loaded") for rank in range(row.ranks)}
    failed = [rank for rank, text in failures.items() if text]
    if failed:
        first = next((text for text in failures.values() if text and "RankError" not in text), failures[failed[0]])
        hanging = [rank for rank, text in failures.items() if text is None]
        text = f"error: {shorten(str(first))}"
        if len(failed) < row.ranks:
            text += f"; on rank {', '.join(map(str, failed))} alone{', and the other hangs' if hanging else ''}"
        fine = row.right == "error" and len(failed) == row.ranks and not executed
        return f"{'+' if fine else '-'} {text}{executed}"
    if None in failures.values() or not (place / "found" / "manifest.msgpack").exists():
        return f"- {error_line(outcomes)}{executed}"
    wrong = compare(row, place)
    if row.right == "error":
        what = ", ".join(wrong) or "nothing else"
        return f"- **loaded, and no error**: {what}{executed}"
    if wrong:
        return f"- **wrong, and no error**: {', '.join(wrong)}"
    if row.right == "weights":
        return "+ equal"
    return f"+ equal{later(row, place)}"


def compare(row: Row, place: Path) -> list[str]:
    """Returns names for the parts of the state that differ between the engine that saved and the one that loaded."""
    if row.right == "weights":
        return [] if same(*loaded(place, "-weights")) else ["weights"]
    truth, loaded_checkpoint = (zckpt.open(place / name) for name in ("truth", "found"))
    wrong = []
    shared_keys = truth.keys() & loaded_checkpoint.keys()
    names = {key.partition("/")[2] for key in shared_keys if key.startswith("master/")}
    for part, label in (("master", "masters"), ("exp_avg", "moments"), ("param", "frozen weights")):
        there, here = loaded(place, "", part)  # the prefix exp_avg selects exp_avg_sq, too
        if row.here and row.here.get("frozen") != row.there.get("frozen"):
            there, here = ({key: tensors[key] for key in tensors if key in shared_keys} for tensors in (there, here))
        if not there.keys() <= here.keys():
            wrong.append(f"{label} lost")
        elif not same(there, here):
            wrong.append(label)
    weights = loaded(place, "-weights")
    if (row.here or row.there).get("dtype") == "fp32":  # nothing is rounded then
        weights[0] |= {key.replace("master/", "param/"): master for key, master in truth.load("master/*").items()}
    if not same(*weights) and "masters" not in wrong:
        wrong.append("weights")
    if not same(*loaded(place, "", "buffer/")):
        wrong.append("buffers")
    trees = [settings_of(checkpoint, names) for checkpoint in (truth, loaded_checkpoint)]
    there, here = (tree["settings"] for tree in trees)
    for name in names:  # FusedAdam and the Adam for the CPU name some settings that the other does not have
        shared_settings = there[name].keys() & here[name].keys()
        for settings in (there, here):
            settings[name] = {key: settings[name][key] for key in shared_settings}
    return wrong + [name for name in trees[0] if trees[0][name] != trees[1][name]]


def loaded(place: Path, suffix: str, prefix: str = "") -> list[dict[str, torch.Tensor]]:
    """Returns two dictionaries of tensors: those of the engine that saved, and those of the engine that loaded."""
    checkpoints = [zckpt.open(place / f"{name}{suffix}") for name in ("truth", "found")]
    return [checkpoint.load([key for key in checkpoint if key.startswith(prefix)]) for checkpoint in checkpoints]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def settings_of(checkpoint: zckpt.Checkpoint, names: set[str]) -> dict[str, Any]:
    tree = checkpoint.state["engine"]
    groups, states = tree["optimizer"]["param_groups"], tree["optimizer"]["states"]
    plain = [{k: v for k, v in group.items() if k not in ("params", "step", "lr")} for group in groups]
    return {
        "settings": {n: s for g, s in zip(groups, plain, strict=True) for n in g["params"] if n in names},
        "learning rates": {n: g["lr"] for g in groups for n in g["params"] if n in names},
        "step": {int(state["values"]["step"]) for state in states if "step" in state["values"]},
        "counters": tree["counters"]["global_steps"],
        "scheduler": tree["scheduler"],
    }


def later(row: Row, place: Path) -> str:
    """Returns words on whether the training went on as in the run that never stopped."""
    if row.here or row.ranks != 2:
        return ""  # another configuration or world size trains differently
    truth, loaded_checkpoint = (zckpt.open(place / f"{name}-later") for name in ("truth", "found"))
    there, here = truth.load("master/*"), loaded_checkpoint.load("master/*")
    if same(there, here):
        return f", also after {AFTER} more steps"
    most = max(float((there[key] - here[key]).abs().max()) for key in there)
    return f"; after {AFTER} more steps masters differ, by up to {most:.0e}"


def read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def died(outcomes: list[Outcome]) -> str:
    signals = [f"{signal.Signals(o.signal).name} on rank {o.rank}" for o in outcomes if o.signal]
    return f"crash: {signals[0]}" if signals else ""


def error_line(outcomes: list[Outcome]) -> str:
    errors = [str(o.error).strip().splitlines()[-1] for o in outcomes if o.failed]
    errors = [error for error in errors if "still running" not in error] or errors
    return f"error: {shorten(errors[0])}" if errors else "error: no outcome"


def shorten(text: str, most: int = 90) -> str:
    text = re.sub(r"/\S*/zckpt-coverage-[^/]*/[^/]*/", "", text.replace("|", "/").replace("\n", " "))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def table(results: dict[str, list[str]]) -> str:
    import deepspeed

    lines = [
        "# DeepSpeed's own checkpoints and zckpt in the same situations",
        "",
        "Each row saves the state of a run with `engine.save_checkpoint` and loads it with",
        "`engine.load_checkpoint`, once in DeepSpeed's own format and once with zckpt attached. Each cell was run",
        "in new processes on the CPU. ✓ marks a right outcome, and ✗ a wrong one. An outcome is right if the state",
        "is equal, bit for bit, or, if files were damaged, if every rank raises an error. `make bench-coverage`",
        "makes this page.",
        "",
        f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}, Python {platform.python_version()}.",
    ]
    group = ""
    for row in ROWS:
        if row.change not in results:
            continue
        if row.group != group:
            group = row.group
            lines += ["", f"## {group}", "", f"| | DeepSpeed {deepspeed.__version__} | zckpt |", "|---|---|---|"]
        marked = [f"{'✓' if cell[0] == '+' else '✗'} {cell[2:]}" for cell in results[row.change]]
        lines.append(f"| {row.change} | {marked[0]} | {marked[1]} |")
    return "\n".join(lines).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="these rows; others stay as they are in DIR")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write coverage.json and coverage.md here")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    rows = [row for row in ROWS if re.search(options.only, f"{row.group} {row.change}")]
    cluster, start = Cluster(), time.monotonic()
    cache: dict[str, Path] = {}
    results: dict[str, list[str]] = {}
    if options.output and options.only and (options.output / "coverage.json").exists():
        results = json.loads((options.output / "coverage.json").read_text())
    with tempfile.TemporaryDirectory(prefix="zckpt-coverage-") as directory:
        try:
            for row in rows:
                cells = [measure(cluster, row, library, cache, Path(directory)) for library in LIBRARIES]
                results[row.change] = cells
                if options.output:
                    keep(results, options.output)
                print(f"{row.group}: {row.change}", *(f"    {cell}" for cell in cells), sep="\n", flush=True)
        finally:
            cluster.close()
    right = [sum(cells[i][0] == "+" for cells in results.values()) for i in (0, 1)]
    print(f"right: DeepSpeed {right[0]}, zckpt {right[1]}, of {len(results)}; {time.monotonic() - start:.0f} s")
    return 0


def keep(results: dict[str, list[str]], directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "coverage.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    (directory / "coverage.md").write_text(table(results) + "\n")


if __name__ == "__main__":
    sys.exit(main())
