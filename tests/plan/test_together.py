"""Files that several ranks write together: whole pages for each rank, and one header that describes all pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fragments import BLOCK_BYTES, SAVE_ID, fragments_of
from zckpt.errors import FormatError, UnsupportedError
from zckpt.format.data_file import decode_header
from zckpt.format.digest import DIGEST_BYTES
from zckpt.format.limits import DATA_ALIGNMENT_BYTES
from zckpt.format.names import piece_name
from zckpt.geometry import all_of
from zckpt.plan import catalog, together
from zckpt.plan.data_files import HEADER, plan_data_files
from zckpt.plan.inventory import Fragment
from zckpt.plan.together import common_files, joined_digests, own_files, with_common_files
from zckpt.plan.writes import plan_writes

if TYPE_CHECKING:
    from zckpt.plan.data_files import DataFilePlan
    from zckpt.plan.together import CommonFile

FIRST, RANKS = 4, 3
"""The ranks of the group are 4, 5 and 6."""


def planned(of_ranks: list[list[Fragment]]) -> tuple[tuple[CommonFile, ...], list[tuple[DataFilePlan, ...]]]:
    """Returns the common files of a group, and what each of its ranks would write alone."""
    alone = [
        plan_data_files(fragments, SAVE_ID, FIRST + number, 9, block_bytes=BLOCK_BYTES)
        for number, fragments in enumerate(of_ranks)
    ]
    raws = [catalog.pack(catalog.rank_record(FIRST + number, plans)) for number, plans in enumerate(alone)]
    return common_files(catalog.unpack(raws), SAVE_ID, 9, block_bytes=BLOCK_BYTES), alone


def test_pieces_of_more_elements_than_32_bits_can_count() -> None:
    grid = all_of((3 << 33,))
    ((file,), _) = planned([[Fragment("param", "w", "U8", grid.narrow(r << 33, 1 << 33))] for r in range(RANKS)])
    assert file.pieces.start.tolist() == [0, 1 << 33, 1 << 34]
    assert file.pieces.offset.tolist() == [0, 1 << 33, 1 << 34]
    assert file.nbytes - file.data_start == 3 << 33


@given(st.integers(0, 10**6))
def test_the_ranges_and_the_header_agree(seed: int) -> None:
    files, alone = planned([fragments_of(number, RANKS, seed) for number in range(RANKS)])
    written: dict[str, list[tuple[int, int]]] = {}
    pieces: dict[str, dict[str, tuple[int, int]]] = {}
    digests: dict[int, bytes] = {}
    for number, plans in enumerate(alone):
        own = [file.ranges[FIRST + number] for file in files if FIRST + number in file.ranges]
        files_alone, ranges = own_files(plans, own, FIRST, block_bytes=BLOCK_BYTES)
        assert len(files_alone) + len(own) == len(plans)
        assert {plan.id.path for plan in files_alone}.isdisjoint(file.id.path for file in files)
        # The bytes are written where the regions are, and the digests follow each other.
        ops = plan_writes([*files_alone, *ranges], batch_bytes=BLOCK_BYTES * 3, block_bytes=BLOCK_BYTES).ops
        for op in ops:
            if op.file >= len(files_alone):
                written.setdefault(ranges[op.file - len(files_alone)].id.path, []).append((op.offset, op.nbytes))
        blocks = sum(plan.blocks for plan in files_alone)
        for plan in ranges:
            assert plan.first_block == blocks
            assert plan.regions.start[0] % DATA_ALIGNMENT_BYTES == 0
            blocks += plan.blocks
            for source, start, nbytes in zip(plan.regions.source, plan.regions.start, plan.regions.nbytes, strict=True):
                if source >= 0:
                    fragment = plan.fragments[source]
                    name = piece_name(fragment.name, fragment.span)
                    pieces.setdefault(plan.id.path, {})[name] = int(start), int(nbytes)
        own_blocks = [plan.blocks for plan in ranges]
        digests[FIRST + number] = b"".join(bytes([number]) * DIGEST_BYTES * count for count in own_blocks)
    first_block = 0
    for file in files:
        path, stop = file.id.path, 0
        for offset, op_bytes in sorted(written[path]):
            assert offset == stop
            stop += op_bytes
        assert stop == file.nbytes
        header = decode_header(next(iter(file.ranges.values())).header, file.nbytes, file.id)
        entries = {entry.name: (header.data_start + entry.offset, entry.nbytes) for entry in header.entries}
        found = {name: place for name, place in entries.items() if not name.startswith("@")}
        assert {name: place for name, place in found.items() if place[1]} == {
            name: place for name, place in pieces[path].items() if place[1]
        }
        first_blocks = header.first_blocks(BLOCK_BYTES)
        assert sum(file.blocks.values()) == first_blocks[-1]
        of_pieces = [block for entry, block in zip(header.entries, first_blocks, strict=False) if not entry.is_filler]
        assert sorted(file.pieces.block.tolist()) == sorted(of_pieces)
        first_block += first_blocks[-1]
    table = joined_digests(files, digests)
    assert len(table) == first_block * DIGEST_BYTES
    record = with_common_files(catalog.rank_record(FIRST, ()), files, 0)
    assert record.files[-1].first_block == first_block - sum(files[-1].blocks.values()) if files else not record.files


def whole(part: str, name: str, numel: int, copy: int = 0) -> Fragment:
    return Fragment(part, name, "F32", all_of((numel,)), copy=copy)


def test_a_file_is_common_only_if_the_rank_of_its_pieces_has_no_meaning() -> None:
    parts = ("master", "buffer", "exp_avg", "param", "state")
    fragments = [[whole(part, f"{part}.{rank}", 5) for part in parts] for rank in range(2)]
    fragments[1][2] = whole("exp_avg", "exp_avg.0", 5, copy=1)  # another copy of a tensor of the first rank
    fragments[0][3], fragments[1][3] = whole("param", "none", 0), whole("param", "none", 0)  # two entries of one name
    files, alone = planned(fragments)
    assert [file.id.part for file in files] == ["master", "state"]
    files_alone, ranges = own_files(alone[1], [file.ranges[5] for file in files], FIRST, block_bytes=BLOCK_BYTES)
    assert [plan.id.part for plan in files_alone] == ["buffer", "exp_avg", "param"]
    assert [(plan.id.part, plan.id.rank, HEADER in plan.regions.source) for plan in ranges] == [
        ("master", FIRST, False), ("state", FIRST, False)
    ]  # fmt: skip


def test_what_is_too_much_for_one_file_is_refused_with_a_hint() -> None:
    fragments = [
        [Fragment("master", "w" * 900, "F32", all_of((9,)).clip(3 * n, 3 * n + 3)) for n in (rank,)]
        for rank in range(3)
    ]
    with (
        mock.patch.object(together, "DIGEST_TABLE_BYTES_MAX", 2 * DIGEST_BYTES),
        pytest.raises(UnsupportedError) as table,
    ):
        planned(fragments)
    assert "ranks_per_file" in str(table.value)
    with mock.patch("zckpt.format.data_file.HEADER_BYTES_MAX", 4095), pytest.raises(FormatError) as header:
        planned([[whole("master", f"{rank}{number:0>900}", 1) for number in range(3)] for rank in range(2)])
    assert "ranks_per_file" in str(header.value)
