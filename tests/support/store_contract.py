"""What every store has to do: a test class for it derives from ``StoreContract`` and has a fixture ``store``."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING
from unittest.mock import ANY

import numpy as np
import pytest

from zckpt.errors import MissingFileError, StorageError
from zckpt.format.names import temporary
from zckpt.storage.buffers import PAGE_BYTES
from zckpt.transfer.staging import StagingPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.storage.contract import Store
    from zckpt.transfer.staging import StagingBuffer


def content(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def staged(data: bytes, start: int, stop: int) -> StagingBuffer:
    stage = StagingPool(-(-(stop - start) // PAGE_BYTES) * PAGE_BYTES).acquire()
    behind = start % PAGE_BYTES
    stage.bytes[behind : behind + stop - start] = np.frombuffer(data[start:stop], np.uint8)
    return stage


def read(store: Store, path: str, nbytes: int = 1 << 20) -> bytes:
    reader = store.reader()
    try:
        return reader.read(path, 0, nbytes)
    finally:
        reader.close()


class StoreContract:
    def test_a_new_store_is_not_there(self, store: Store) -> None:
        assert store.entries() is None
        assert not store.exists("")
        assert not store.exists("a/b")

    def test_directories_exist_for_everybody_once_made(self, store: Store) -> None:
        for _ in range(2):
            store.make_directories("data/rank")
            assert store.exists("data")
            assert store.exists("data/rank")
        assert store.entries() == ["data"]

    def test_what_is_put_is_read(self, store: Store) -> None:
        store.make_directories("data")
        for nbytes in (0, 1, 4096, 300_001):
            store.put(f"data/{nbytes}", content(nbytes))
            store.sync_names("data")
            assert read(store, f"data/{nbytes}") == content(nbytes)
            assert store.exists(f"data/{nbytes}")
        assert store.entries() == ["data"]

    def test_put_and_create_replace_nothing(self, store: Store) -> None:
        store.make_directories("")
        store.put("a", b"old")
        with pytest.raises(StorageError, match="a"):
            store.put("a", b"new")
        with pytest.raises(StorageError, match="a"):
            store.create("a", 0, direct=False)
        assert read(store, "a") == b"old"

    def test_nothing_comes_to_be_in_a_directory_that_is_not_there(self, store: Store) -> None:
        store.make_directories("")
        actions: list[Callable[[str], object]] = [
            lambda path: store.put(path, b""),
            lambda path: store.replace(path, b""),
            lambda path: store.create(path, 0, direct=False),
        ]
        for action in actions:
            with pytest.raises(StorageError):
                action("x/a")
        assert store.entries() == []

    def test_replace_shows_the_old_or_the_new(self, store: Store) -> None:
        """To a reader that opens the file again and again meanwhile."""
        store.make_directories("")
        versions = {content(9000 + 1000 * seed, seed) for seed in range(8)}
        store.replace("a", min(versions))
        seen, ended = set(), threading.Event()

        def look() -> None:
            while not ended.is_set():
                seen.add(read(store, "a"))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            for _ in range(10):
                for version in versions:
                    store.replace("a", version)
                    assert read(store, "a") == version
        finally:
            ended.set()
            thread.join()
        assert seen <= versions
        assert store.entries() == ["a"]

    def test_what_is_prepared_is_committed_unless_somebody_has_removed_it(self, store: Store) -> None:
        store.make_directories("")
        store.replace("a", b"old")
        prepared = store.prepare("a", b"new", "01234567")
        assert (prepared, store.prepare("b", b"")) == (temporary("a", "01234567"), ANY)
        assert read(store, "a") == b"old"
        assert read(store, prepared) == b"new"
        store.commit("a", prepared)
        assert read(store, "a") == b"new"
        assert not store.exists(prepared)
        store.remove(store.prepare("a", b"newer", "89abcdef"))
        with pytest.raises(StorageError):
            store.commit("a", temporary("a", "89abcdef"))
        assert read(store, "a") == b"new"

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("reserved", [0, 200_001])
    def test_a_file_is_written_in_parts_in_any_order(self, store: Store, direct: bool, reserved: int) -> None:
        store.make_directories("")
        data = content(200_001)
        cuts = [0, 1, 4096, 5000, 12288, 100_000, 200_001]
        file = store.create("a", reserved, direct=direct)
        try:
            for start, stop in sorted(itertools.pairwise(cuts), key=lambda span: span[1] % 7):
                file.write(staged(data, start, stop).bytes, start, stop - start)
            file.sync()
        finally:
            file.close()
        store.sync_names("")
        assert read(store, "a") == data

    def test_any_part_is_read(self, store: Store) -> None:
        store.make_directories("data")
        data = content(100_000)
        store.put("data/a", data)
        reader = store.reader()
        assert reader.size("data/a") == len(data)
        assert reader.read("data/a", 99_000, 5000) == data[99_000:]
        assert reader.read("data/a", 100_000, 5) == b""
        views = [np.zeros(nbytes, np.uint8) for nbytes in (0, 10, 5000)]
        assert reader.read_into("data/a", views, 77) == 5010
        assert b"".join(view.tobytes() for view in views) == data[77 : 77 + 5010]
        assert reader.read_into("data/a", [np.zeros(5000, np.uint8)], 99_990) == 10
        got = 0
        if reader.direct is not None:
            stage = StagingPool(6 * PAGE_BYTES).acquire()
            got = reader.direct.read_direct("data/a", stage.bytes, 20 * PAGE_BYTES)
            assert got in (0, len(data) - 20 * PAGE_BYTES)
            assert stage.bytes[:got].tobytes() == data[20 * PAGE_BYTES :][:got]
            assert reader.direct.is_cached("data/a", 5, 10) in (False, True)
        assert (reader.count.metadata_bytes, reader.count.data_bytes) == (1000, 5010 + 10 + got)
        reader.close()

    def test_what_is_not_there_is_named(self, store: Store) -> None:
        store.make_directories("data")
        reader = store.reader()
        for path in ("a", "data/a", "other/a"):
            with pytest.raises(MissingFileError, match=path):
                reader.size(path)
            with pytest.raises(MissingFileError, match=path):
                reader.read(path, 0, 1)

    def test_remove(self, store: Store) -> None:
        store.make_directories("data/rank")
        store.put("data/rank/a", b"a")
        store.put("b", b"b")
        store.remove_if_empty("data/rank")
        assert store.exists("data/rank/a")
        for path in ("data", "b", "never there"):
            store.remove(path)
        assert store.entries() == []
        store.remove_if_empty("")
        assert not store.exists("")

    def test_of_many_claims_one_succeeds(self, store: Store) -> None:
        assert not store.claim("lock", b"there is no directory yet")
        store.make_directories("")
        got: list[bytes] = []

        def claim(data: bytes) -> None:
            if store.claim("lock", data):
                got.append(data)

        threads = [threading.Thread(target=claim, args=(content(500, seed),)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert read(store, "lock") == got[0]
        assert not store.withdraw("lock", b"other")
        assert read(store, "lock") == got[0], "as it was"
        assert [store.withdraw("lock", got[0]) for _ in range(2)] == [True, False]
        assert store.entries() == []

    def test_ages(self, store: Store) -> None:
        store.make_directories("")
        assert store.changed_at("a") is None
        before = store.now()
        store.put("a", b"a")
        first = store.changed_at("a")
        assert first is not None
        time.sleep(0.02)
        store.touch("a")
        second = store.changed_at("a")
        assert second is not None
        assert before <= first < second <= store.now() < before + 60
        assert store.entries() == ["a"]

    def test_sizes(self, store: Store) -> None:
        store.make_directories("data/rank")
        store.make_directories("empty")
        for path, nbytes in (("data/rank/a", 300), ("data/b", 5000), ("c", 7)):
            store.put(path, content(nbytes))
        assert [store.nbytes(path) for path in ("data", "data/rank", "c", "empty", "no")] == [5300, 300, 7, 0, 0]
        assert store.directories() == ["data", "empty"]
