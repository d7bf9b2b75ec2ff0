"""Writing a state that is in CPU memory against raw direct I/O of as many bytes.

    python bench/write_vs_raw.py [--size 3GiB] [--dir DIR] [--runs 5]

zckpt's time is all that ``zckpt.write`` does, but for looking into an engine: files, digests, index, manifest, fsync of
files and directories. Raw: ``pwritev`` with O_DIRECT into one file in as many threads, from aligned buffers, fsync. The
state and the buffers were touched before.
"""

from __future__ import annotations

from functools import partial

from common import (
    CPU_PER_GIB_MAX,
    WRITE_SPEED_MIN,
    Contestant,
    Raw,
    Result,
    cpu_per_gib,
    cut,
    interleaved,
    make_state,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)


def main() -> None:
    options = parse_options(__doc__)
    state = make_state(options.size)
    raw = Raw()
    with workspace(options, options.size) as directory:
        checkpoint, file = directory / "checkpoint", directory / "raw"
        rounds = interleaved(
            [
                Contestant("raw", partial(raw.write, file, total_bytes(state)), after=partial(remove, file)),
                Contestant(
                    "zckpt", partial(write_checkpoint, checkpoint, cut(state)), after=partial(remove, checkpoint)
                ),
            ],
            options.runs,
        )
    result = Result("write_vs_raw", "Write a state in CPU memory, durable", options)
    result.add(rounds, total_bytes(state))
    result.at_least("write, against raw O_DIRECT", speedup(rounds, "zckpt", over="raw"), WRITE_SPEED_MIN)
    used = cpu_per_gib(rounds["zckpt"], total_bytes(state))
    result.at_most("processor time of a write", used, CPU_PER_GIB_MAX, "s/GiB")
    result.finish()


if __name__ == "__main__":
    main()
