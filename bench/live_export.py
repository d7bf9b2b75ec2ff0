"""The weights of a live ZeRO-3 engine as files that others load: against what gathers them on one rank.

    python bench/live_export.py [--size 3GiB] [--dir DIR] [--runs 3]

A Llama of transformers' on 2 ranks, with about ``--size`` bytes of state, a sixth of which are its bf16 weights.
DeepSpeed's ``save_16bit_model`` writes one file for torch.load, and needs stage3_gather_16bit_weights_on_model_save.
The other way gathers all weights at once and calls ``save_pretrained`` on rank 0. Both are made durable. The peak
memory is that of each rank of a fresh run, over what it had when the save began, without page cache.
"""

from __future__ import annotations

from common import Result, parse_options, speedup, workspace
from training import LIVE_EXPORTS, live_export_peak, live_export_rounds, start_ranks

RANKS = 2


def main() -> None:
    options = parse_options(__doc__, runs=3)
    with workspace(options, options.size) as directory:
        found = start_ranks(live_export_rounds, RANKS, directory, options.size, options.runs)
        peaks = {label: start_ranks(live_export_peak, RANKS, directory, options.size, label) for label in LIVE_EXPORTS}
    rounds = found[0]["rounds"]
    result = Result("live_export", "The weights of a live engine as files", options)
    result.add(rounds, found[0]["bytes"])
    ours, *others = rounds
    for label in others:
        result.at_least(f"zckpt.export of an engine, against {label}", speedup(rounds, ours, over=label), 1)
    for label, by_rank in peaks.items():
        print(f"  {label:52} {', '.join(f'{peak:.0f}' for peak in by_rank)} MiB on the ranks")
    result.extra["peak_mib"] = peaks
    result.at_most("peak memory of an export of an engine, MiB", max(peaks[ours]), 256, "MiB")
    result.finish()


if __name__ == "__main__":
    main()
