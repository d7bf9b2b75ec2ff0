"""Measures how fast zckpt is if the memory is limited to what the engine uses and 128 MiB more.

    python bench/memory_limit.py [--size 1.5GiB] [--dir DIR] [--runs 5]

A ZeRO-3 engine on one rank, which has trained a step, writes its state, in the foreground and in the background. Then
it restores the state, and loads it into the same memory, from files that are not in the page cache. Each is done in
turns with the limit and without it. The limit is that of a control group, which counts the page cache, too, and has no
swap. ``engine.save_checkpoint`` and ``engine.load_checkpoint`` are measured in the same group.
``engine.load_checkpoint`` goes last, because the kernel kills a process that needs more memory. Needs root.
"""

from __future__ import annotations

import sys
from signal import SIGKILL

from common import GIB, MIB, ROOT, Result, parse_options, speedup, workspace
from training import LIMITED, NO_LIMIT, limited_load, limited_rounds, start_ranks

sys.path.insert(0, str(ROOT))

from tests.support.cluster import ClusterError
from tests.support.memory_cgroup import NoGroupError, memory_group

HEADROOM_BYTES = 128 * MIB
DOINGS = ("write", "write in the background", "restore", "load")


def main() -> None:
    options = parse_options(__doc__, size=GIB * 3 // 2)
    result = Result("memory_limit", f"With {HEADROOM_BYTES // MIB} MiB of memory left beside the engine", options)
    try:
        with workspace(options, 3 * options.size) as directory, memory_group() as group:
            args = (group, directory, options.size, HEADROOM_BYTES)
            measured = start_ranks(limited_rounds, 1, *args, options.runs)[0]
            try:
                start_ranks(limited_load, 1, *args)
                ending = "loaded"
            except ClusterError as error:
                killed = error.outcomes[0].signal == SIGKILL and group.kills()
                ending = "was killed by the kernel because memory ran out" if killed else f"failed: {error}"
    except NoGroupError as error:
        print(f"left out, since there is no control group to run in: {error}")
        return
    for doing, rounds in measured["rounds"].items():
        result.add(rounds, measured["bytes"], doing)
    for doing in DOINGS:
        value = speedup(measured["rounds"][f"zckpt, {doing}"], LIMITED, over=NO_LIMIT)
        result.at_least(f"{doing} with {HEADROOM_BYTES // MIB} MiB beside the engine, against no limit", value, 0.7)
    for doing in DOINGS:
        worst = max(measured["peak_bytes"][f"zckpt, {doing}"]) / MIB
        result.at_most(f"memory that {doing} takes there, page cache included", worst, HEADROOM_BYTES / MIB, "MiB")
    result.extra["notes"] = [f"With the limit, `engine.load_checkpoint` {ending}."]
    print(*result.extra["notes"])
    result.finish()


if __name__ == "__main__":
    main()
