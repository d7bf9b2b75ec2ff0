"""Tensors of the simulated accelerator, checkpoints of them, and the records of their copies."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import zckpt
from tests.support import accelerator
from tests.support.states import fragment, write_state
from zckpt.checkpoint.writing.options import WriteOptions
from zckpt.plan import catalog
from zckpt.testing.fragments import Unlocked, rank_write
from zckpt.transfer import devices
from zckpt.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from zckpt.checkpoint.writing.rank_write import RankWrite

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 64 * KIB
ONE_THREAD = zckpt.Budget(2 * MIB, 1)
"""A budget with one thread."""
BLOCKS_MAX = 15
"""How many blocks a buffer of this budget holds."""
LARGE = {"a": (700_001,), "b": (3, 5), "c": (1100, 1000)}
LARGE_KEYS = ["master/a", "master/c"]
SMALL = {f"layer.{number}": (number % 7 + 1, 50) for number in range(400)}
SAVE_ID = "0" * 16


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int = 1) -> dict[str, torch.Tensor]:
    write_state(path, ranks, shapes, parts=["master"], block_bytes=BLOCK_BYTES)
    loaded = zckpt.open(path).load()
    forget()
    return loaded


def forget() -> None:
    """Clears the log and the counters, so that the test sees only operations after this call."""
    for device in ("sim:0", "sim:1"):
        torch.zeros(1, device=device)
        assert devices.has_streams(torch.device(device))
    accelerator.reset()


def same(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[key].cpu(), expected[key]) for key in expected)


def to_devices() -> list[accelerator.Operation]:
    return [copy for copy in accelerator.copies() if copy.name == "host to device"]


def to_host() -> list[accelerator.Operation]:
    """Returns the copies to the host, without those of the one byte by which zckpt tries a device."""
    return [copy for copy in accelerator.copies() if copy.name == "device to host" and copy.nbytes > 1]


@contextmanager
def marked(**functions: tuple[object, str]) -> Iterator[None]:
    """Marks each call of these functions in the order of events, by the name of its keyword."""
    with ExitStack() as patches:
        for text, (owner, name) in functions.items():
            original = getattr(owner, name)

            def call(*args: Any, text: str = text, original: Any = original) -> Any:
                accelerator.mark(text)
                return original(*args)

            patches.enter_context(mock.patch.object(owner, name, call))
        yield


def ticks(text: str) -> list[int]:
    return [mark.tick for mark in accelerator.marks() if mark.text == text]


def begun(
    path: Path, tensors: Mapping[str, torch.Tensor], budget: zckpt.Budget, snapshot_bytes: int | None = None
) -> RankWrite:
    """Begins a write of the tensors: in the background, if ``snapshot_bytes`` says how much may be copied."""
    background = False if snapshot_bytes is None else zckpt.Background(snapshot_bytes=snapshot_bytes)
    fragments = [fragment("master", name, tensor, 0, tensor.numel()) for name, tensor in tensors.items()]
    metadata = catalog.SaveMetadata(0, BLOCK_BYTES, {}, b"\xc0", {})
    write = rank_write(path, SAVE_ID, [fragments], 0, metadata, WriteOptions(budget=budget, background=background))
    write.begin(Unlocked(write.store))
    return write


def written(path: Path, tensors: Mapping[str, torch.Tensor], budget: zckpt.Budget, **options: int) -> bool:
    """Writes the tensors and returns whether the file has their bytes."""
    write = begun(path, tensors, budget, **options)
    expected = b"".join(tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    forget()
    write.write_data_files(Snapshot())
    (plan,) = write.data_files
    return (path / plan.id.path).read_bytes()[len(plan.header) :] == expected


def on_device(shapes: Mapping[str, tuple[int, ...]], device: str = "sim") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(device) for name, shape in shapes.items()}
