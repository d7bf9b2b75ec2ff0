"""Measures loads of matrices that tensor parallelism has cut in their columns, beside matrices that it has cut in their
rows, and beside the raw disk.

    python bench/divided.py [--size 1GiB] [--dir DIR] [--runs 5]

Eight ranks hold a box of each matrix, and write it as it lies in their memory. A load of a whole matrix puts the rows
of each box between those of the other boxes. Their length is 4 KiB or 256 bytes here. "Raw" reads a file of as many
bytes by direct I/O in several threads into the same memory. "One row" is a row of a matrix, which needs a run of
adjacent bytes, or the block that has it, of each box.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

import zckpt
from common import (
    KIB,
    MIB,
    Contestant,
    Ranks,
    Result,
    drop_from_cache,
    empty_like,
    fill,
    interleaved,
    memory_of,
    parse_options,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from raw_io import Raw
from zckpt.geometry import section_of
from zckpt.plan.inventory import Fragment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RANKS = 8
MATRIX_BYTES = 128 * MIB
ROW_BYTES = (4 * KIB, 256)
"""The numbers of bytes of a row of a box."""
SPEED_MIN = 0.5
"""The least speed of a load of whole matrices that are cut in columns, as a fraction of the speed of raw reads."""


def boxes(state: Mapping[str, torch.Tensor], dim: int) -> Ranks:
    """Returns what each rank holds of matrices that are cut in dimension ``dim``."""
    ranks: Ranks = [[] for _ in range(RANKS)]
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        size = tensor.shape[dim] // RANKS
        for rank, fragments in enumerate(ranks):
            span = section_of(tensor.shape, {dim: ([((number * size, size),) for number in range(RANKS)], rank)})
            data = tensor.narrow(dim, rank * size, size).contiguous().reshape(-1)
            fragments.append(Fragment(part, name, "F32", span, data=data))
    return ranks


def bytes_read(path: Path, index: slice, *, verify: bool) -> int:
    """Returns how many bytes are read for some rows of one matrix, with what is read to find them."""
    checkpoint = zckpt.open(path)
    checkpoint.load_slice(next(iter(checkpoint)), index, verify=verify)
    return checkpoint.io.bytes_read


def main() -> None:
    options = parse_options(__doc__, size=1024 * MIB)
    result = Result("divided", f"Matrices that {RANKS} ranks of tensor parallelism have cut", options)
    for row_bytes in ROW_BYTES:
        matrices = max(options.size // MATRIX_BYTES, 1)
        rows = options.size // matrices // (row_bytes * RANKS)
        state = fill({f"master/w{i}": (rows, row_bytes * RANKS // 4) for i in range(matrices)})
        nbytes = total_bytes(state)
        with workspace(options, 3 * nbytes) as directory:
            paths = {label: directory / label for label in ("rows", "columns")}
            for dim, path in enumerate(paths.values()):
                write_checkpoint(path, boxes(state, dim))
            raw, file = Raw(), directory / "raw"
            raw.write(file, raw.again(nbytes))
            out = empty_like(state)

            def load(path: Path, out: dict[str, torch.Tensor] = out) -> None:
                zckpt.open(path).load(out=out)

            def load_row(path: Path, *, verify: bool) -> None:
                zckpt.open(path).load_slice("master/w0", slice(1, 2), verify=verify)

            group = f"rows of {row_bytes} bytes, cold"
            contestants = [
                Contestant(f"cut in {label}", partial(load, path), partial(drop_from_cache, path))
                for label, path in paths.items()
            ]
            read = partial(raw.read_into, file, [memory_of(out)])
            rounds = interleaved([*contestants, Contestant("raw", read)], options.runs)
            result.add(rounds, nbytes, group)
            value = speedup(rounds, "cut in columns", over="raw")
            result.at_least(f"{group}, cut in columns, against raw O_DIRECT", value, SPEED_MIN)
            load(paths["columns"])
            assert all(torch.equal(out[key], tensor) for key, tensor in state.items())
            of_row = [
                Contestant(
                    f"one row, cut in {label}{'' if verify else ', not verified'}",
                    partial(load_row, path, verify=verify),
                    partial(drop_from_cache, path),
                )
                for label, path in paths.items()
                for verify in (True, False)
            ]
            result.add(interleaved(of_row, options.runs), None, group)
            quarter = slice(rows // 4, rows // 2)
            for label, path in paths.items():
                ratio = bytes_read(path, quarter, verify=False) / (nbytes / matrices / 4)
                result.at_most(f"bytes read for a quarter of the rows, {group}, cut in {label}", ratio, 1.05)
    result.finish()


if __name__ == "__main__":
    main()
