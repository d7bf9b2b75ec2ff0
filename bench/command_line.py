"""Measures how long `info`, `ls`, `state` and `--help` take at 1024 ranks x 1000 parameters x 3 parts.

    python bench/command_line.py [--ranks N] [--parameters N] [--runs N] [--json FILE]

The checkpoint has no tensor data. Each command runs in a fresh process, and its time is that from the start of the
process to its end. The commands take turns. Python alone and the import of torch are measured in the same rounds. The
target is half a second for each command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import index_scale

SECONDS_MAX = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "global_step100")
        pieces, _ = index_scale.generate(Path(path), options.ranks, options.parameters, 1)
        index_scale.measure(index_scale.BUILD, path, index_scale.SAVE_ID)
        zckpt = [sys.executable, "-m", "zckpt"]
        commands = {
            "zckpt --help": [*zckpt, "--help"],
            "zckpt info": [*zckpt, "info", path],
            "zckpt info RUN": [*zckpt, "info", directory],
            "zckpt ls": [*zckpt, "ls", path],
            "zckpt ls --json": [*zckpt, "ls", path, "--json"],
            "zckpt state": [*zckpt, "state", path],
            "python alone": [sys.executable, "-c", ""],
            "import torch": [sys.executable, "-c", "import torch"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.runs):
            for name, command in commands.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{pieces:,} pieces: {options.ranks} ranks x {options.parameters} parameters x 3 parts")
    for name, median in medians.items():
        verdict = "" if not name.startswith("zckpt") else "   ok" if median < SECONDS_MAX else "   TOO SLOW"
        print(f"{name:16} {median:6.3f} s{verdict}")
    if options.json:
        options.json.write_text(json.dumps({"pieces": pieces, "seconds": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
