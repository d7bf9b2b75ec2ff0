"""Show where a tensor is stored, and statistics of its values.

For one tensor, this prints its pieces by rank, file and bytes, the minimum, maximum and mean of its values, their norm
(the square root of the sum of the squares), and how many elements are NaN, infinite and zero. For several tensors, this
prints one line of these numbers for each tensor. The minimum, maximum, mean and norm are those of the finite elements.
The values are read at most 32 MiB at a time, and compared with their digests. Under a launcher such as torchrun, the
ranks share the work, and rank 0 prints the result.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zckpt.cli import output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from zckpt.checkpoint.listing.tensors import TensorInfo
    from zckpt.tools.statistics import Statistics

EXAMPLES = """
  zckpt show checkpoints master/lm_head.weight
  zckpt show checkpoints 'exp_avg_sq/*.bias' --json
  torchrun --nproc-per-node 8 -m zckpt show checkpoints/global_step100 'master/*'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or the directory of a run with a `latest` file")
    parser.add_argument("keys", nargs="+", metavar="KEY", help="a key such as master/lm_head.weight, or a glob")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    with output.launched() as rank:
        infos, statistics = _statistics(arguments.path, arguments.keys)
        if rank == 0:
            if arguments.json:
                output.print_json([_record(*row) for row in zip(infos, statistics, strict=True)])
            elif len(infos) == 1:
                _print_one(infos[0], statistics[0])
            else:
                rows = ((*_numbers(of_tensor), info.key) for info, of_tensor in zip(infos, statistics, strict=True))
                output.print_table((*_NUMBERS, "key"), rows, numbers=_NUMBERS)
    return 0


def _statistics(path: str, keys: Sequence[str]) -> tuple[list[TensorInfo], list[Statistics]]:
    """Returns the selected tensors and, on rank 0, the statistics of each. All ranks share the work."""
    from zckpt.checkpoint.open import open_loader
    from zckpt.progress import reported
    from zckpt.ranks.collectives import Ranks, check_equal
    from zckpt.tools.statistics import Statistics, statistics, stretches

    ranks = Ranks(call="zckpt show")
    checkpoint = ranks.together(lambda: open_loader(path), "open the checkpoint")
    infos = ranks.together(lambda: list(checkpoint.contents.select(keys).values()), "find the tensors")

    def share_of_this_rank() -> tuple[str, list[Statistics]]:
        share = list(stretches(checkpoint, infos))[ranks.rank :: ranks.size]
        with reported(output.progress_bar(), "show", sum(stretch.nbytes for stretch in share)) as advance:
            of_tensors = statistics(checkpoint, infos, share, advance)
        return checkpoint.manifest.save_id, of_tensors

    totals = [Statistics() for _ in infos]

    def add(shares: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> None:
        check_equal([save_id for save_id, _ in shares], "checkpoints")
        for _, rows in shares:
            totals[:] = [total.plus(Statistics(*row)) for total, row in zip(totals, rows, strict=True)]

    ranks.decide(share_of_this_rank, add, "look at the values")
    return infos, totals


def _record(info: TensorInfo, statistics: Statistics) -> dict[str, Any]:
    return {
        "key": info.key,
        "dtype": info.torch_name,
        "shape": info.shape,
        "nbytes": info.nbytes,
        **dict(zip(("min", "max", "mean", "norm"), _finite(statistics), strict=True)),
        "nan": statistics.nan,
        "inf": statistics.inf,
        "zeros": statistics.zeros,
        "pieces": [asdict(piece) for piece in info.pieces],
    }


def _print_one(info: TensorInfo, statistics: Statistics) -> None:
    output.print_fields(
        [
            ("key", info.key),
            ("dtype", info.torch_name),
            ("shape", list(info.shape)),
            ("size", output.size(info.nbytes)),
            *zip(_NUMBERS, _numbers(statistics), strict=True),
        ]
    )
    output.print_text("")
    output.print_table(
        ("rank", "tier", "copy", "elements", "bytes of the file", "file"),
        (
            (
                str(piece.rank),
                piece.tier,
                str(piece.copy),
                f"[{piece.start:,}, {piece.stop:,})",
                f"[{piece.offset:,}, {piece.offset + piece.nbytes:,})",
                piece.file,
            )
            for piece in info.pieces
        ),
        numbers=("rank", "copy", "elements", "bytes of the file"),
    )


_NUMBERS = ("min", "max", "mean", "norm", "NaN", "infinite", "zeros")


def _numbers(statistics: Statistics) -> tuple[str, ...]:
    numbers = ("-" if number is None else f"{number:.6g}" for number in _finite(statistics))
    return (*numbers, f"{statistics.nan:,}", f"{statistics.inf:,}", f"{statistics.zeros:,}")


def _finite(statistics: Statistics) -> list[float | None]:
    """Returns the minimum, maximum, mean and norm. A number is None if no element is finite, or if the number itself is
    too large for a float."""
    numbers = (statistics.min, statistics.max, statistics.mean, statistics.norm)
    return [number if number is not None and math.isfinite(number) else None for number in numbers]
