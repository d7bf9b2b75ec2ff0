"""Measures how long the page of `zckpt report` takes to make, to open and to search, and its size.

    PYTHONPATH=. python bench/report_page.py [--tensors N ...] [--runs N]

The figures are printed for each number of tensors. The tensors have 4 elements each, so that only the page is measured
and not the reading of tensors. The page opens in a headless Chromium, from a file. The time of a search is that from
the letter that is typed to the end of the next frame. All times are medians. The targets are two seconds to open the
page of 10,000 tensors, and a tenth of a second for a search.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import zckpt
from tests.support.reports import browser, opened
from tests.support.states import write_state

SEARCH = """
const done = arguments[1], input = document.querySelector('#tensors .dt-search input'), begun = performance.now();
input.value = arguments[0];
input.dispatchEvent(new Event('input', {bubbles: true}));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun)));
"""
READY = "return performance.getEntriesByName('ready')[0].startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    print("tensors    made      size    opened  searched")
    for count in options.tensors:
        measure(count, options.runs)


def measure(count: int, runs: int) -> None:
    torch.manual_seed(0)
    tensors = {f"model.layers.{n // 50}.module_{n % 50}.weight": torch.randn(4) for n in range(count)}
    with tempfile.TemporaryDirectory() as directory, browser() as driver:
        path = write_state(Path(directory) / "c", 1, tensors, parts=("master",)).path
        start = time.perf_counter()
        page = zckpt.report(path, Path(directory) / "page.html")
        seconds_to_make = time.perf_counter() - start
        open_seconds, search_seconds = [], []
        for _ in range(runs):
            opened(driver, page)
            open_seconds.append(driver.execute_script(READY) / 1000)
            for text in ("l", "layers.1", "module_7 layers.19", ""):
                search_seconds.append(driver.execute_async_script(SEARCH, text) / 1000)
        size = Path(page).stat().st_size / (1 << 20)
        times = f"{statistics.median(open_seconds):6.2f} s  {statistics.median(search_seconds):6.3f} s"
        print(f"{count:7,}  {seconds_to_make:5.1f} s  {size:4.1f} MiB  {times}")


if __name__ == "__main__":
    main()
