"""Memory during a save and during a resume, ours beside DeepSpeed's: the picture at the top of the README.

    python bench/memory_over_time.py [--size 3GiB] [--dir DIR]

2 ranks of a ZeRO-3 engine. Every 50 ms another process samples what is resident in both ranks, and the page cache. The
picture shows by how much each has grown since the save or the resume began. A resume begins with an engine that has
weights but no moments yet: what it must get, two thirds of the state, is part of the growth.
"""

from __future__ import annotations

from common import MIB, Result, parse_options, workspace
from training import start_ranks, watched_resume, watched_save

RANKS = 2
KINDS = ("zckpt", "DeepSpeed")


def main() -> None:
    options = parse_options(__doc__, runs=1)
    result = Result("memory_over_time", "Memory during a save and a resume", options)
    samples: dict[str, list[tuple[float, int, int]]] = {}
    with workspace(options, 2 * options.size) as directory:
        for kind in KINDS:
            (directory / kind).mkdir()
            for doing, function in (("save", watched_save), ("resume", watched_resume)):
                found = start_ranks(function, RANKS, directory / kind, options.size, kind)[0]
                label = f"{doing}: {kind}"
                result.add({label: [found["took"]]}, options.size)
                samples[label] = found["samples"]
                base = [max(one[i] for one in found["samples"] if one[0] < 0) for i in (0, 1, 2)]
                peak = [max(one[i] for one in found["samples"]) - base[i] for i in (0, 1, 2)]
                print(f"  {label:20} resident +{peak[1] / MIB:6.0f} MiB   Cached +{peak[2] / MIB:6.0f} MiB")
    result.extra["samples"] = samples
    result.finish()


if __name__ == "__main__":
    main()
