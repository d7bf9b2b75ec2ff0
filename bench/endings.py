"""Ends many jobs of two ranks, with zckpt and with DeepSpeed alone, and counts the exit statuses of their processes.

    python bench/endings.py [--jobs 1000] [--at-once 6] [--hold NAME] [--only zckpt] [--results DIR]

A process whose work is done may still be aborted at its end, while a thread of C++ code needs the interpreter, so that
its launcher takes the job for a failed one. This is rare, and more likely on a busy machine. So several jobs run at
once, the contestants in turns. Each rank makes a tiny engine, trains a step, saves, and comes to its end at once. The
ranks are forked from a process that has imported torch and DeepSpeed. They end as any script does.

``--hold`` starves the threads with ``NAME`` in their names in every process: they run only when a processor has nothing
else to do. The threads of gloo have "pt_gloo" in their names, and those of zckpt "zckpt".
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")

from tests.support import ops  # noqa: E402
from tests.support.cluster import die_with_parent, held_port  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS = 2
JOB_SECONDS = 600
"""The ranks of a job are killed after so many seconds."""
LINES = 8
"""How many different lines of the ranks of a contestant are printed."""
STOCK = "DeepSpeed"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def save(engine: Any, run: str) -> None:
    import zckpt

    zckpt.attach(engine).save_checkpoint(run)


def save_in_background(engine: Any, run: str) -> None:
    import zckpt

    zckpt.attach(engine, background=True).save_checkpoint(run)


def watch_signals(engine: Any, run: str) -> None:
    import zckpt

    zckpt.on_preemption(engine)
    zckpt.write(engine, f"{run}/step1", background=True)


def offload(engine: Any, run: str) -> None:
    import zckpt

    zckpt.offload(engine, f"{run}/scratch", background=True)
    zckpt.reload(engine, parts=["master"])
    zckpt.write(engine, f"{run}/step1", background=True)


CONTESTANTS: dict[str, Callable[[Any, str], None]] = {
    "zckpt, save": save,
    "zckpt, save in the background": save_in_background,
    "zckpt, on_preemption": watch_signals,
    "zckpt, offload": offload,
}
"""What a rank does before it ends. ``STOCK`` takes turns with each of these."""


def run_rank(name: str, rank: int, port: int, run: str, hold: str) -> None:
    """Runs in a forked process, which ends as soon as this returns."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    if name == STOCK:
        engine.save_checkpoint(run)
    else:
        CONTESTANTS[name](engine, run)
    if hold:
        starve(hold)


def starve(hold: str) -> None:
    """Lets the threads of this process with ``hold`` in their names run only on processors that are idle otherwise."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # The thread has ended.
            name = names.get(int(task.name), (task / "comm").read_text())
            if hold in name and int(task.name) != os.getpid():
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


@dataclass
class Job:
    """A job that runs in ``directory``."""

    name: str
    directory: Path
    port: contextlib.AbstractContextManager[int]
    deadline: float
    pids: list[int] = field(default_factory=list)
    statuses: dict[int, str] = field(default_factory=dict)

    def has_ended(self) -> bool:
        for pid in self.pids:
            if pid not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    self.statuses[pid] = f"status {code}" if code >= 0 else signal.Signals(-code).name
                elif time.monotonic() > self.deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    self.statuses[pid] = "hung"
        return len(self.statuses) == len(self.pids)

    def lines(self) -> Iterator[str]:
        """Yields the lines that the ranks have printed, with N for each number."""
        for rank in range(RANKS):
            for line in (self.directory / f"{rank}.out").read_text(errors="replace").splitlines():
                yield re.sub(r"\d+", "N", line)


@dataclass
class Counts:
    """How the jobs of one contestant have ended."""

    statuses: Counter[str] = field(default_factory=Counter)
    """The number of jobs by the exit statuses of their ranks."""
    lines: Counter[str] = field(default_factory=Counter)
    """How often the ranks of all jobs have printed each line."""


def run_jobs(names: list[str], at_once: int, hold: str, directory: Path, counts: dict[str, Counts]) -> Any:
    """Runs a job of each of these contestants, and counts how they end. Returns None. In a forked process it returns
    what this process has to do before it ends."""
    waiting = names[::-1]
    running: list[Job] = []
    while waiting or running:
        if waiting and len(running) < at_once:
            port = held_port()
            job = Job(waiting.pop(), Path(tempfile.mkdtemp(dir=directory)), port, time.monotonic() + JOB_SECONDS)
            running.append(job)
            number = port.__enter__()
            for rank in range(RANKS):
                pid = os.fork()
                if pid == 0:
                    die_with_parent()
                    output = os.open(job.directory / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                    return functools.partial(run_rank, job.name, rank, number, str(job.directory / "run"), hold)
                job.pids.append(pid)
        for job in [job for job in running if job.has_ended()]:
            running.remove(job)
            job.port.__exit__(None, None, None)
            of_contestant = counts.setdefault(job.name, Counts())
            of_contestant.statuses[" and ".join(job.statuses[pid] for pid in job.pids)] += 1
            of_contestant.lines.update(job.lines())
            shutil.rmtree(job.directory)
        time.sleep(0.01)
    return None


def import_everything() -> None:
    """Imports what all ranks need, and compiles DeepSpeed's op, before the first fork."""
    import cpuinfo
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  which imports torch's compiler
    import torch

    logging.disable(logging.WARNING)
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # Otherwise it starts a Python in each rank.
    cpuinfo.get_cpu_info()
    ops.load(["shm_comm"])
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with several threads cannot be forked"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000, help="of zckpt, and as many of DeepSpeed; default 1000")
    parser.add_argument("--at-once", type=int, default=6, help="jobs that run at the same time; default 6")
    parser.add_argument("--hold", default="", metavar="NAME", help="starve the threads with NAME in their names")
    parser.add_argument("--only", default="", metavar="NAME", help="only the contestants with NAME in their names")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where the JSON goes")
    options = parser.parse_args()
    names = [name for number in range(options.jobs) for name in ([*CONTESTANTS][number % len(CONTESTANTS)], STOCK)]
    import_everything()
    directory, counts = Path(tempfile.mkdtemp(prefix="zckpt-endings-")), dict[str, Counts]()
    rank = run_jobs([name for name in names if options.only in name], options.at_once, options.hold, directory, counts)
    if rank is not None:
        rank()
        return
    shutil.rmtree(directory)
    import torch

    result = {
        "date": f"{datetime.date.today()}", "torch": torch.__version__, "python": platform.python_version(),
        "jobs_at_once": options.at_once, "hold": options.hold,
        "endings": {name: of_contestant.statuses for name, of_contestant in sorted(counts.items())},
    }  # fmt: skip
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "endings.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, of_contestant in sorted(counts.items()):
        print(name, dict(of_contestant.statuses))
        for line, count in of_contestant.lines.most_common(LINES):
            print(f"    {count} x {line}")


if __name__ == "__main__":
    main()
