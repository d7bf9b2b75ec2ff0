"""Writes checkpoints without engines. The ranks are simulated in one process, and zckpt's own functions write."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

import zckpt
from tests.support.grids import order_of, random_grid
from zckpt.checkpoint.writing.collect import add_rank_tree, pack_tree
from zckpt.engines import readable
from zckpt.errors import FormatError
from zckpt.format.dtypes import DTYPE_IDS
from zckpt.format.manifest import Part
from zckpt.format.names import Tier, check_tensor_name
from zckpt.geometry import Grid, Span
from zckpt.plan import catalog
from zckpt.plan.inventory import BUFFER, MASTER, FileRange, Fragment, Inventory
from zckpt.testing.fragments import write_fragments
from zckpt.transfer.torch_dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BLOCK_BYTES = 4096
SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (63, 63),
    "a.bias": (63,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 3),
    "big": (50, 777),
}
PARTS = (MASTER, "exp_avg", "exp_avg_sq")
DTYPE_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Written:
    """The tensors that were written to a checkpoint."""

    path: Path
    save_id: str
    full: dict[str, torch.Tensor]
    """The whole tensors by key, of copy 0."""
    ranks: list[dict[tuple[str, int, int], torch.Tensor]]
    """The fragments of each rank, by key, first element and end."""


def write_state(
    path: Path,
    world_size: int = 3,
    tensors: Mapping[str, tuple[int, ...] | torch.Tensor] = SHAPES,
    *,
    parts: Sequence[str] = PARTS,
    block_bytes: int = BLOCK_BYTES,
    layout: str = "zero3",
    dtype: torch.dtype = torch.float32,
    buffers: Mapping[str, Sequence[torch.Tensor]] | None = None,
    aliases: Mapping[str, str] | None = None,
    engine_state: object = None,
    client_state: object = None,
    left_out: Sequence[str] = (),
    overwrite: bool = False,
    latest: bool = True,
    step: int = 5,
    seed: int = 0,
    swap: Path | None = None,
) -> Written:
    """Writes a checkpoint.

    ``tensors`` has a shape, to be filled at random, or a value for each name. A value is the same in every part. With
    the ``layout`` "zero3", every rank has an equal share of every tensor. With "random", tensors are cut anywhere, and
    each piece is on any rank and tier. With "divided", this is so in the order of a random grid. ``swap`` is a
    directory for the swap files of tensors on the tier nvme. ``buffers`` has the value of each rank for each name.
    ``engine_state``, ``client_state`` and ``left_out`` go to the tree of state.
    """
    torch.manual_seed(seed)
    choice = random.Random(seed)
    full: dict[str, torch.Tensor] = {}
    fragments: list[list[Fragment]] = [[] for _ in range(world_size)]
    grids: dict[str, Grid] = {}
    for part in parts:
        for name, content in tensors.items():
            value = content if isinstance(content, torch.Tensor) else torch.randn(content).to(dtype)
            full[f"{part}/{name}"] = value
            if layout == "divided" and name not in grids:
                grids[name] = random_grid(tuple(value.shape), choice)
            for rank, tier, start, stop in cuts(value.numel(), world_size, layout, choice):
                fragments[rank].append(fragment(part, name, value, start, stop, tier, grid=grids.get(name)))
    for name, values in (buffers or {}).items():
        full[f"{BUFFER}/{name}"] = values[0]
        for rank, value in enumerate(values):
            fragments[rank].append(fragment(BUFFER, name, value, 0, value.numel(), Tier.DEVICE, rank))
    ranks = [
        {(f.key, *f.span[1:]): f.data for f in of_rank if isinstance(f.data, torch.Tensor) and f.data.numel()}
        for of_rank in fragments
    ]
    if swap is not None:
        for rank, of_rank in enumerate(fragments):
            fragments[rank] = swap_out(of_rank, swap / f"{rank}.swp")
    root = {"engine": engine_state, "client_state": client_state, **({"left_out": [*left_out]} if left_out else {})}
    state = pack_tree(root, "", fragments[0], 0)
    for rank, of_rank in enumerate(fragments):
        add_rank_tree({"rank": rank}, of_rank, rank)
    metadata = catalog.SaveMetadata(step, block_bytes, aliases or {}, state, {"created": "by a test"})
    save_id = write_fragments(str(path), fragments, metadata, overwrite=overwrite, latest=latest)
    return Written(path, save_id, full, ranks)


def fragment(
    part: str,
    name: str,
    value: torch.Tensor,
    start: int,
    stop: int,
    tier: Tier = Tier.DEVICE,
    copy: int = 0,
    grid: Grid | None = None,
) -> Fragment:
    data, grid = value.contiguous().reshape(-1), grid or Grid(tuple(value.shape))
    if grid.sections:
        data = data[order_of(grid)]
    return Fragment(part, name, DTYPE_NAMES[value.dtype], Span(grid, start, stop), tier, copy, data[start:stop])


def swap_out(fragments: list[Fragment], path: Path) -> list[Fragment]:
    """Returns the fragments, with those of the tier nvme moved into a file, where junk is between them."""
    swapped = []
    with path.open("wb") as file:
        for fragment in fragments:
            if fragment.tier is Tier.NVME and isinstance(fragment.data, torch.Tensor):
                file.write(b"junk")
                file_range = FileRange(str(path), file.tell(), fragment.data.nbytes)
                file.write(fragment.data.numpy().tobytes())
                fragment = fragment._replace(data=file_range)
            swapped.append(fragment)
    return swapped


def cuts(numel: int, world_size: int, layout: str, choice: random.Random) -> list[tuple[int, Tier, int, int]]:
    """Returns ``(rank, tier, start, stop)`` of every piece of a tensor. A tensor without elements has one empty piece,
    which is on rank 0 with the ``layout`` "zero3"."""
    if layout == "zero3":
        share = max(-(-numel // world_size), 1)
        bounds = [(rank, rank * share, min((rank + 1) * share, numel)) for rank in range(world_size)]
        return [(rank, Tier.DEVICE, start, stop) for rank, start, stop in bounds if start < stop or rank == numel == 0]
    inner = sorted(choice.sample(range(1, numel), min(choice.randrange(8), numel - 1))) if numel > 1 else []
    return [
        (choice.randrange(world_size), choice.choice(list(Tier)), start, stop)
        for start, stop in zip([0, *inner], [*inner, numel], strict=True)
    ]


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether the tensors are equal in dtype, shape and every bit. NaNs with the same bits are equal."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.dim() == 0:
        first, second = first.reshape(1), second.reshape(1)
    as_bytes = DTYPE_OF_SIZE.get(first.element_size(), torch.int64)
    return torch.equal(first.contiguous().view(as_bytes), second.contiguous().view(as_bytes))


def same_all(tensors: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(same(tensors[key], expected[key]) for key in expected)


def is_tensor_name(name: str) -> bool:
    """Returns whether the format allows this name of a tensor."""
    try:
        check_tensor_name(name)
    except FormatError:
        return False
    return True


def engine_state(names: Sequence[str]) -> dict[str, Any]:
    """Returns the state of an engine with ZeRO-3 in bf16, whose optimizer has these parameters. With it, a checkpoint
    can be converted to DeepSpeed's format."""
    moments = ["exp_avg", "exp_avg_sq"]
    return {
        "counters": {"global_steps": 5, "global_samples": 40, "micro_steps": 5, "skipped_steps": 0},
        "deepspeed": {"stage": 3, "dtype": "bfloat16", "grad_accum_dtype": "bfloat16"},
        "optimizer": {
            "class": "AdamW",
            "param_groups": [{"params": [*names], "lr": 0.1}],
            "states": [{"params": [*names], "moments": moments, "values": {"step": 5}}],
        },
        "scaler": None,
        "scheduler": None,
    }


class EngineOfAnAdapter:
    """An engine of which a test needs nothing but that it is one."""


_thread = threading.local()


def _adapt(engine: Any) -> Any:
    """Returns the adapter that ``write_through`` has made in this thread, and for every other engine the right one. If
    two threads patch ``readable`` at the same time, this function may stay in its place for good."""
    return _thread.adapter if isinstance(engine, EngineOfAnAdapter) else readable(engine)


def write_through(
    path: Path, value: torch.Tensor, *, step: int = 1, engine: EngineOfAnAdapter | None = None, **options: Any
) -> Any:
    """Calls ``zckpt.write`` with its lock, commit and clean-up, for a simulated engine of one tensor, ``master/w``.
    Each call is for another engine, unless an ``engine`` is given."""
    _thread.adapter = SimpleNamespace(
        step=step,
        description={},
        parts=(MASTER,),
        devices=(),
        peft_configs={},
        trains=True,
        sample=dict,
        names_differ=False,
        refuse_unsupported=lambda **_: None,
        inventory=lambda parts: Inventory((fragment(MASTER, "w", value, 0, value.numel()),)),
        state=dict,
        rank_state=dict,
        after_write=lambda: None,
    )
    with mock.patch("zckpt.checkpoint.writing.prepare.readable", _adapt):
        return zckpt.write(engine or EngineOfAnAdapter(), path, **options)


def part_of(
    name: str, layout_id: int, name_ids: Sequence[int], shape_ids: Sequence[int], dtypes: Sequence[str]
) -> Part:
    """Returns a part of a manifest, none of whose tensors a grid divides."""
    dtype_ids = np.array([DTYPE_IDS[dtype] for dtype in dtypes], np.uint8)
    return Part(name, layout_id, np.array(name_ids), np.array(shape_ids), dtype_ids, np.zeros(len(dtypes), np.int64))
