"""Compares many small tensors with few large tensors of as many bytes, on one rank, and cut over 8 ranks.

    python bench/small_tensors.py [--size 3GiB] [--dir DIR] [--runs 5]

Each small tensor, or each piece of one, has 20 kB. On one rank, a state dict is written and loaded, in turns with
torch.save, safetensors and DCP. Each load is the first one of a new process, as in a resume. At 8 ranks, the tensors
are cut as ZeRO-3 cuts them. Every rank is a process that writes its own pieces, as in training, and a further process
commits. Loading is done by a single process, which reads all pieces back into the memory that they come from.

The profile says where the processor time of the small tensors goes, which other programs on the machine change less
than the time that passes. A thread looks every 2 ms in which module the main thread is. The time of all other threads,
which read and write, is one figure.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
import tracemalloc
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import zckpt
from common import (
    MIB,
    Contestant,
    Ranks,
    Result,
    bring_into_cache,
    cut,
    drop_from_cache,
    empty_like,
    fastest,
    fill,
    interleaved,
    loading,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
    write_rank,
)
from peers import SAVES, dcp_load, safetensors_load, safetensors_pread, torch_load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.pool import Pool

    Tensors = dict[str, torch.Tensor]

RANKS = 8
PIECE_BYTES = 20_000
LARGER = 1000
"""How many times as many bytes a large tensor has."""
SMALL, LARGE = "small tensors", "large tensors"
PACKAGE = f"{Path(zckpt.__file__).parent}/"
STEPS = {
    "adapter": (
        "checkpoint/write", "checkpoint/writing/", "checkpoint/restore", "checkpoint/restoring/",
        "checkpoint/state_dict", "checkpoint/background", "engines/", "adapters/", "plan/inventory",
        "plan/lineage", "plan/machines", "offloading/", "transfer/memory",
    ),
    "agreement": ("ranks/", "plan/replicas", "plan/together"),
    "layout": ("plan/data_files", "plan/writes", "geometry", "orders"),
    "header": ("format/data_file", "format/names"),
    "trees": ("format/tree", "format/packed"),
    "index": ("plan/catalog", "format/index", "format/manifest", "format/fields"),
    "targets": ("checkpoint/listing/", "checkpoint/reading/", "checkpoint/open", "plan/select"),
    "read plan": ("plan/reshard", "plan/reads"),
    "transfer": ("transfer/", "storage/", "system/", "format/digest", "progress"),
}  # fmt: skip
"""The steps of the profile, and how the paths begin of the modules of zckpt that do them."""
RANKS_OF: dict[str, Ranks] = {}
"""The fragments that each rank holds, by label. It is global so that the forked processes inherit it."""


def make_state(nbytes: int, tensor_bytes: int) -> Tensors:
    count = max(nbytes // tensor_bytes, 1)
    return fill({f"layers.{i // 64}.experts.{i % 64}.weight": (tensor_bytes // 4,) for i in range(count)})


# One rank


def write_state_dict(state: Tensors, path: Path) -> None:
    zckpt.write_state_dict(state, path, latest=False)


def load(path: Path) -> Tensors:
    return zckpt.open(path).load("param/*")


def one_key(path: Path, key: str) -> None:
    zckpt.open(path).load(key)


def load_first(
    label: str, path: Path, few: Path, prepare: Callable[[Path], object], function: Callable[[Path], object]
) -> Contestant:
    """Returns a contestant that loads ``path`` as the first thing that a new process loads, as a resume does. A process
    that has loaded such tensors before may still have memory for them, from some libraries and not from others. The
    process has loaded ``few`` tensors before, so that the time to import modules does not count."""
    pools: list[Pool] = []
    pids: list[int] = []

    def before() -> None:
        pools.append(multiprocessing.get_context("spawn").Pool(1))
        pids[:] = [pools[0].apply(os.getpid)]
        pools[0].apply(keep, (function, few))
        prepare(path)

    def after() -> None:
        drop_from_cache(path)
        pools.pop().terminate()

    return Contestant(label, lambda: pools[0].apply(keep, (function, path)), before, after, pids=pids)


KEPT: list[object] = []
"""What this process has loaded."""


def keep(function: Callable[[Path], object], path: Path) -> None:
    KEPT.append(function(path))


LOADS: dict[str, tuple[str, Callable[[Path], object]]] = {
    SMALL: (SMALL, load),
    LARGE: (LARGE, load),
    "torch.save": ("torch.save", torch_load),
    "safetensors, map copied": ("safetensors", safetensors_load),
    "safetensors, pread": ("safetensors", safetensors_pread),
}
"""The directory or file that each contestant loads, and the function that loads it."""


def on_one_rank(result: Result, directory: Path) -> None:
    size, runs = result.options.size, result.options.runs
    states = {SMALL: make_state(size, PIECE_BYTES), LARGE: make_state(size, LARGER * PIECE_BYTES)}
    nbytes = total_bytes(states[SMALL])

    def contestant(label: str, save: Callable[[Tensors, Path], None], state: Tensors) -> Contestant:
        path = directory / label
        return Contestant(label, partial(save, state, path), partial(remove, path))

    peers = {label: contestant(label, save, states[SMALL]) for label, save in SAVES.items()}
    dcp = peers.pop("DCP")  # It takes ten times as long as the others, so it has one round of its own.
    rounds = interleaved(
        [*(contestant(label, write_state_dict, state) for label, state in states.items()), *peers.values()], runs
    )
    rounds |= interleaved([dcp], 1)
    result.add(rounds, nbytes, "1 rank, write")
    compare(result, rounds, "1 rank, write", [*SAVES])
    del states[LARGE]
    figures = profile(states[SMALL], directory)
    result.extra["notes"] = table(figures)
    for action in ("write", "load", "load into memory"):
        result.at_most(f"memory for each tensor, {action}", figures[action]["bytes"], 1024, "bytes")
    few = make_state(MIB, PIECE_BYTES)
    for name, save in (*SAVES.items(), (SMALL, write_state_dict), (LARGE, write_state_dict)):
        save(few, directory / f"few in {name}")
    for group, prepare in (("1 rank, load cold", drop_from_cache), ("1 rank, load cached", bring_into_cache)):
        loads = [
            load_first(label, directory / name, directory / f"few in {name}", prepare, function)
            for label, (name, function) in LOADS.items()
        ]
        rounds = interleaved(loads, runs)
        rounds |= interleaved([loading("DCP", directory / "DCP", prepare, dcp_load(states[SMALL]))], 1)
        result.add(rounds, nbytes, group)
        compare(result, rounds, group, [label for label in rounds if label not in (SMALL, LARGE)])
    key = f"param/{list(states[SMALL])[len(states[SMALL]) // 2]}"
    path = directory / SMALL
    looks = [loading("open", path, drop_from_cache, zckpt.open)]
    looks.append(loading("open, one key", path, drop_from_cache, partial(one_key, key=key)))
    rounds = interleaved(looks, max(runs, 5))
    result.add(rounds, None, "1 rank")
    for label, timings in rounds.items():
        value = sorted(timing.seconds for timing in timings)[len(timings) // 2] * 1e3
        result.at_most(f"{label}, {len(states[SMALL]):,} tensors", value, 50, "ms")


def compare(result: Result, rounds: Any, group: str, peers: Sequence[str]) -> None:
    result.at_least(f"{group}, small against large tensors", speedup(rounds, SMALL, over=LARGE), 0.6)
    best = fastest(rounds, peers)
    result.at_least(f"{group}, against the best peer ({best})", speedup(rounds, SMALL, over=best), 1.5)


# Where the time goes


class Profile(threading.Thread):
    """Adds up the seconds of processor time that the main thread spends in each step while the context is open."""

    def __enter__(self) -> Profile:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._over = threading.Event()
        self._others = self._of_other_threads()
        gc.callbacks.append(self._note_collection)
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()
        gc.callbacks.remove(self._note_collection)
        self.seconds["in other threads"] = self._of_other_threads() - self._others - self._own

    def _of_other_threads(self) -> float:
        return time.process_time() - time.thread_time()

    def _note_collection(self, phase: str, info: object) -> None:
        self.seconds["garbage collection, in these"] += time.thread_time() * (1 if phase == "stop" else -1)

    def run(self) -> None:
        main = threading.main_thread().ident or 0
        clock = time.pthread_getcpuclockid(main)
        last = time.clock_gettime(clock)
        while not self._over.wait(0.002):
            frame = sys._current_frames().get(main)
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            module = frame.f_code.co_filename.removeprefix(PACKAGE) if frame is not None else ""
            step = next((step for step, modules in STEPS.items() if module.startswith(modules)), "other")
            now = time.clock_gettime(clock)
            self.seconds[step] += now - last
            last = now
        self._own = time.thread_time()


def profile(state: Tensors, directory: Path) -> dict[str, dict[str, float]]:
    """Returns, for each action, the microseconds of processor time that each step takes for each tensor, and the most
    bytes of Python's objects and columns, for each tensor, at a time."""
    path, out = directory / SMALL, {f"param/{name}": tensor for name, tensor in empty_like(state).items()}
    model = torch.nn.Module()
    for number, tensor in enumerate(state.values()):
        model.register_parameter(f"weight{number}", torch.nn.Parameter(tensor))
    engine = zckpt.TrainState(model, torch.optim.SGD(model.parameters()))
    actions: dict[str, Callable[[], object]] = {
        "write": partial(write_state_dict, state, path),
        "load": partial(load, path),
        "load into memory": lambda: zckpt.open(path).load(out=out),
        "load_into": lambda: zckpt.open(path).load_into(state),
        "open": partial(zckpt.open, path),
        "write an engine": lambda: zckpt.write(engine, directory / "engine", overwrite=True),
        "restore": lambda: zckpt.restore(engine, directory / "engine"),
    }
    figures: dict[str, dict[str, float]] = {}
    for action, function in actions.items():
        for traced in (False, True):
            if action == "write":
                remove(path)
            drop_from_cache(directory)
            if traced:
                # The thread of a profile would keep frames, and what they refer to, for longer than the call does.
                tracemalloc.start()
                kept = function()
                figures[action]["bytes"] = tracemalloc.get_traced_memory()[1] / len(state)
                tracemalloc.stop()
            else:
                with Profile() as seen:
                    kept = function()
                figures[action] = {step: of_step / len(state) * 1e6 for step, of_step in seen.seconds.items()}
            del kept
        listed = ", ".join(f"{step} {value:.1f}" for step, value in figures[action].items())
        print(f"  us of processor time for each tensor, {action}: {listed}", flush=True)
    return figures


def table(figures: dict[str, dict[str, float]]) -> list[str]:
    """Returns the profile as a table in Markdown."""
    rows = dict.fromkeys(step for of_action in figures.values() for step in of_action)
    return [
        f"| microseconds of processor time for each tensor | {' | '.join(figures)} |",
        f"| --- |{' ---: |' * len(figures)}",
        *(
            f"| {row} | {' | '.join(f'{of_action.get(row, 0):.1f}' for of_action in figures.values())} |"
            for row in rows
        ),
    ]


# 8 ranks


def take_fragments(rank: int) -> None:
    """Moves the fragments of a rank to memory of its own process, into one flat buffer, as ZeRO-3 has them. Before the
    system writes from a page by direct I/O, it would copy the page if the page were shared since the fork."""
    for ranks in RANKS_OF.values():
        tensors = [fragment.data for fragment in ranks[rank] if isinstance(fragment.data, torch.Tensor)]
        parts = torch.cat(tensors).split([tensor.numel() for tensor in tensors])
        ranks[rank] = [fragment._replace(data=part) for fragment, part in zip(ranks[rank], parts, strict=True)]


def write(path: Path, label: str, pools: Sequence[Pool]) -> None:
    def write_all(*place: str) -> list[tuple[bytes, bytes]]:
        written = [pool.apply_async(write_data_files, (label, *place, rank)) for rank, pool in enumerate(pools)]
        return [result.get() for result in written]

    write_checkpoint(path, RANKS_OF[label], write_all)


def write_data_files(label: str, path: str, save_id: str, rank: int) -> tuple[bytes, bytes]:
    return write_rank(path, save_id, RANKS_OF[label], rank)


def load_pieces(path: Path, out: Tensors) -> None:
    zckpt.open(path).load("param/*", out=out)


def on_ranks(result: Result, directory: Path) -> None:
    size, runs = result.options.size, result.options.runs
    bytes_of = {SMALL: RANKS * PIECE_BYTES, LARGE: RANKS * LARGER * PIECE_BYTES}
    states = {
        label: {f"param/{name}": tensor for name, tensor in make_state(size, tensor_bytes).items()}
        for label, tensor_bytes in bytes_of.items()
    }
    nbytes = total_bytes(states[SMALL])
    paths = {label: directory / label for label in states}
    RANKS_OF.update({label: cut(state, RANKS) for label, state in states.items()})
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        pools = [stack.enter_context(context.Pool(1, take_fragments, (rank,))) for rank in range(RANKS)]
        pids = [process.pid for process in multiprocessing.active_children() if process.pid]
        writes = [
            Contestant(label, partial(write, path, label, pools), partial(remove, path), pids=pids)
            for label, path in paths.items()
        ]
        rounds = interleaved(writes, runs)
    result.add(rounds, nbytes, f"{RANKS} ranks, write")
    value = speedup(rounds, SMALL, over=LARGE)
    result.at_least(f"{RANKS} ranks, write, small against large tensors", value, 0.6)
    for group, prepare in (("load cold", drop_from_cache), ("load cached", bring_into_cache)):
        contestants = [
            loading(label, path, prepare, partial(load_pieces, out=states[label])) for label, path in paths.items()
        ]
        rounds = interleaved(contestants, runs)
        result.add(rounds, nbytes, f"{RANKS} ranks, {group}")
        value = speedup(rounds, SMALL, over=LARGE)
        result.at_least(f"{RANKS} ranks, {group}, small against large tensors", value, 0.6)


def main() -> None:
    options = parse_options(__doc__)
    result = Result("small_tensors", "Many small tensors", options)
    for part, copies in ((on_one_rank, 6), (on_ranks, 2)):
        with workspace(options, copies * options.size) as directory:
            part(result, directory)
    result.finish()


if __name__ == "__main__":
    main()
