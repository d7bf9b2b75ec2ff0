"""Measures the memory during a save and a resume, of zckpt and of DeepSpeed, for the picture at the top of the README.

    python bench/memory_over_time.py [--size 3GiB] [--dir DIR]

A ZeRO-3 engine runs on 2 ranks. Every 50 ms another process samples the resident memory of both ranks, and the page
cache. The picture shows by how much both figures have grown since the save or the resume began. A resume begins with an
engine that has weights but no moments yet. So the moments, two thirds of the state, are part of the growth.
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
                record = start_ranks(function, RANKS, directory / kind, options.size, kind)[0]
                label = f"{doing}: {kind}"
                result.add({label: [record["timing"]]}, options.size)
                samples[label] = record["samples"]
                base = [max(sample[i] for sample in record["samples"] if sample[0] < 0) for i in (0, 1, 2)]
                peak = [max(sample[i] for sample in record["samples"]) - base[i] for i in (0, 1, 2)]
                print(f"  {label:20} resident +{peak[1] / MIB:6.0f} MiB   Cached +{peak[2] / MIB:6.0f} MiB")
    result.extra["samples"] = samples
    result.finish()


if __name__ == "__main__":
    main()
