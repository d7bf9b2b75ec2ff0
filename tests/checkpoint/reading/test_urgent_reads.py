"""Some tensors of a read are urgent. They are read first, and the caller is told once they are filled, while others may
still be read."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import zckpt
from tests.support.states import write_state
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.reading import loader as reading
from zckpt.checkpoint.reading.checkpoint import Checkpoint
from zckpt.checkpoint.reading.loader import Loader, ReadRequest
from zckpt.geometry import all_of
from zckpt.storage.local_reader import LocalReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


MIB = 1 << 20
TENSORS = {"large": (700_001,), "small": (7,), "empty": (0, 3)}
OTHER, URGENT = "exp_avg", "master"
"""The parts. The files of the other part are written first, so that the urgent ones have to overtake them."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Loader:
    write_state(tmp_path / "c", 2, TENSORS, parts=[OTHER, URGENT], block_bytes=MIB)
    return open_loader(tmp_path / "c", budget=zckpt.Budget(32 * MIB, 2))


def empty(expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns memory for all tensors. Those of the urgent part come first."""
    keys = sorted(expected, key=lambda key: not key.startswith(URGENT))
    return {key: torch.full(expected[key].shape, torch.nan) for key in keys}


def read(checkpoint: Loader, out: Mapping[str, torch.Tensor], urgent: int = len(TENSORS), **options: Any) -> None:
    requests = [ReadRequest(checkpoint.contents[key], all_of(tensor.shape), tensor) for key, tensor in out.items()]
    checkpoint.read(requests, urgent=urgent, **options)


def same(out: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], part: str = "") -> bool:
    return all(torch.equal(out[key], expected[key]) for key in expected if key.startswith(part))


def is_urgent_file(path: str) -> bool:
    return path.endswith(f"{URGENT}.safetensors")


@pytest.mark.parametrize("planned", [1, 2, 3, 100], ids="{} requests planned at a time".format)
@pytest.mark.parametrize("is_cached", [True, False, None], ids=["cached", "not cached", "the urgent part not cached"])
def test_the_caller_is_told_once_that_urgent_tensors_are_filled(
    checkpoint: Loader, is_cached: bool | None, planned: int
) -> None:
    expected, seen = Checkpoint(checkpoint).load(), list[bool]()
    out = empty(expected)

    def says_cached(reader: LocalReader, path: str, offset: int, nbytes: int) -> bool:
        return not is_urgent_file(path) if is_cached is None else is_cached

    with (
        mock.patch.object(LocalReader, "is_cached", says_cached),
        mock.patch.object(reading, "PLANNED_PIECES", planned * checkpoint.manifest.world_size),
    ):
        read(checkpoint, out, after_urgent=lambda: seen.append(same(out, expected, URGENT)))
    assert seen == [True]
    assert same(out, expected)


def test_other_tensors_wait_for_no_urgent_tensor_to_be_filled(checkpoint: Loader) -> None:
    """A read of the other part begins while an urgent one is still under way."""
    expected, other_begun = Checkpoint(checkpoint).load(), threading.Event()
    out = empty(expected)
    read_direct, waited = LocalReader.read_direct, list[bool]()

    def read_late(reader: LocalReader, path: str, views: Any, offset: int) -> int:
        if not is_urgent_file(path):
            other_begun.set()
        elif not waited:
            waited.append(False)
            waited.append(other_begun.wait(60))
        return read_direct(reader, path, views, offset)

    with mock.patch.multiple(LocalReader, is_cached=lambda *_: False, read_direct=read_late):
        read(checkpoint, out)
    assert waited == [False, True]
    assert same(out, expected)


def test_urgent_tensors_wait_for_no_other_tensor(checkpoint: Loader) -> None:
    """All large reads of the other part end only after the urgent tensors are filled."""
    expected, urgent_filled = Checkpoint(checkpoint).load(), threading.Event()
    out = empty(expected)
    read_direct, waited = LocalReader.read_direct, list[bool]()

    def read_late(reader: LocalReader, path: str, views: Any, offset: int) -> int:
        if not is_urgent_file(path):
            waited.append(urgent_filled.wait(60))
        return read_direct(reader, path, views, offset)

    with mock.patch.multiple(LocalReader, is_cached=lambda *_: False, read_direct=read_late):
        read(checkpoint, out, after_urgent=urgent_filled.set)
    assert waited == [True] * checkpoint.manifest.world_size
    assert same(out, expected)


def test_without_urgent_bytes_the_caller_is_told_too(checkpoint: Loader) -> None:
    calls: list[str] = []
    checkpoint.read([], after_urgent=partial(calls.append, "nothing to read"))
    info = checkpoint.contents[f"{URGENT}/empty"]
    request = ReadRequest(info, all_of(info.shape), torch.empty(info.shape))
    checkpoint.read([request], urgent=1, after_urgent=partial(calls.append, "no bytes"))
    meta = ReadRequest(checkpoint.contents[f"{URGENT}/small"], all_of((7,)), torch.empty(7, device="meta"))
    checkpoint.read([meta], urgent=1, after_urgent=partial(calls.append, "no memory"))
    assert calls == ["nothing to read", "no bytes", "no memory"]


def test_without_urgent_tensors_the_caller_is_told_at_the_beginning(checkpoint: Loader) -> None:
    expected, seen = Checkpoint(checkpoint).load(), list[bool]()
    out = empty(expected)
    read(checkpoint, out, 0, after_urgent=lambda: seen.append(all(bool(t.isnan().all()) for t in out.values())))
    assert seen == [True]
    assert same(out, expected)


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "not cached"])
def test_after_damage_of_an_urgent_tensor_the_caller_is_not_told(checkpoint: Loader, is_cached: bool) -> None:
    expected, calls = Checkpoint(checkpoint).load(), list[int]()
    piece = checkpoint.contents[f"{URGENT}/large"].pieces[-1]
    with open(f"{checkpoint.path}/{piece.file}", "r+b") as file:
        file.seek(piece.offset + 5)
        byte = file.read(1)[0]
        file.seek(piece.offset + 5)
        file.write(bytes([byte ^ 1]))
    with (
        mock.patch.object(LocalReader, "is_cached", return_value=is_cached),
        pytest.raises(zckpt.DigestError, match=f"{URGENT}/large"),
    ):
        read(checkpoint, empty(expected), after_urgent=lambda: calls.append(1))
    assert not calls
