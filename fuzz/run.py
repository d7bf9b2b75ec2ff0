"""Fuzzes one target, guided by coverage: ``python fuzz/run.py TARGET [--seconds N] [FILE ...]``.

If files are given, it runs the target on each of them once and does not fuzz. This shows what an input does that was
found before, and whether it is fixed. New inputs that fail are put into ``.cache/fuzz/<target>``, and inputs that reach
new code into ``.cache/fuzz/<target>/corpus``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "fuzz"), str(ROOT)]

import torch  # noqa: E402,F401  It is imported first, so that it is not instrumented.

with atheris.instrument_imports(include=["zckpt"]):
    import targets

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("target", choices=targets.TARGETS)
parser.add_argument("--seconds", type=int, default=60)
parser.add_argument("files", nargs="*", metavar="FILE")
arguments = parser.parse_args()
work = ROOT / ".cache" / "fuzz" / arguments.target
(work / "corpus").mkdir(parents=True, exist_ok=True)
# The limit of memory is enough for an hour. Under atheris, every comparison of arrays leaks some bytes.
options = [
    f"-max_total_time={arguments.seconds}", f"-max_len={targets.LENGTH_MAX[arguments.target]}", "-len_control=0",
    "-timeout=10", "-rss_limit_mb=8000", "-print_final_stats=1", f"-artifact_prefix={work}/",
]  # fmt: skip
corpora = [str(work / "corpus"), str(ROOT / "fuzz" / "corpus" / arguments.target)]
atheris.Setup([sys.argv[0], *options, *(arguments.files or corpora)], targets.TARGETS[arguments.target])
atheris.Fuzz()
