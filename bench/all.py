"""Runs every comparison in a process of its own, and then the report. Each comparison gets the options of this program.

python bench/all.py [--size 3GiB] [--dir DIR] [--runs 5] [--quick]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from report import ORDER

HERE = Path(__file__).resolve().parent


def main() -> int:
    failed = []
    for name in ORDER:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, HERE / f"{name}.py", *sys.argv[1:]], check=False).returncode:
            failed.append(name)
    arguments = sys.argv[sys.argv.index("--results") :][:2] if "--results" in sys.argv else []
    report = subprocess.run([sys.executable, HERE / "report.py", *arguments], check=False).returncode
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed or report else 0


if __name__ == "__main__":
    sys.exit(main())
