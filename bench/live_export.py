"""Compares ``zckpt.export`` of a live ZeRO-3 engine with two ways that gather the weights on one rank.

    python bench/live_export.py [--size 3GiB] [--dir DIR] [--runs 3]

The engine has a Llama model of transformers on 2 ranks, with about ``--size`` bytes of state, of which a sixth are the
bf16 weights. The first way is DeepSpeed's ``save_16bit_model``. It writes one file for torch.load, and needs the option
stage3_gather_16bit_weights_on_model_save. The second way gathers all weights at once and calls ``save_pretrained`` on
rank 0. The files of both ways are made durable. The peak memory is measured on each rank of a fresh run, above the
memory that the rank had when the save began, and without the page cache.
"""

from __future__ import annotations

from common import Result, parse_options, speedup, workspace
from training import LIVE_EXPORTS, live_export_peak, live_export_rounds, start_ranks

RANKS = 2


def main() -> None:
    options = parse_options(__doc__, runs=3)
    with workspace(options, options.size) as directory:
        measured = start_ranks(live_export_rounds, RANKS, directory, options.size, options.runs)
        peaks = {label: start_ranks(live_export_peak, RANKS, directory, options.size, label) for label in LIVE_EXPORTS}
    rounds = measured[0]["rounds"]
    result = Result("live_export", "Export the weights of a live engine", options)
    result.add(rounds, measured[0]["bytes"])
    own_label, *other_labels = rounds
    for label in other_labels:
        result.at_least(f"zckpt.export of an engine, against {label}", speedup(rounds, own_label, over=label), 1)
    for label, by_rank in peaks.items():
        print(f"  {label:52} {', '.join(f'{peak:.0f}' for peak in by_rank)} MiB on the ranks")
    result.extra["peak_mib"] = peaks
    result.at_most("peak memory of an export of an engine, MiB", max(peaks[own_label]), 256, "MiB")
    result.finish()


if __name__ == "__main__":
    main()
