"""Show where a tensor is stored, and statistics of its values.

For one tensor, this prints its pieces by rank, file and bytes, the minimum, maximum and mean of its values, their norm
(the square root of the sum of the squares), and how many elements are NaN, infinite and zero. For several tensors, it
prints a line of these numbers for each. Minimum, maximum, mean and norm are those of the finite elements. The values
are read a few MiB at a time, and their digests are checked. Under a launcher such as torchrun, the ranks share the
work, and rank 0 prints the result.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

import zckpt
from zckpt.cli import output
from zckpt.cli.launched import launched

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from zckpt.listing.contents import TensorInfo
    from zckpt.reading.statistics import Statistics

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
    with launched() as rank:
        infos, found = _statistics(arguments.path, arguments.keys)
        if rank == 0:
            if arguments.json:
                output.print_json([_record(*one) for one in zip(infos, found, strict=True)])
            elif len(infos) == 1:
                _print_one(infos[0], found[0])
            else:
                _print_several(infos, found)
    return 0


def _statistics(path: str, keys: Sequence[str]) -> tuple[list[TensorInfo], list[Statistics]]:
    """Returns the tensors, and the statistics of each. All ranks share the work."""
    from zckpt.progress import ProgressBar, reported
    from zckpt.ranks.collectives import Ranks, check_equal
    from zckpt.reading.statistics import Statistics, statistics, stretches

    ranks = Ranks(call="zckpt show")
    checkpoint = ranks.together(lambda: zckpt.open(path), "open the checkpoint")
    infos = ranks.together(lambda: [checkpoint[key] for key in checkpoint.contents.select(keys)], "find the tensors")

    def own() -> tuple[str, list[tuple[Any, ...]]]:
        mine = list(stretches(checkpoint, infos))[ranks.rank :: ranks.size]
        nbytes = sum((one.stop - one.start) * infos[one.number].item_bytes for one in mine)
        with reported(ProgressBar(), "show", nbytes) as advance:
            found = statistics(checkpoint, infos, mine, advance)
        return checkpoint.manifest.save_id, [astuple(one) for one in found]

    shared = ranks.share(own, "look at the values")
    check_equal([save_id for save_id, _ in shared], "checkpoints")
    found = [Statistics() for _ in infos]
    for _, rows in shared:
        found = [one.plus(Statistics(*row)) for one, row in zip(found, rows, strict=True)]
    return infos, found


def _record(info: TensorInfo, found: Statistics) -> dict[str, Any]:
    return {
        "key": info.key,
        "dtype": info.torch_name,
        "shape": info.shape,
        "nbytes": info.nbytes,
        **dict(zip(("min", "max", "mean", "norm"), _finite(found), strict=True)),
        "nan": found.nan,
        "inf": found.inf,
        "zeros": found.zeros,
        "pieces": [asdict(piece) for piece in info.pieces],
    }


def _print_one(info: TensorInfo, found: Statistics) -> None:
    output.print_fields(
        [
            ("key", info.key),
            ("dtype", info.torch_name),
            ("shape", list(info.shape)),
            ("size", output.size(info.nbytes)),
            *zip(_NUMBERS, _numbers(found), strict=True),
        ]
    )
    print()
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


def _print_several(infos: Sequence[TensorInfo], found: Sequence[Statistics]) -> None:
    rows = ((*_numbers(one), info.key) for info, one in zip(infos, found, strict=True))
    output.print_table((*_NUMBERS, "key"), rows, numbers=_NUMBERS)


_NUMBERS = ("min", "max", "mean", "norm", "NaN", "infinite", "zeros")


def _numbers(found: Statistics) -> tuple[str, ...]:
    shown = ("-" if one is None else f"{one:.6g}" for one in _finite(found))
    return (*shown, f"{found.nan:,}", f"{found.inf:,}", f"{found.zeros:,}")


def _finite(found: Statistics) -> list[float | None]:
    """Returns the minimum, maximum, mean and norm. A number is None where no element is finite, and where the number
    itself is too large for a float."""
    numbers = (found.min, found.max, found.mean, found.norm)
    return [one if one is not None and math.isfinite(one) else None for one in numbers]
