"""Compares writing a state that is in CPU memory with raw direct I/O of as many bytes.

    python bench/write_vs_raw.py [--size 3GiB] [--dir DIR] [--runs 5]

zckpt does all that ``zckpt.write`` does, except for looking into an engine: it writes files, digests, the index and the
manifest, and fsyncs files and directories. "Raw" means ``pwritev`` with O_DIRECT of the same memory into one file, in
as many threads as zckpt uses, and an fsync.
"""

from __future__ import annotations

from functools import partial

from common import (
    CPU_PER_GIB_MAX,
    WRITE_SPEED_MIN,
    Contestant,
    Result,
    cpu_per_gib,
    cut,
    interleaved,
    make_state,
    memory_of,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from raw_io import Raw


def main() -> None:
    options = parse_options(__doc__)
    state = make_state(options.size)
    nbytes = total_bytes(state)
    raw = Raw()
    with workspace(options, options.size) as directory:
        checkpoint, file = directory / "checkpoint", directory / "raw"
        rounds = interleaved(
            [
                Contestant("raw", partial(raw.write, file, [memory_of(state)]), after=partial(remove, file)),
                Contestant(
                    "zckpt", partial(write_checkpoint, checkpoint, cut(state)), after=partial(remove, checkpoint)
                ),
            ],
            options.runs,
        )
    result = Result("write_vs_raw", "Write a state in CPU memory, durable", options)
    result.add(rounds, nbytes)
    result.at_least("write, against raw O_DIRECT", speedup(rounds, "zckpt", over="raw"), WRITE_SPEED_MIN)
    used = cpu_per_gib(rounds["zckpt"], nbytes)
    result.at_most("processor time of a write", used, CPU_PER_GIB_MAX, "s/GiB")
    result.finish()


if __name__ == "__main__":
    main()
