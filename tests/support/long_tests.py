"""Chooses the tests that only `make test-all` runs because they take long, so that the tests of every commit fit into
ten minutes on two processors. To choose anew:

    make test PYTEST_ADDOPTS="--durations=0 --durations-min=0.05 -m 'not machines and not cloud'" | tee durations.log
    python -m tests.support.long_tests durations.log > tests/long.txt

Every commit runs the variants of each test function that take the least time, up to ``FUNCTION_SECONDS`` together. It
leaves out a function of which even one variant takes longer than ``VARIANT_SECONDS``.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

FUNCTION_SECONDS, VARIANT_SECONDS = 3, 10


def long_tests(log: str) -> list[str]:
    """Returns the names of the tests that take long. ``log``: what pytest has printed with ``--durations=0``."""
    seconds: dict[str, float] = defaultdict(float)
    for took, name in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(tests/.*?) *$", log, re.MULTILINE):
        seconds[name] += float(took)
    functions = defaultdict(list)
    for name, took in seconds.items():
        functions[name.partition("[")[0]].append((took, name))
    chosen = []
    for variants in functions.values():
        total = 0.0
        for number, (took, name) in enumerate(sorted(variants)):
            if total + took <= FUNCTION_SECONDS or (number == 0 and took <= VARIANT_SECONDS):
                total += took
            else:
                chosen.append(name)
    return sorted(chosen)


if __name__ == "__main__":
    print("\n".join(long_tests(Path(sys.argv[1]).read_text())))
