"""Writing a state that is in CPU memory against raw direct I/O of as many bytes.

    python bench/write_vs_raw.py [--size 3GiB] [--dir DIR] [--runs 5]

zckpt's time is all that ``zckpt.write`` does, but for looking into an engine: files, digests, index, manifest, fsync of
files and directories. Raw: ``pwritev`` with O_DIRECT into one file in as many threads, from aligned buffers, fsync. The
state and the buffers were touched before.
"""

from __future__ import annotations

from functools import partial

from common import (
    Contestant,
    Raw,
    Result,
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
        seconds = interleaved(
            [
                Contestant("raw", partial(raw.write, file, total_bytes(state)), after=partial(remove, file)),
                Contestant(
                    "zckpt", partial(write_checkpoint, checkpoint, cut(state)), after=partial(remove, checkpoint)
                ),
            ],
            options.runs,
        )
    result = Result("write_vs_raw", "Write a state in CPU memory, durable", options)
    result.add(seconds, total_bytes(state))
    result.at_least("write, against raw O_DIRECT", speedup(seconds, "zckpt", over="raw"), 0.9)
    result.finish()


if __name__ == "__main__":
    main()
