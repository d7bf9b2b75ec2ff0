"""Checkpoint directories without engines: the ranks are simulated in one process, the writing is the library's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import zckpt
from zckpt.errors import FormatError
from zckpt.format.names import check_tensor_name
from zckpt.plan import catalog
from zckpt.state.inventory import BUFFER, MASTER, TIERS, FileSpan, Fragment, Inventory
from zckpt.testing.fragments import write_fragments
from zckpt.transfer.torch_dtypes import DTYPE_NAMES
from zckpt.writing.collect import add_rank_tree, pack_tree

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
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Written:
    """What went into a checkpoint: whole tensors by key (copy 0), and what each rank held, by key and span."""

    path: Path
    save_id: str
    full: dict[str, torch.Tensor]
    ranks: list[dict[tuple[str, int, int], torch.Tensor]]


def write_state(
    path: Path,
    world_size: int = 3,
    tensors: Mapping[str, tuple[int, ...]] | Mapping[str, torch.Tensor] = SHAPES,
    *,
    parts: Sequence[str] = PARTS,
    block_bytes: int = BLOCK_BYTES,
    layout: str = "zero3",
    dtype: torch.dtype = torch.float32,
    buffers: Mapping[str, Sequence[torch.Tensor]] | None = None,
    aliases: Mapping[str, str] | None = None,
    engine_state: object = None,
    client_state: object = None,
    overwrite: bool = False,
    latest: bool = True,
    step: int = 5,
    seed: int = 0,
    swap: Path | None = None,
) -> Written:
    """Writes a checkpoint. ``tensors`` are shapes, to be filled at random, or values, the same in every part.

    ``layout``: "zero3", where every rank has an equal share of every tensor, or "random": cut anywhere, held by anyone
    on any tier. ``swap``: a directory for the files of what lies on tier nvme. ``buffers`` has the values of each rank.
    ``engine_state`` and ``client_state`` go to the tree of state.
    """
    torch.manual_seed(seed)
    choice = random.Random(seed)
    full: dict[str, torch.Tensor] = {}
    fragments: list[list[Fragment]] = [[] for _ in range(world_size)]
    for part in parts:
        for name, given in tensors.items():
            value = given if isinstance(given, torch.Tensor) else torch.randn(given).to(dtype)
            full[f"{part}/{name}"] = value
            for rank, tier, start, stop in cuts(value.numel(), world_size, layout, choice):
                fragments[rank].append(fragment(part, name, value, start, stop, tier))
    for name, values in (buffers or {}).items():
        full[f"{BUFFER}/{name}"] = values[0]
        for rank, value in enumerate(values):
            fragments[rank].append(fragment(BUFFER, name, value, 0, value.numel(), "device", rank))
    ranks = [
        {(f.key, f.start, f.stop): f.data for f in own if isinstance(f.data, torch.Tensor) and f.data.numel()}
        for own in fragments
    ]
    if swap is not None:
        for rank, own in enumerate(fragments):
            fragments[rank] = swap_out(own, swap / f"{rank}.swp")
    state = pack_tree({"engine": engine_state, "client_state": client_state}, "", fragments[0], 0)
    for rank, own in enumerate(fragments):
        add_rank_tree({"rank": rank}, own, rank)
    about = catalog.About(step, block_bytes, aliases or {}, state, {"created": "by a test"})
    save_id = write_fragments(str(path), fragments, about, overwrite=overwrite, latest=latest)
    return Written(path, save_id, full, ranks)


def fragment(
    part: str, name: str, value: torch.Tensor, start: int, stop: int, tier: str = "device", copy: int = 0
) -> Fragment:
    data = value.contiguous().reshape(-1)[start:stop]
    return Fragment(part, name, tuple(value.shape), DTYPE_NAMES[value.dtype], start, stop, tier, copy, data)


def swap_out(fragments: list[Fragment], path: Path) -> list[Fragment]:
    """Those of tier nvme as ranges of a file, with junk between them."""
    swapped = []
    with path.open("wb") as file:
        for one in fragments:
            if one.tier == "nvme" and isinstance(one.data, torch.Tensor):
                file.write(b"junk")
                span = FileSpan(str(path), file.tell(), one.data.nbytes)
                file.write(one.data.numpy().tobytes())
                one = replace(one, data=span)
            swapped.append(one)
    return swapped


def cuts(numel: int, world_size: int, layout: str, choice: random.Random) -> list[tuple[int, str, int, int]]:
    """``(rank, tier, start, stop)`` of every piece of a tensor; one of no elements is rank 0's."""
    if layout == "zero3":
        share = max(-(-numel // world_size), 1)
        bounds = [(rank, rank * share, min((rank + 1) * share, numel)) for rank in range(world_size)]
        return [(rank, "device", start, stop) for rank, start, stop in bounds if start < stop or rank == numel == 0]
    inner = sorted(choice.sample(range(1, numel), min(choice.randrange(8), numel - 1))) if numel > 1 else []
    return [
        (choice.randrange(world_size), choice.choice(TIERS), start, stop)
        for start, stop in zip([0, *inner], [*inner, numel], strict=True)
    ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit, NaN and all."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.dim() == 0:
        one, other = one.reshape(1), other.reshape(1)
    as_bytes = BYTES.get(one.element_size(), torch.int64)
    return torch.equal(one.contiguous().view(as_bytes), other.contiguous().view(as_bytes))


def same_all(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)


def edit(value: Any, path: str, change: Any) -> None:
    """Sets the entry at ``path``, such as ``parts.0.names``, of nested maps and lists; None removes it."""
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        value = value[step]
    if change is None:
        del value[last]
    else:
        value[last] = change(value[last]) if callable(change) else change


def is_tensor_name(name: str) -> bool:
    """Whether the format allows it."""
    try:
        check_tensor_name(name)
    except FormatError:
        return False
    return True


def write_through(path: Path, value: torch.Tensor, *, step: int = 1, **options: Any) -> Any:
    """``zckpt.write`` of one tensor, ``master/w``, but for the engine: lock, commit, clean-up and all."""
    adapter = SimpleNamespace(
        step=step,
        description={},
        parts=(MASTER,),
        devices=(),
        module=None,
        refuse_unsupported=lambda **_: None,
        inventory=lambda parts: Inventory((fragment(MASTER, "w", value, 0, value.numel()),)),
        state=dict,
        rank_state=dict,
        after_write=lambda: None,
    )
    with mock.patch("zckpt.writing.prepare.adapt", return_value=adapter):
        return zckpt.write(SimpleNamespace(), path, **options)
