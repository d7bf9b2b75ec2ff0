"""The part of the contract of stores that is about files with tensor data, as tests. ``StoreContract`` has the rest."""

from __future__ import annotations

import itertools
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from zckpt.checkpoint.listing.runs import names_in
from zckpt.errors import FormatError, MissingFileError
from zckpt.plan.inventory import FileRange
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.testing.store_calls import content, pages, read, staged, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zckpt.storage.contract import Store


class DataContract:
    """Tests of writers and readers. ``StoreContract`` says how they are run."""

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("reserved", [0, 150_000, 200_001])
    def test_a_file_is_written_in_parts_in_any_order(self, store: Store, direct: bool, reserved: int) -> None:
        data = content(200_001)
        cuts = [0, 1, 4096, 5000, 12288, 100_000, 200_001]
        with closing(store.create("a", reserved, direct=direct)) as file:
            for start, stop in sorted(itertools.pairwise(cuts), key=lambda part: part[1] % 7):
                stage = staged(data, start, stop)
                file.write(stage, start)
                stage[:] = 0  # the memory is used again
            file.sync()
        store.sync_names("")
        assert read(store, "a") == data

    def test_threads_write_one_file_together(self, store: Store) -> None:
        data = b"".join(bytes([number]) * 5000 for number in range(40))
        with closing(store.create("a", len(data), direct=True)) as file:

            def write(start: int) -> None:
                file.write(staged(data, start, start + 5000), start)

            together(partial(write, start) for start in range(0, len(data), 5000))
            file.sync()
        assert read(store, "a") == data

    @pytest.mark.parametrize("direct", [False, True])
    def test_several_write_ranges_of_one_file(self, store: Store, direct: bool) -> None:
        """The ranges of a file that ``make`` has made do not disturb each other. The test is skipped if the store does
        not divide files."""
        if not store.divides_files:
            pytest.skip("this store divides no files")
        data, nbytes = content(3 * PAGE_BYTES + 77), 2 * PAGE_BYTES
        store.make("more/a", len(data), reserve=direct)
        assert read(store, "more/a") == bytes(len(data))
        with (
            closing(store.open_range("more/a", direct=direct)) as first,
            closing(store.parent.child(store.location.name).open_range("more/a", direct=direct)) as second,
        ):
            for writer, start, stop in ((second, nbytes, len(data)), (first, 0, 100), (first, 100, nbytes)):
                writer.write(staged(data, start, stop), start)
            second.sync()
            first.sync()
        assert read(store, "more/a") == data

    @pytest.mark.parametrize("start", [0, 777])
    def test_what_is_shared_is_read_back_and_completed(self, store: Store, start: int, tmp_path: Path) -> None:
        """Pages that ``sharing`` has shared are read back, and the edges are written. The test is skipped if the store
        has no ``sharing``."""
        nbytes = 5 * PAGE_BYTES
        data, source = content(start + nbytes), tmp_path / "outside"
        source.write_bytes(data)
        with closing(store.create("a", 0, direct=False)) as file:
            if file.sharing is None:
                pytest.skip("this store shares no pages")
            stage = staged(data, start, start + nbytes)
            if file.sharing.share(FileRange(str(source), start, nbytes), start):
                stage[-start % PAGE_BYTES : 5 * PAGE_BYTES - start] = 0
                file.sharing.read_back(stage, start)
                assert stage.tobytes() == data[start:]
                file.sharing.write_edges(stage, start)
            else:
                file.write(stage, start)
            file.sync()
        assert read(store, "a")[start:] == data[start:]

    def test_what_is_shared_as_a_whole_stays_when_the_other_goes(self, store: Store) -> None:
        """A file that ``share`` has made stays when the other file is removed. The test is skipped if the store cannot
        share files."""
        data = content(3 * PAGE_BYTES + 77)
        store.put_new("old/a", data)
        assert not store.share("new/none", store.location.child("old/none"))
        assert store.entry("new/none") is None
        if not store.share("new/a", store.location.child("old/a")):
            assert store.entry("new/a") is None
            pytest.skip("this store shares no files")
        assert store.child("not/there").may_share(store.location.child("old"))
        assert not store.share("new/a", store.location.child("old/a")), "it is there"
        old, new = store.entry("old/a"), store.entry("new/a")
        assert old is not None
        assert new is not None
        assert old.nbytes == new.nbytes == len(data)
        assert (old.identity == new.identity) == (old.links == new.links == 2)
        store.remove("old/a", "old")
        assert read(store, "new/a") == data
        assert [entry.links for entry in store.entries("new", deep=True) or ()] == [1]

    def test_any_part_is_read(self, store: Store) -> None:
        data = content(100_000)
        store.put_new("data/a", data)
        reader = store.reader()
        assert reader.size("data/a") == len(data)
        assert reader.read("data/a", 99_000, 1 << 40) == data[99_000:], "it takes no memory for what is not there"
        assert reader.read("data/a", 100_000, 5) == b""
        views, before = [np.zeros(nbytes, np.uint8) for nbytes in (0, 10, 5000)], reader.count.reads
        assert reader.read_into("data/a", views, 77) == 5010
        assert reader.count.reads == before + 1, "one request for all of them"
        assert b"".join(view.tobytes() for view in views) == data[77 : 77 + 5010]
        assert reader.read_into("data/a", [np.zeros(5000, np.uint8)], 99_990) == 10
        direct_bytes = cached_bytes = 0
        if reader.direct is not None:
            portions = [[np.zeros(nbytes, np.uint8) for nbytes in lengths] for lengths in ((10, 0, 5), (7,), (99,))]
            seen: list[bytes] = []

            def use(number: int) -> None:
                assert number == len(seen)
                seen.append(b"".join(view.tobytes() for view in portions[number]))
                assert not any(view.any() for later in portions[number + 1 :] for view in later)

            at = len(data) - 30
            cached_bytes = reader.direct.read_portions("data/a", portions, at, use)
            assert (cached_bytes, seen) == (30, [data[at : at + 15], data[at + 15 : at + 22]])
            assert portions[2][0].tobytes() == data[at + 22 :] + bytes(91)
            memory_bytes, offset_bytes = reader.direct.alignment("data/a")
            start, step = 80_000 // offset_bytes * offset_bytes, max(memory_bytes, offset_bytes)
            room = pages(len(data) + 4 * step)[memory_bytes:]
            views = [room[:offset_bytes], room[2 * step :][: -(-20_000 // offset_bytes) * offset_bytes]]
            direct_bytes = reader.direct.read_direct("data/a", views, start)
            assert direct_bytes in (0, len(data) - start)
            assert b"".join(view.tobytes() for view in views)[:direct_bytes] == data[start:][:direct_bytes]
            assert reader.direct.is_cached("data/a", 5, 10) in (False, True)
        assert (reader.count.metadata_bytes, reader.count.data_bytes) == (1000, 5010 + 10 + cached_bytes + direct_bytes)
        assert reader.count.reads >= 4
        reader.close()

    def test_threads_read_with_one_reader_together(self, store: Store) -> None:
        files = {content(50_000, seed): f"{seed}" for seed in range(8)}
        for data, path in files.items():
            store.put_new(path, data)
        with closing(store.reader()) as reader:

            def look(data: bytes) -> None:
                for start in range(0, len(data), 1000):
                    view = np.empty(1000, np.uint8)
                    assert reader.read_into(files[data], [view], start) == 1000
                    assert view.tobytes() == data[start : start + 1000]

            together(partial(look, data) for data in files)
            assert (reader.count.reads, reader.count.data_bytes) == (400, 400_000)

    def test_what_is_not_there_is_named(self, store: Store) -> None:
        """An error about a missing file names the file and the rule F001."""
        store.put_new("data/b", b"")
        reader = store.reader()
        for path in ("a", "data/a", "other/a"):
            for action in (
                lambda: reader.size(path),  # noqa: B023  called here
                lambda: reader.read(path, 0, 1),  # noqa: B023
                lambda: reader.read_into(path, [np.empty(1, np.uint8)], 0),  # noqa: B023
                lambda: store.sizes(["data/b", path]),  # noqa: B023
            ):
                with pytest.raises(MissingFileError) as caught:
                    action()
                assert (caught.value.file, caught.value.rule) == (str(store.location.child(path)), "F001")
        reader.close()
        assert store.entry("a") is None
        assert not store.put("a", b"", over=b"")
        assert not store.remove_if("a", b"")
        store.remove("a")
        assert names_in(store) == ["data"]

    def test_what_is_no_file_is_not_read(self, store: Store) -> None:
        store.put_new("data/a", b"a")
        reader = store.reader()
        actions: list[Callable[[], object]] = [
            lambda: reader.size("data"),
            lambda: reader.read("data", 0, 1),
            lambda: reader.read_into("data", [np.empty(1, np.uint8)], 0),
        ]
        for action in actions:
            with pytest.raises(FormatError) as caught:
                action()
            assert caught.value.file == str(store.location.child("data"))
            assert caught.value.rule in ("F001", "F002")
        reader.close()
        assert store.entries("data/a") is None
        assert store.entries("data/a", deep=True) is None
