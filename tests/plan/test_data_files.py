"""The layout of data files: the place of each fragment, and the writes that fill a file in whole blocks."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fragments import BLOCK_BYTES, SAVE_ID, data_of, fragments_of, pieces_of
from zckpt.errors import UnsupportedError
from zckpt.format.data_file import decode_header
from zckpt.format.digest import DIGEST_BYTES, block_count
from zckpt.format.dtypes import ITEM_BYTES
from zckpt.format.limits import DATA_ALIGNMENT_BYTES
from zckpt.geometry import Grid, Span
from zckpt.plan import data_files
from zckpt.plan.data_files import HEADER, FragmentPlaces, plan_data_files
from zckpt.plan.inventory import FileRange, Fragment
from zckpt.plan.replicas import Share, own_shares
from zckpt.plan.writes import plan_writes

fragment_lists = st.integers(0, 10**6).map(lambda seed: fragments_of(0, 2, seed))


@given(fragment_lists)
def test_a_file_per_part_and_tier_holds_every_fragment_once(fragments: list[Fragment]) -> None:
    plans = plan_data_files(fragments, SAVE_ID, 0, 2, block_bytes=BLOCK_BYTES)
    assert len({(plan.id.part, plan.id.tier) for plan in plans}) == len(plans)
    placed = [fragment for plan in plans for fragment in plan.fragments]
    assert sorted(map(repr, placed)) == sorted(map(repr, fragments))
    first_block = 0
    for plan in plans:
        assert {(f.part, f.tier) for f in plan.fragments} == {(plan.id.part, plan.id.tier)}
        assert plan.first_block == first_block
        first_block += plan.blocks
        block, offset = block_count(len(plan.header), BLOCK_BYTES), 0
        for fragment, start, nbytes, first in pieces_of(plan):
            assert (first, start) == (block, offset)
            assert nbytes == fragment.span.numel * ITEM_BYTES[fragment.dtype]
            assert start % ITEM_BYTES[fragment.dtype] == 0
            block += block_count(nbytes, BLOCK_BYTES)
            offset += nbytes
        assert (plan.blocks, plan.nbytes) == (block, len(plan.header) + offset)
        assert len(decode_header(plan.header, plan.nbytes, plan.id).entries) == len(plan.fragments)


def test_pieces_keep_the_order_of_memory() -> None:
    """Therefore one sequential write suffices for a flat buffer. Only fragments with larger elements go before those
    with smaller ones."""
    names = ["z", "a", "m"]
    fragments = [Fragment("master", name, "F32", Span(Grid((4,)), 0, 4)) for name in names]
    fragments.insert(1, Fragment("master", "wide", "F64", Span(Grid((4,)), 0, 4)))
    (plan,) = plan_data_files(fragments, SAVE_ID, 0, 1, block_bytes=BLOCK_BYTES)
    assert [fragment.name for fragment in plan.fragments] == ["wide", *names]


@given(fragment_lists, st.integers(1, 4))
def test_writes_tile_the_file_in_whole_blocks(fragments: list[Fragment], batch_blocks: int) -> None:
    batch_bytes = batch_blocks * BLOCK_BYTES
    for plan in plan_data_files(fragments, SAVE_ID, 0, 2, block_bytes=BLOCK_BYTES):
        ops = plan_writes([plan], batch_bytes=batch_bytes, block_bytes=BLOCK_BYTES).ops
        sizes = {HEADER: len(plan.header)} | {i: piece[2] for i, piece in enumerate(pieces_of(plan))}
        starts = {HEADER: 0} | {i: len(plan.header) + piece[1] for i, piece in enumerate(pieces_of(plan))}
        position = 0
        block = plan.first_block
        for op in ops:
            assert op.offset == position
            assert 0 < op.nbytes <= batch_bytes
            assert op.block == block
            for source, start, nbytes in zip(
                op.source.tolist(), op.source_start.tolist(), op.source_bytes.tolist(), strict=True
            ):
                assert starts[source] + start == position
                assert start % BLOCK_BYTES == 0
                assert nbytes % BLOCK_BYTES == 0 or start + nbytes == sizes[source]
                block += block_count(nbytes, BLOCK_BYTES)
                position += nbytes
            assert len(set(op.source)) == len(op.source)
            assert op.offset + op.nbytes == position
        assert position == plan.nbytes
        assert block == plan.first_block + plan.blocks


def test_a_straight_write_may_be_larger_than_a_buffer() -> None:
    mib = 1 << 20
    memory = torch.empty(10 * mib)
    fragments = [Fragment("master", "w", "F32", Span(Grid((len(memory),)), 0, len(memory)), data=memory)]
    files = plan_data_files(fragments, SAVE_ID, 0, 1, block_bytes=mib)
    sizes: dict[str, Any] = {"batch_bytes": 8 * mib, "block_bytes": mib}
    for straight, largest in (["master"], 16 * mib), ([], 8 * mib):
        assert max(op.nbytes for op in plan_writes(files, straight=straight, **sizes).ops) == largest


def fragments_in_memory(memory: torch.Tensor, choice: random.Random) -> list[Fragment]:
    """Returns fragments of one part, in the order of ``memory``. They are adjacent or have gaps between them, their
    dtypes differ, and some begin at unaligned addresses."""
    fragments: list[Fragment] = []
    at = choice.randrange(64)
    while True:
        dtype = choice.choice(["F32", "BF16", "U8", "F64"])
        for _ in range(choice.randrange(1, 5)):
            count = choice.choice([0, 1, 33, choice.randrange(6000)])
            at += choice.choice([0, 0, 0, 1, 8, 640])
            stop = at + count * ITEM_BYTES[dtype]
            if stop > len(memory):
                return fragments
            fragments.append(
                Fragment("master", f"w{len(fragments)}", dtype, Span(Grid((count,)), 0, count), data=memory[at:stop])
            )
            at = stop


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_only_long_runs_in_host_memory_are_written_without_a_buffer(seed: int, batch_blocks: int) -> None:
    memory, worth_bytes = torch.empty(200_000, dtype=torch.uint8), 10_000
    fragments = fragments_in_memory(memory, random.Random(seed))
    with mock.patch.object(data_files, "HOST_BYTES_MIN", worth_bytes):
        files = plan_data_files(fragments, SAVE_ID, 0, 1, block_bytes=BLOCK_BYTES)
        sizes: dict[str, Any] = {"batch_bytes": batch_blocks * BLOCK_BYTES, "block_bytes": BLOCK_BYTES}
        plan, staged = plan_writes(files, straight=["master"], **sizes), plan_writes(files, **sizes)
    assert all(op.place is None for op in staged.ops)
    position = dict.fromkeys(range(len(files)), 0)
    block, straight = 0, set()
    for op in plan.ops:
        fragments = list(files[op.file].fragments)
        assert (op.offset, op.block) == (position[op.file], block)
        position[op.file] += op.nbytes
        block += sum(block_count(nbytes, BLOCK_BYTES) for nbytes in op.source_bytes.tolist())
        if op.place is None:
            continue
        path, address = op.place
        assert not path
        assert (address - op.offset) % DATA_ALIGNMENT_BYTES == 0
        for source, start, nbytes in zip(
            op.source.tolist(), op.source_start.tolist(), op.source_bytes.tolist(), strict=True
        ):
            data = fragments[source].data
            assert isinstance(data, torch.Tensor)
            assert data.data_ptr() + start == address
            address += nbytes
            straight.add(fragments[source].name)
    for number, file in enumerate(files):
        assert position[number] == file.nbytes
        decode_header(file.header, file.nbytes, file.id)
        stop = 0
        run: list[Fragment] = []
        runs: list[list[Fragment]] = []
        for fragment in file.fragments:
            assert isinstance(fragment.data, torch.Tensor)
            if len(fragment.data):
                aligned = fragment.data.data_ptr() % ITEM_BYTES[fragment.dtype] == 0
                if fragment.data.data_ptr() != stop or not aligned:
                    run = []
                    runs.append(run)
                run.append(fragment)
                stop = fragment.data.data_ptr() + len(fragment.data) if aligned else 0
        long = [run for run in runs if sum(len(data_of(fragment)) for fragment in run) >= worth_bytes]
        expected = [run for run in long if data_of(run[0]).data_ptr() % ITEM_BYTES[run[0].dtype] == 0]
        assert straight == {fragment.name for run in expected for fragment in run}


def test_more_blocks_than_a_digest_table_can_hold_are_refused() -> None:
    numel = (1 << 26) << 10
    fragment = Fragment("master", "w", "F32", Span(Grid((numel,)), 0, numel))
    with pytest.raises(UnsupportedError, match=r"67,108,865 blocks of 4,096 bytes; .* 67,108,864"):
        plan_data_files([fragment], SAVE_ID, 0, 1, block_bytes=4096)


@pytest.mark.parametrize("later", [(), ("master",), ("buffer",), ("buffer", "master")])
def test_state_that_may_change_at_any_time_is_read_first(later: tuple[str, ...]) -> None:
    all_parts = ("master", "param", "buffer")
    files = plan_data_files(
        [Fragment(part, "w", "F32", Span(Grid((3000,)), 0, 3000)) for part in all_parts],
        SAVE_ID,
        0,
        1,
        block_bytes=BLOCK_BYTES,
    )
    plan = plan_writes(files, later, batch_bytes=BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    parts = [files[op.file].id.part for op in plan.ops]
    first = [part for part in all_parts if part not in later]
    assert list(dict.fromkeys(parts)) == first + [part for part in all_parts if part in later]
    assert ({*parts[: plan.urgent]}, {*parts[plan.urgent :]}) == ({*first}, {*later})
    assert sorted(op.block for op in plan.ops) == list(range(plan.table_bytes // DIGEST_BYTES))
    assert plan.tensor_bytes == 3 * 3000 * 4


def test_places_are_carried_along_as_if_they_were_looked_up_anew() -> None:
    """A write looks up where bytes are before it knows what of them this rank writes."""
    label, memory = "every rank", torch.arange(24, dtype=torch.int16)

    def fragment(name: str, start: int, data: torch.Tensor | FileRange | None, numel: int = 8) -> Fragment:
        span = Span(Grid((64,)), start, start + numel)
        return Fragment("param", name, "I16", span, data=data, replicated="" if data is None else label)

    held = [
        fragment("a", 0, memory[:8]), fragment("b", 5, FileRange("one", 4096, 16)), fragment("c", 0, None),
        fragment("d", 9, memory[8:16]), fragment("e", 0, memory[16:16], 0),
    ]  # fmt: skip
    more = [fragment("f", 0, FileRange("two", 0, 16)), fragment("g", 1, FileRange("one", 4112, 16))]
    places = FragmentPlaces.of(held).joined(FragmentPlaces.of(more))
    for share in (Share(0, 1), Share(1, 3), Share(2, 3)):
        written, of_written = own_shares([*held, *more], places, {label: share})
        assert len(written) == 7
        assert looked_up(of_written) == looked_up(FragmentPlaces.of(written))


def looked_up(places: FragmentPlaces) -> list[tuple[Any, ...]]:
    """Returns the places of fragments, row by row. Of fragments without data, the start has no meaning."""
    rows = zip(*(column.tolist() for column in places[1:]), strict=True)
    return [(places.paths[path] if path >= 0 else None, start * (path >= 0), *sizes) for path, start, *sizes in rows]
