"""Swap files on a file system that can share pages between files. Their pages are not written again, but are
checked."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

import zckpt
from tests.support.offload import CASES, restore_and_go_on, write_and_go_on
from tests.support.states import same_all, write_state
from zckpt.format.data_file import decode_header
from zckpt.format.limits import DATA_ALIGNMENT_BYTES
from zckpt.format.names import Tier
from zckpt.geometry import Grid, Span
from zckpt.plan.data_files import FILLER, HEADER, SHARED_BYTES_MIN, plan_data_files
from zckpt.plan.inventory import FileRange, Fragment
from zckpt.plan.writes import plan_writes
from zckpt.storage.local_writer import LocalWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster

MIB = 1 << 20


@pytest.fixture
def shares(tmp_path: Path) -> Iterator[Path]:
    """Yields a directory on an XFS with reflinks. Its image is a sparse file of 1 GiB."""
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("needs root and mkfs.xfs (xfsprogs) for a file system that can share pages")
    image, directory = tmp_path / "image", tmp_path / "shares"
    directory.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, directory], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount an XFS: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # even if a file there is still open


def used_bytes(directory: Path) -> int:
    os.sync()
    stat = os.statvfs(directory)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def written_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that collects the number of bytes of each write to a data file."""
    lengths: list[int] = []
    put = LocalWriter._put

    def counted(self: LocalWriter, fd: int, views: Sequence[memoryview], offset: int) -> None:
        if self.path.endswith(".safetensors"):
            lengths.append(sum(map(len, views)))
        put(self, fd, views, offset)

    monkeypatch.setattr(LocalWriter, "_put", counted)
    return lengths


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_shared_and_nothing_else_changes(shares: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    shapes = {"large": (3001, 1009), "one": (1,), "small": (3, 5), "larger": (4_000_003,)}
    (shares / "swap").mkdir()
    plain = write_state(shares / "plain", 2, shapes, layout="random", seed=seed)
    nvme = sum(p.nbytes for info in zckpt.open(plain.path).values() for p in info.pieces if p.tier == "nvme")
    assert nvme > 4 * MIB
    lengths = written_pages(monkeypatch)
    swapped = write_state(shares / "swapped", 2, shapes, layout="random", seed=seed, swap=shares / "swap")
    assert same_all(zckpt.open(swapped.path).load(), plain.full)
    report = zckpt.validate(swapped.path)
    assert report.ok, str(report)
    total = sum(info.nbytes for info in zckpt.open(plain.path).values())
    assert sum(lengths) < total - nvme + 64 * 4096


def test_a_shared_checkpoint_takes_no_space_and_keeps_its_bytes(shares: Path) -> None:
    """The checkpoint keeps its bytes when the swap file is written again in place, as DeepSpeed does at the next
    step."""
    swap, count = shares / "swap", 16 * MIB
    value = torch.randn(count)
    swap.write_bytes(value.numpy().tobytes())
    from zckpt.plan import catalog
    from zckpt.testing.fragments import write_fragments

    before = used_bytes(shares)
    fragment = Fragment(
        "master", "w", "F32", Span(Grid((count,)), 0, count), Tier.NVME, data=FileRange(str(swap), 0, 4 * count)
    )
    target = str(shares / "c")
    write_fragments(target, [[fragment]], catalog.SaveMetadata(0, 1 << 20, {}, b"\xc0", {}))
    assert used_bytes(shares) - before < 4 * MIB
    (file,) = (shares / "c").glob("data-*/rank-00000/swap.master.safetensors")
    with swap.open("r+b") as opened:
        opened.write(bytes(4 * count))
    assert file.read_bytes()[-4 * count :] == value.numpy().tobytes()


@pytest.mark.nvme
def test_a_restored_run_goes_on_bit_for_bit(cluster: Cluster, shares: Path) -> None:
    steps, setup = CASES["nvme+disk"]
    path, swap, other = (str(shares / name) for name in ("checkpoint", "swap", "other"))
    through = cluster.run(write_and_go_on, 2, path, setup, swap, steps)
    assert cluster.run(restore_and_go_on, 2, path, setup, other, 0, steps) == through
    assert zckpt.validate(path).ok


def test_long_runs_of_a_swap_file_keep_their_place_in_a_page() -> None:
    """The parameters have odd lengths, and gaps between them. A filler precedes only a run that is long enough."""
    half = SHARED_BYTES_MIN // 8

    def fragment(name: str, offset: int, count: int) -> Fragment:
        return Fragment(
            "master",
            name,
            "F32",
            Span(Grid((count,)), 0, count),
            Tier.NVME,
            data=FileRange("swap", offset, 4 * count),
        )

    fragments = [
        fragment("first", 0, half + 1),
        fragment("adjacent", 4 * (half + 1), half),
        fragment("behind a gap", 4 * (2 * half + 8), 2 * half),
        fragment("short", 16 * half, 3),
        fragment("again long", 20 * half, 2 * half + 5),
    ]
    (plan,) = plan_data_files(fragments, "0123456789abcdef", 0, 1, block_bytes=4096)
    header = decode_header(plan.header, plan.nbytes, plan.id)
    assert [entry.is_filler for entry in header.entries] == [False, False, True, False, False, True, False]
    for number in (0, 1, 2, 4):
        source = fragments[number].data
        assert isinstance(source, FileRange)
        assert (source.offset - plan.pieces.start[number]) % DATA_ALIGNMENT_BYTES == 0
    ops = plan_writes([plan], batch_bytes=1 << 23, block_bytes=4096).ops
    assert [op.source.tolist() for op in ops] == [[HEADER], [0, 1], [FILLER], [2], [3, FILLER], [4]]
    position, block = 0, 0
    for op in ops:
        assert op.offset == position
        assert op.block == block
        block += int((-(-op.source_bytes // 4096)).sum())
        position += op.nbytes
    assert (position, block) == (plan.nbytes, plan.blocks)
