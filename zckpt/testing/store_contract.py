"""The contract of stores as a test suite. It needs pytest: ``pip install zckpt[testing]``."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import ANY

import numpy as np
import pytest

from zckpt.errors import FormatError, MissingFileError, StorageError
from zckpt.format.names import temporary
from zckpt.listing.runs import directories_of, names_in
from zckpt.state.inventory import FileRange
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.testing.store_calls import (
    CHANGE_SECONDS,
    ROUNDS,
    changed_at,
    content,
    fail,
    pages,
    read,
    replace,
    seen_meanwhile,
    staged,
    succeeds,
    together,
    total_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zckpt.storage.contract import Store

CLOCK_SECONDS = 1.0
"""How much two times of a store may be wrong relative to each other, in seconds, because they may be rounded to whole
seconds."""


class StoreContract:
    """Tests for each sentence of ``zckpt.storage.contract`` that can be tested. Run them on your store like this:

        from zckpt.testing import StoreContract

        class TestMyStore(StoreContract):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(Location.of(f"my://bucket{tmp_path}/run/checkpoint"))

    Each test needs a ``store`` at a location of its own. Neither this directory nor the one above it may exist yet.
    ``tmp_path`` is a fixture of pytest that is another path in each test.

    Two things cannot be tested: whether something is durable, and whether several hosts see the same.
    """

    def test_a_new_store_is_not_there(self, store: Store) -> None:
        """A store whose directory does not exist has no entries and no files."""
        assert store.entries() is None
        assert store.entry("") is None
        assert store.entry("a/b") is None
        assert store.entries("a", deep=True) is None

    def test_children_and_parents_are_stores_at_their_locations(self, store: Store) -> None:
        child = store.child("data").child("rank")
        assert child.location == store.child("data/rank").location == store.location.child("data/rank")
        assert child.parent.parent.location == store.location
        assert store.parent.location == store.location.parent
        assert store.child("").location == store.location
        assert store.entry("") is None, "to make a store touches nothing"
        child.make_directories("deep")
        child.put("deep/a", b"content")
        assert names_in(store.child("data")) == ["rank"]
        assert read(store, "data/rank/deep/a") == read(child.parent, "rank/deep/a") == b"content"
        assert directories_of(store.parent) == [store.location.name]

    def test_directories_exist_for_everybody_once_made(self, store: Store) -> None:
        new = ["rank", "data", store.location.name, store.parent.location.name]
        for expected in (new, []):
            made = store.make_directories("data/rank")
            assert [location.name for location in made[:4]] == expected, "those that this call has made"
            assert store.entry("data") is not None
            assert store.entry("data/rank") is not None
        assert names_in(store) == ["data"]

    def test_what_is_put_is_read(self, store: Store) -> None:
        store.make_directories("data")
        for nbytes in (0, 1, 4096, 300_001):
            store.put(f"data/{nbytes}", content(nbytes))
            store.sync_names("data")
            assert read(store, f"data/{nbytes}") == content(nbytes)
            assert store.entry(f"data/{nbytes}") is not None
        assert names_in(store) == ["data"]

    def test_put_and_create_replace_nothing(self, store: Store) -> None:
        store.make_directories("")
        store.put("a", b"old")
        place = str(store.location.child("a"))
        for action in (lambda: store.put("a", b"new"), lambda: store.create("a", 0, direct=False)):
            with pytest.raises(StorageError) as caught:
                action()
            assert caught.value.file == place
        assert read(store, "a") == b"old"

    def test_a_commit_shows_the_old_or_the_new(self, store: Store) -> None:
        """A reader that opens the file again and again during commits reads only complete versions."""
        store.make_directories("")
        versions = [content(9000 + 1000 * seed, seed) for seed in range(8)]
        replace(store, "a", versions[0])

        def commit(number: int) -> None:
            replace(store, "a", versions[number % 8])
            assert read(store, "a") == versions[number % 8]

        seen = seen_meanwhile(store, "a", commit)
        assert len(seen) > 1
        assert seen <= set(versions)
        assert names_in(store) == ["a"]

    def test_either_a_commit_or_the_removal_of_what_was_prepared_comes_first(self, store: Store) -> None:
        """The takeover of a dead writer's lock depends on this: once the file that a writer has prepared is removed,
        this writer cannot commit any more."""
        store.make_directories("")
        replace(store, "a", b"old")
        for number in range(ROUNDS):
            old, new = read(store, "a"), str(number).encode()
            prepared = store.prepare("a", new)

            def remove(prepared: str = prepared) -> bytes:
                store.remove(prepared)
                return read(store, "a")

            def commit(prepared: str = prepared, old: bytes = old, new: bytes = new) -> bytes:
                return new if succeeds(lambda: store.commit("a", prepared)) else old

            assert together([commit, remove]) == [read(store, "a")] * 2
            assert names_in(store) == ["a"]

    def test_what_is_prepared_is_committed_unless_somebody_has_removed_it(self, store: Store) -> None:
        store.make_directories("")
        replace(store, "a", b"old")
        prepared = store.prepare("a", b"new", "01234567")
        assert (prepared, store.prepare("b", b"")) == (temporary("a", "01234567"), ANY)
        assert read(store, "a") == b"old"
        assert read(store, prepared) == b"new"
        store.commit("a", prepared)
        assert read(store, "a") == b"new"
        assert store.entry(prepared) is None
        store.remove(store.prepare("a", b"newer", "89abcdef"))
        with pytest.raises(StorageError):
            store.commit("a", temporary("a", "89abcdef"))
        assert read(store, "a") == b"new"
        store.remove(temporary("b", "89abcdef"))
        assert len(names_in(store)) == 2, "a, and what was prepared for b with random digits"

    def test_what_cannot_be_prepared_leaves_nothing(self, store: Store) -> None:
        """A ``prepare`` that fails, because the temporary file exists already, leaves no file of its own."""
        store.make_directories("")
        prepared = store.prepare("a", b"one", "01234567")
        with pytest.raises(StorageError):
            store.prepare("a", b"two", "01234567")
        assert {*names_in(store)} <= {prepared}

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("reserved", [0, 150_000, 200_001])
    def test_a_file_is_written_in_parts_in_any_order(self, store: Store, direct: bool, reserved: int) -> None:
        store.make_directories("")
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
        store.make_directories("")
        data = b"".join(bytes([number]) * 5000 for number in range(40))
        with closing(store.create("a", len(data), direct=True)) as file:

            def write(start: int) -> None:
                file.write(staged(data, start, start + 5000), start)

            together(partial(write, start) for start in range(0, len(data), 5000))
            file.sync()
        assert read(store, "a") == data

    @pytest.mark.parametrize("start", [0, 777])
    def test_what_is_shared_is_read_back_and_completed(self, store: Store, start: int, tmp_path: Path) -> None:
        """Pages that ``sharing`` has shared are read back, and the edges are written. The test is skipped if the store
        has no ``sharing``."""
        store.make_directories("")
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
        for directory in ("old", "new"):
            store.make_directories(directory)
        store.put("old/a", data)
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
        store.remove("old")
        assert read(store, "new/a") == data
        assert [entry.links for entry in store.entries("new", deep=True) or ()] == [1]

    def test_any_part_is_read(self, store: Store) -> None:
        store.make_directories("data")
        data = content(100_000)
        store.put("data/a", data)
        reader = store.reader()
        assert reader.size("data/a") == len(data)
        assert reader.read("data/a", 99_000, 5000) == data[99_000:]
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
        store.make_directories("")
        files = {content(50_000, seed): f"{seed}" for seed in range(8)}
        for data, path in files.items():
            store.put(path, data)
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
        store.make_directories("data")
        reader = store.reader()
        for path in ("a", "data/a", "other/a"):
            for action in (lambda: reader.size(path), lambda: reader.read(path, 0, 1)):  # noqa: B023  called here
                with pytest.raises(MissingFileError) as caught:
                    action()
                assert (caught.value.file, caught.value.rule) == (str(store.location.child(path)), "F001")
        assert store.entry("a") is None
        assert fail(lambda: store.touch("a"), lambda: store.commit("b", "a"))
        assert names_in(store) == ["data"]

    def test_a_path_is_a_file_or_a_directory(self, store: Store) -> None:
        store.make_directories("data/rank")
        store.put("a", b"a")
        reader = store.reader()
        actions: list[Callable[[], object]] = [
            lambda: reader.size("data"),
            lambda: reader.read("data", 0, 1),
            lambda: reader.read_into("data", [np.empty(1, np.uint8)], 0),
        ]
        for action in actions:
            with pytest.raises(FormatError) as caught:
                action()
            assert (caught.value.file, caught.value.rule) == (str(store.location.child("data")), "F002")
        reader.close()
        assert store.entries("a") is None
        assert not store.claim("data", b"")
        prepared = store.prepare("data", b"")
        assert fail(
            lambda: store.make_directories("a"),
            lambda: store.make_directories("a/b/c"),
            lambda: store.put("data", b""),
            lambda: store.create("data", 0, direct=False),
            lambda: store.commit("data", prepared),
        )
        assert {*names_in(store)} == {"a", "data", prepared}
        assert directories_of(store.child("data")) == ["rank"]

    def test_nothing_comes_to_be_in_a_directory_that_is_not_there(self, store: Store) -> None:
        """No file can be made in a directory that was never made, or that was removed."""
        assert not store.claim("lock", b"")
        store.make_directories("data")
        store.remove("data")
        for path in ("data/a", "other/a"):
            assert not store.claim(path, b"")
            assert fail(partial(store.put, path, b""), partial(store.prepare, path, b""))
            assert fail(partial(store.create, path, 0, direct=False))
        assert names_in(store) == []

    def test_what_is_removed_is_gone_with_all_in_it(self, store: Store) -> None:
        store.make_directories("data/rank")
        store.put("data/rank/a", b"a")
        store.put("b", b"b")
        store.remove_if_empty("data/rank")
        assert store.entry("data/rank/a") is not None
        assert directories_of(store.child("data")) == ["rank"], "it is not empty"
        store.remove_if_empty("b")
        assert store.entry("b") is not None, "it is no directory"
        store.remove("data/rank/a")
        store.remove_if_empty("data/rank")
        assert store.entries() is not None
        assert names_in(store.child("data")) == [], "it is empty, but was not to be removed"
        store.make_directories("data/rank/deep")
        store.put("data/rank/deep/a", b"a")
        for path in ("data", "b", "never there"):
            store.remove(path)
        assert names_in(store) == []
        store.remove_if_empty("")
        assert store.entry("") is None

    def test_names_that_begin_alike_are_told_apart(self, store: Store) -> None:
        """A store without directories must not confuse ``a`` with ``ab`` or ``a.b``."""
        for path in ("a", "ab", "a.b", "empty", "empty.b"):
            store.make_directories(path)
        for path in ("a/x", "ab/x", "a.b/x", "empty.b/x"):
            store.put(path, b"four")
        assert total_bytes(store, "a") == 4
        assert names_in(store.child("a")) == ["x"]
        store.remove("a")
        store.remove_if_empty("empty")
        assert directories_of(store) == ["a.b", "ab", "empty.b"]
        for path in ("b", "bc", "b.c"):
            store.put(path, b"four")
        assert total_bytes(store, "b") == 4
        assert store.entry("a") is None
        store.remove("b")
        assert {*names_in(store)} == {"ab", "a.b", "empty.b", "bc", "b.c"}
        assert total_bytes(store, "") == 5 * 4

    def test_of_many_claims_one_succeeds(self, store: Store) -> None:
        store.make_directories("")
        datas = [content(500, seed) for seed in range(8)]
        for _ in range(ROUNDS):
            results = together(partial(store.claim, "lock", data) for data in datas)
            assert sum(results) == 1
            data = datas[results.index(True)]
            assert read(store, "lock") == data
            assert sum(together([partial(store.withdraw, "lock", data)] * 8)) == 1
            assert names_in(store) == []

    def test_only_what_was_claimed_is_withdrawn(self, store: Store) -> None:
        store.make_directories("")
        assert store.claim("lock", b"mine")
        assert not store.withdraw("lock", b"other")
        assert read(store, "lock") == b"mine", "as it was"
        assert store.withdraw("lock", b"mine")
        assert not store.withdraw("lock", b"mine")
        assert names_in(store) == []

    def test_a_claim_has_its_bytes_from_its_first_instant(self, store: Store) -> None:
        store.make_directories("")
        datas = [content(500 + seed, seed) for seed in range(8)]

        def hold(number: int) -> None:
            assert store.claim("lock", datas[number % 8])
            assert read(store, "lock") == datas[number % 8]
            assert store.withdraw("lock", datas[number % 8])

        seen = seen_meanwhile(store, "lock", hold)
        assert len(seen) > 1
        assert seen <= {None, *datas}

    def test_what_is_touched_while_it_is_withdrawn_does_not_come_back(self, store: Store) -> None:
        """Otherwise a lock would come back that its writer has released, or that another writer has taken over."""
        store.make_directories("")
        for _ in range(ROUNDS):
            assert store.claim("lock", b"mine")
            touch = partial(succeeds, partial(store.touch, "lock"))
            assert together([touch, touch, partial(store.withdraw, "lock", b"mine"), touch])[2]
            assert names_in(store) == []

    def test_a_file_has_the_age_of_its_last_change(self, store: Store) -> None:
        store.make_directories("")
        before, begun = store.now(), time.monotonic()

        def aged(path: str, action: Callable[[], object]) -> None:
            """Repeats ``action`` until the clock has moved on. Then the file must be younger than before."""
            old = changed_at(store, path) or before - 2 * CLOCK_SECONDS
            give_up = time.monotonic() + CHANGE_SECONDS
            while changed_at(store, path) <= old:
                assert time.monotonic() < give_up, "its age has not changed"
                action()
                time.sleep(0.01)
            assert before - CLOCK_SECONDS <= changed_at(store, path) <= store.now() + CLOCK_SECONDS

        aged("a", lambda: replace(store, "a", b"a"))
        aged("a", lambda: store.touch("a"))
        aged("a", lambda: replace(store, "a", b"b"))
        assert store.now() < before + 60 + time.monotonic() - begun
        assert names_in(store) == ["a"]

    def test_sizes_are_those_of_all_files_below(self, store: Store) -> None:
        store.make_directories("data/rank")
        store.make_directories("empty")
        for path, nbytes in (("data/rank/a", 300), ("data/b", 5000), ("c", 7)):
            store.put(path, content(nbytes))
        sizes = [total_bytes(store, path) for path in ("data", "data/rank", "c", "empty", "no")]
        assert sizes == [5300, 300, 7, 0, 0]
        assert directories_of(store) == ["data", "empty"]

    def test_free_space_is_a_number_of_bytes_if_it_is_known(self, store: Store) -> None:
        store.make_directories("")
        free = store.free_bytes()
        assert free is None or free > 0
