"""Large tensors in host memory are written from where they are. The processor copies only parts of pages."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import zckpt
from tests.support.independent_reader import Reader
from tests.support.memory_store import in_memory
from tests.support.reference_engine import tensors_of
from tests.support.states import fragment, same_all
from zckpt.checkpoint.writing.collect import pack_tree
from zckpt.format.digest import BLOCK_BYTES
from zckpt.plan import catalog
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.storage.local_writer import LocalWriter
from zckpt.testing import ReferenceEngine
from zckpt.testing.fragments import write_fragments
from zckpt.transfer import host_memory
from zckpt.transfer import write as io_write

if TYPE_CHECKING:
    from zckpt.plan.inventory import Fragment

MIB = 1 << 20
SHAPES = {"large": (1031, 1009), "small": (33,), "larger": (3, 700_001), "one": (1,), "last": (600_000,)}


def state() -> dict[str, torch.Tensor]:
    """Returns large and small tensors, in flat buffers and alone, at the start of a page and elsewhere."""
    torch.manual_seed(0)
    flat = torch.randn(3 * MIB)
    page = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 3 * MIB), np.uint8)).view(torch.float16)
    page.copy_(torch.randn(len(page)))
    odd = torch.randint(0, 256, (4 * MIB + 1,), dtype=torch.uint8).numpy()
    return {
        "master/first": flat[:1_000_003],
        "master/empty": flat[:0],
        "master/adjacent": flat[1_000_003:1_500_001],
        "master/behind a gap": flat[1_500_011:],
        "master/small": torch.randn(1001),
        "exp_avg/page": page,
        "exp_avg/one": torch.randn(1),
        "exp_avg/half": torch.randn(MIB + 7).bfloat16(),
        "exp_avg/large": torch.randn(2 * MIB + 5),
        "exp_avg/odd": torch.frombuffer(odd, dtype=torch.int32, offset=1, count=MIB),
    }


def written(path: str, tensors: dict[str, torch.Tensor]) -> None:
    fragments: list[Fragment] = []
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        fragments.append(fragment(part, name, tensor, 0, tensor.numel()))
    packed = pack_tree({"engine": {}, "client_state": {}}, "", fragments, 0)
    write_fragments(path, [fragments], catalog.SaveMetadata(1, BLOCK_BYTES, {}, packed, {}))


@pytest.fixture
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of the lengths of the processor's copies in a write: to staging buffers, and of parts of pages."""
    lengths: list[int] = []
    fill, gather, edge = io_write._fill, host_memory.gather, LocalWriter._edge

    def fill_counted(stage: Any, at: int, plan: Any, source: int, start: int, nbytes: int, copies: Any) -> None:
        lengths.append(nbytes)
        fill(stage, at, plan, source, start, nbytes, copies)

    def gather_counted(address: Any, nbytes: Any, start: Any, staged: Any) -> None:
        lengths.extend(nbytes.tolist())
        gather(address, nbytes, start, staged)

    def edge_counted(self: LocalWriter, part: Any, offset: int) -> Any:
        lengths.append(len(part))
        return edge(self, part, offset)

    monkeypatch.setattr(io_write, "_fill", fill_counted)
    monkeypatch.setattr(io_write, "gather", gather_counted)
    monkeypatch.setattr(LocalWriter, "_edge", edge_counted)
    return lengths


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("directory", ["disk", "memory"])
def test_no_large_tensor_is_copied(tmp_path: Path, copied_bytes: list[int], direct: bool, directory: str) -> None:
    tensors = state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZCKPT_DIRECT", str(int(direct)))
        if directory == "disk":
            path = str(tmp_path / "c")
            written(path, tensors)
            check(path, tensors)
            assert Reader(Path(path)).load("master/adjacent") == tensors["master/adjacent"].numpy().tobytes()
        else:
            with in_memory():
                written("memory://c", tensors)
                check("memory://c", tensors)
    small = sum(tensors[key].nbytes for key in ("master/small", "exp_avg/one", "exp_avg/odd"))
    writes_at_most = sum(tensor.nbytes for tensor in tensors.values()) // MIB
    assert small <= sum(copied_bytes) < small + writes_at_most * PAGE_BYTES


@pytest.mark.offload
def test_an_offload_copies_no_large_tensor_either(tmp_path: Path, copied_bytes: list[int]) -> None:
    engine = ReferenceEngine(SHAPES)
    engine.train(1)
    before = tensors_of(engine)
    with zckpt.offloaded(engine, tmp_path) as moved:
        pass
    assert sum(copied_bytes) < moved.nbytes // 100
    assert same_all(tensors_of(engine), before)


def check(path: str, tensors: dict[str, torch.Tensor]) -> None:
    assert same_all(zckpt.open(path).load(), tensors)
    report = zckpt.validate(path, level="deep")
    assert report.ok, str(report)


@pytest.mark.parametrize("threads", [1, 8])
def test_a_write_with_the_smallest_budget(tmp_path: Path, threads: int) -> None:
    """Each write has one block, and begins and ends anywhere in a page."""
    tensors = state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZCKPT_BUDGET_BYTES", str(threads * 2 * MIB))
        patch.setenv("ZCKPT_THREADS", str(threads))
        written(str(tmp_path / "c"), tensors)
    check(str(tmp_path / "c"), tensors)


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_in_the_background_the_state_is_copied_before_it_changes(tmp_path: Path, snapshot: str) -> None:
    engine = ReferenceEngine(SHAPES)
    engine.train(1)
    before = {key: value for key, value in tensors_of(engine).items() if "/" in key}
    changed, write = threading.Event(), LocalWriter.write

    def later(self: LocalWriter, data: Any, offset: int) -> None:
        assert changed.wait(60)
        write(self, data, offset)

    with mock.patch.object(LocalWriter, "write", later):
        pending = zckpt.write(engine, tmp_path / "c", background=True, snapshot=snapshot)  # type: ignore[call-overload]
        engine.train(1)
        changed.set()
        pending.wait()
    stored = {key: value.view(-1) for key, value in zckpt.open(tmp_path / "c").load().items()}
    assert same_all(stored, {key: before[key].view(-1) for key in stored})
    assert zckpt.validate(tmp_path / "c").ok


def test_a_buffer_that_changes_while_it_is_written_can_be_loaded(tmp_path: Path) -> None:
    """Another thread or process may change a buffer at any time. Masters and moments change only in a step."""
    engine = ReferenceEngine(SHAPES)
    engine.train(1)
    counted = torch.zeros(2 * MIB)
    engine.tensors["buffer"] = {"counted": counted}
    write = LocalWriter.write

    def meanwhile(self: LocalWriter, data: Any, offset: int) -> None:
        counted.add_(1)
        write(self, data, offset)

    with mock.patch.object(LocalWriter, "write", meanwhile):
        zckpt.write(engine, tmp_path / "c")
    assert zckpt.validate(tmp_path / "c", level="deep").ok
    assert zckpt.open(tmp_path / "c").load("buffer/counted")["buffer/counted"].max() < counted.max()


@pytest.mark.parametrize("count", [1000, MIB])
def test_data_that_are_not_the_elements_of_a_fragment_are_not_written(tmp_path: Path, count: int) -> None:
    wrong = {"lie in order": torch.zeros(2 * count)[::2], "are its elements": torch.zeros(count - 1)}
    for why, data in wrong.items():
        fragments = [fragment("master", "w", torch.zeros(count), 0, count)._replace(data=data)]
        packed = pack_tree({"engine": {}, "client_state": {}}, "", fragments, 0)
        with pytest.raises(AssertionError, match=why):
            write_fragments(tmp_path / why, [fragments], catalog.SaveMetadata(1, BLOCK_BYTES, {}, packed, {}))


def test_a_write_that_fails_in_the_middle_leaves_nothing_and_the_state_as_it_was(tmp_path: Path) -> None:
    engine = ReferenceEngine(SHAPES)
    engine.train(1)
    before, numbers = tensors_of(engine), itertools.count(1)
    real = os.pwritev

    def fail(fd: int, views: Any, offset: int) -> int:
        if next(numbers) == 4:  # the threads write at the same time, and each gets another number
            raise OSError(errno.EIO, "the disk is on fire")
        return real(fd, views, offset)

    with mock.patch.object(os, "pwritev", fail), pytest.raises(zckpt.StorageError, match="on fire"):
        zckpt.write(engine, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert same_all(tensors_of(engine), before)
    zckpt.write(engine, tmp_path / "c")
    assert zckpt.validate(tmp_path / "c").ok
