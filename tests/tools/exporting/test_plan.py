"""The plan of an export: files as the safetensors library writes them, the runs of elements that make up a view, and
the windows in which a file is written."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
import safetensors.torch
import torch

from zckpt.format.dtypes import ITEM_BYTES
from zckpt.geometry import Grid, Span, all_of
from zckpt.tools.exporting.plan import (
    Extent,
    OutputFile,
    OutputTensor,
    count_runs,
    runs_of_view,
    safetensors_file,
    safetensors_files,
    size_in_bytes,
    split_into_files,
    windows,
)
from zckpt.transfer.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from pathlib import Path


def output(name: str, dtype: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name, dtype, shape, (Extent(name, all_of(shape)),))


def test_a_file_of_all_dtypes_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    shapes = [(3,), (), (2, 5), (0, 7), (1,)]
    names = ["a.10", "a.2", "z", 'quote"and\\', "größe"]
    tensors = {
        f"{name}.{dtype}": torch.zeros(shape, dtype=TORCH_DTYPES[dtype])
        for dtype in ITEM_BYTES
        for name, shape in zip(names, shapes, strict=True)
    }
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    theirs = (tmp_path / "theirs").read_bytes()
    planned = safetensors_file("x", [output(name, name.split(".")[-1], tuple(t.shape)) for name, t in tensors.items()])
    header = planned.known[0]
    assert theirs == header + bytes(planned.nbytes - len(header))


def test_tensors_are_split_as_by_hugging_face() -> None:
    choice = random.Random(0)
    for _ in range(200):
        sizes = [choice.randrange(200) for _ in range(choice.randrange(1, 20))]
        bytes_max = choice.randrange(1, 300)
        tensors = [output(f"t{number}", "U8", (size,)) for number, size in enumerate(sizes)]
        theirs = huggingface_hub.split_torch_state_dict_into_shards(
            {tensor.name: torch.zeros(tensor.shape, dtype=torch.uint8, device="meta") for tensor in tensors},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=bytes_max,
        )
        data_files = split_into_files(tensors, bytes_max)
        files = safetensors_files(data_files)
        ours = {
            file.name: [tensor.name for tensor in data_file] for file, data_file in zip(files, data_files, strict=True)
        }
        assert ours == theirs.filename_to_tensors


def test_the_runs_of_a_view_have_its_elements() -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    views = [
        whole, whole[1:3], whole[:, 2:4], whole[:, :, 1:3], whole[2], whole[:, 3], whole.transpose(0, 1),
        whole.chunk(2, 1)[1].chunk(4, 0)[2].squeeze(0), whole[:, :, 0:1], whole[1:1], whole[3, 5, 4], whole[::2],
    ]  # fmt: skip
    for view in views:
        columns = runs_of_view(view.shape, view.stride(), int(view.storage_offset()))
        runs = list(zip(*(column.tolist() for column in columns), strict=True))
        elements = [element for first, numel in runs for element in range(first, first + numel)]
        assert elements == view.flatten().tolist()
        assert len(runs) <= count_runs(view.shape, view.stride())
    assert [column.tolist() for column in runs_of_view((4, 6, 5), (30, 5, 1), 0)] == [[0], [120]]


@pytest.mark.parametrize("bytes_max", [8, 64, 100, 1 << 20])
def test_windows_cover_each_byte_of_a_file_once_and_in_order(bytes_max: int) -> None:
    box = Grid((100,))
    halves = Extent("w", Span(box, 0, 20)), Extent("w", Span(box, 40, 60))
    views = {"half": halves, "whole": (Extent("v", Span(box, 0, 77)),), "empty": ()}
    file = safetensors_file(
        "x",
        [
            OutputTensor(name, "F16", (sum(extent.span.numel for extent in extents),), extents)
            for name, extents in views.items()
        ],
    )
    header = file.known[0]
    file = OutputFile("x", file.nbytes, {0: header[:5], 5: header[5:]}, file.tensors)
    content = {source: torch.arange(100, dtype=torch.float16) + number for number, source in enumerate("wv")}
    expected = header + b"".join(
        extent.of(content[extent.source]).numpy().tobytes()
        for tensor in file.tensors.values()
        for extent in tensor.extents or ()
    )
    joined, cuts = b"", []

    def cut(extent: Extent) -> int:
        cuts.append(extent)
        return max(extent.span.start + 1, extent.span.stop - extent.span.stop % 3)

    for window in windows(file, bytes_max, cut):
        assert window.start == len(joined)
        for part in window.parts:
            assert window.start + part.offset == len(joined)
            known = part.content
            values = known if isinstance(known, bytes) else known.of(content[known.source]).numpy().tobytes()
            assert len(values) == part.nbytes
            joined += values
        assert window.start + window.nbytes == len(joined)
        assert window.nbytes <= bytes_max
    assert joined == expected
    assert bool(cuts) == (bytes_max <= 100)


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), (" 1.5 mb", 1_500_000), ("77", 77), (12, 12)])
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert size_in_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "5 GiB", "-1", 0, "GB", "1e9", "0KB"])
def test_wrong_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="a size must be"):
        size_in_bytes(text)
