"""The contract of stores as a test suite. It needs pytest: ``pip install zckpt[testing]``."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from zckpt.checkpoint.listing.runs import directories_of, names_in
from zckpt.errors import StorageError
from zckpt.format.names import temporary
from zckpt.storage.contract import ANYTHING
from zckpt.testing.store_calls import (
    CHANGE_SECONDS,
    ROUNDS,
    changed_at,
    content,
    read,
    replace,
    seen_meanwhile,
    succeeds,
    together,
    total_bytes,
)
from zckpt.testing.store_data_contract import DataContract

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.storage.contract import Condition, Prepared, Store

CLOCK_SECONDS = 1.0
"""How much two times of a store may be wrong relative to each other, in seconds, because they may be rounded to whole
seconds."""


class StoreContract(DataContract):
    """Tests for each sentence of ``zckpt.storage.contract`` that can be tested. Run them on your store like this:

        from zckpt.testing import StoreContract

        class TestMyStore(StoreContract):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(Location.of(f"my://bucket{tmp_path}/run/checkpoint"))

    Each test needs a ``store`` at a location of its own. Nothing may be in this directory, or in the one above it, yet.
    ``tmp_path`` is a fixture of pytest that is another path in each test.

    ``rounds`` says how often each race is run, whose winner chance decides. A store in which each takes long may have
    fewer of them.

    Two things cannot be tested: whether something is durable, and whether several hosts see the same.
    """

    rounds = ROUNDS

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
        child.put_new("deep/a", b"content")
        assert names_in(store.child("data")) == ["rank"]
        assert read(store, "data/rank/deep/a") == read(child.parent, "rank/deep/a") == b"content"
        assert directories_of(store.parent) == [store.location.name]
        for path in ("", "data", "data/rank"):
            entry = store.entry(path)
            assert entry is not None
            assert (entry.path, entry.nbytes, entry.is_directory) == (path, None, True)

    def test_the_location_may_be_that_of_a_file_or_end_in_a_slash(self, store: Store) -> None:
        store.put("data/a", b"content")
        file = store.child("data/a")
        entry = file.entry("")
        assert entry is not None
        assert (entry.path, entry.nbytes, entry.is_directory) == ("", 7, False)
        assert file.entries() is None
        with_slash = store.parent.child(f"{store.location.name}/")
        assert read(with_slash, "data/a") == b"content"
        assert names_in(with_slash) == ["data"]

    def test_directories_above_all_others_can_be_looked_at(self, store: Store) -> None:
        above = store
        while above.parent.location != above.location:
            above = above.parent
            assert above.entry("manifest.msgpack") is None

    def test_what_is_put_is_read(self, store: Store) -> None:
        for nbytes in (0, 1, 4096, 300_001):
            store.put_new(f"data/new-{nbytes}", content(nbytes))
            assert store.put(f"data/{nbytes}", content(nbytes))
            store.sync_names("data")
            for path in (f"data/new-{nbytes}", f"data/{nbytes}"):
                assert read(store, path) == content(nbytes)
                entry = store.entry(path)
                assert entry is not None
                assert (entry.path, entry.nbytes, entry.is_directory) == (path, nbytes, False)
            assert store.sizes([f"data/{nbytes}", f"data/new-{nbytes}"]) == [nbytes, nbytes]
        assert names_in(store) == ["data"]

    def test_a_put_replaces_only_what_it_is_to_replace(self, store: Store) -> None:
        assert not store.put("a", b"new", over=b"old")
        assert store.entry("a") is None
        assert store.put("a", b"old")
        assert not store.put("a", b"new")
        assert not store.put("a", b"new", over=b"other")
        assert not store.put("a", b"new", over=b"")
        assert read(store, "a") == b"old"
        assert store.put("a", b"new", over=b"old")
        assert read(store, "a") == b"new"
        assert store.put("a", b"newest", over=ANYTHING)
        assert store.put("b", b"", over=ANYTHING)
        assert (read(store, "a"), read(store, "b")) == (b"newest", b"")
        assert names_in(store) == ["a", "b"]

    def test_a_commit_shows_the_old_or_the_new(self, store: Store) -> None:
        """A reader that opens the file again and again during commits reads only complete versions."""
        versions = [content(9000 + 1000 * seed, seed) for seed in range(8)]
        replace(store, "a", versions[0])

        def commit(number: int) -> None:
            replace(store, "a", versions[number % 8])
            assert read(store, "a") == versions[number % 8]

        seen = seen_meanwhile(store, "a", commit, self.rounds)
        assert len(seen) > 1
        assert seen <= set(versions)
        assert names_in(store) == ["a"]

    def test_either_a_commit_or_the_removal_of_what_was_prepared_comes_first(self, store: Store) -> None:
        """The takeover of a dead writer's lock depends on this: once the file that a writer has prepared is removed,
        this writer cannot commit any more. The test is skipped if the store does not stop commits."""
        if not store.stops_commits:
            pytest.skip("here, only the condition of a commit stops it")
        replace(store, "a", b"old")
        for number in range(self.rounds):
            old, new, digits = read(store, "a"), str(number).encode(), f"{number:08x}"
            prepared = store.prepare("a", new, digits)

            def remove(digits: str = digits) -> bytes:
                store.remove(temporary("a", digits))
                return read(store, "a")

            def commit(prepared: Prepared = prepared, old: bytes = old, new: bytes = new) -> bytes:
                return new if succeeds(lambda: prepared.commit(old)) else old

            calls: list[Callable[[], bytes]] = [commit, remove]
            assert together(calls) == [read(store, "a")] * 2
            assert names_in(store) == ["a"]

    def test_of_many_commits_over_the_same_one_succeeds(self, store: Store) -> None:
        """Without a file whose removal stops a commit, the condition has to be exact. The test is skipped if the store
        stops commits."""
        if store.stops_commits:
            pytest.skip("here, the lock and the removal of what is prepared exclude each other's commits")
        old: bytes | None = None
        for number in range(self.rounds):
            datas = [content(500, seed) + number.to_bytes(2) for seed in range(8)]
            commits = [partial(store.prepare("a", data).commit, old) for data in datas]
            results = together(partial(succeeds, commit) for commit in commits)
            assert sum(results) == 1
            old = datas[results.index(True)]
            assert read(store, "a") == old

    def test_what_is_prepared_is_committed_or_discarded(self, store: Store) -> None:
        replace(store, "a", b"old")
        prepared = store.prepare("a", b"new", "01234567")
        assert read(store, "a") == b"old"
        assert {*names_in(store)} <= {"a", temporary("a", "01234567")}
        prepared.commit()
        assert read(store, "a") == b"new"
        prepared.discard()
        assert read(store, "a") == b"new", "it is committed"
        store.prepare("a", b"newer").discard()
        store.prepare("b", b"newer").discard()
        assert read(store, "a") == b"new"
        assert names_in(store) == ["a"]

    def test_a_commit_replaces_only_what_it_is_to_replace(self, store: Store) -> None:
        conditions: list[tuple[bytes | None, Condition, bool]] = [
            (None, b"old", False), (None, None, True), (b"old", None, False), (b"old", b"older", False),
            (b"old", b"old", True), (b"old", ANYTHING, True), (None, ANYTHING, True),
        ]  # fmt: skip
        for number, (before, over, holds) in enumerate(conditions):
            path = f"a{number}"
            if before is not None:
                replace(store, path, before)
            prepared = store.prepare(path, b"new")
            assert succeeds(partial(prepared.commit, over)) == holds
            prepared.discard()
            present = read(store, path) if store.entry(path) else None
            assert present == (b"new" if holds else before)

    def test_what_is_prepared_and_removed_by_another_is_not_committed(self, store: Store) -> None:
        """The test is skipped if the store does not stop commits."""
        if not store.stops_commits:
            pytest.skip("here, only the condition of a commit stops it")
        prepared = store.prepare("a", b"newer", "89abcdef")
        assert names_in(store) == [temporary("a", "89abcdef")]
        store.remove(temporary("a", "89abcdef"))
        with pytest.raises(StorageError):
            prepared.commit()
        assert names_in(store) == []

    def test_a_file_may_be_put_anywhere(self, store: Store) -> None:
        """A store that has directories makes those that a new file needs, also if they were there before."""
        puts: list[Callable[[str], object]] = [
            lambda path: store.put(path, b"a"),
            lambda path: store.put_new(path, b"a"),
            lambda path: store.prepare(path, b"a").commit(),
            lambda path: store.create(path, 0, direct=False).close(),
        ]
        for put in puts:
            for _ in range(2):
                put("some/where/a")
                store.remove("some/where/a", "some/where", "some")
                assert names_in(store) == []

    def test_what_is_removed_is_gone(self, store: Store) -> None:
        store.put_new("data/rank/a", b"a")
        store.put_new("data/rank/b", b"b")
        store.put_new("b", b"b")
        store.remove("data", "data/rank", "data/rank/a", "never there", "")
        assert names_in(store.child("data/rank")) == ["b"], "what is not empty stays"
        store.remove("data/rank/b", "data/rank", "data")
        assert names_in(store) == ["b"]
        store.remove("b", "")
        assert store.entry("") is None
        assert store.entries() is None

    def test_names_that_begin_alike_are_told_apart(self, store: Store) -> None:
        """A store without directories must not confuse ``a`` with ``ab`` or ``a.b``."""
        for path in ("a/x", "ab/x", "a.b/x"):
            store.put_new(path, b"four")
        assert total_bytes(store, "a") == 4
        assert names_in(store.child("a")) == ["x"]
        store.remove("a/x", "a")
        assert directories_of(store) == ["a.b", "ab"]
        for path in ("b", "bc", "b.c"):
            store.put_new(path, b"four")
        assert total_bytes(store, "b") == 4
        assert store.entry("a") is None
        store.remove("b")
        assert {*names_in(store)} == {"ab", "a.b", "bc", "b.c"}
        assert total_bytes(store, "") == 4 * 4

    @pytest.mark.parametrize("name", ["a b", "ü", "a%20b", "a+b", "a#b", "a&b=c", "~a", "(a)", "a'b"])
    def test_names_come_back_as_they_were_given(self, store: Store, name: str) -> None:
        store.put_new(f"{name}/{name}", b"four")
        assert names_in(store) == directories_of(store) == names_in(store.child(name)) == [name]
        assert [entry.path for entry in store.entries(deep=True) or ()] == [f"{name}/{name}"]
        assert read(store.child(name), name) == b"four"

    def test_of_many_puts_one_succeeds(self, store: Store) -> None:
        datas = [content(500, seed) for seed in range(8)]
        for _ in range(self.rounds):
            results = together(partial(store.put, "lock", data) for data in datas)
            assert sum(results) == 1
            data = datas[results.index(True)]
            assert read(store, "lock") == data
            assert sum(together([partial(store.remove_if, "lock", data)] * 8)) == 1
            assert names_in(store) == []

    def test_of_many_puts_over_the_same_one_succeeds(self, store: Store) -> None:
        """The takeover of a dead writer's lock depends on this."""
        old = b"dead"
        assert store.put("lock", old)
        for number in range(self.rounds):
            datas = [content(500, seed) + number.to_bytes(2) for seed in range(8)]
            results = together(partial(store.put, "lock", data, old) for data in datas)
            assert sum(results) == 1
            old = datas[results.index(True)]
            assert read(store, "lock") == old
        assert names_in(store) == ["lock"]

    def test_only_what_has_these_bytes_is_removed(self, store: Store) -> None:
        assert store.put("lock", b"mine")
        assert not store.remove_if("lock", b"other")
        assert read(store, "lock") == b"mine", "as it was"
        assert store.remove_if("lock", b"mine")
        assert not store.remove_if("lock", b"mine")
        assert names_in(store) == []

    def test_a_put_has_its_bytes_from_its_first_instant(self, store: Store) -> None:
        datas = [content(500 + seed, seed) for seed in range(8)]

        def hold(number: int) -> None:
            assert store.put("lock", datas[number % 8])
            assert read(store, "lock") == datas[number % 8]
            assert store.remove_if("lock", datas[number % 8])

        seen = seen_meanwhile(store, "lock", hold, self.rounds)
        assert len(seen) > 1
        assert seen <= {None, *datas}

    def test_what_is_put_again_while_it_is_removed_does_not_come_back(self, store: Store) -> None:
        """Otherwise a lock would come back that its writer has released, or that another writer has taken over."""
        for _ in range(self.rounds):
            assert store.put("lock", b"mine")
            again = partial(store.put, "lock", b"mine", b"mine")
            assert together([again, again, partial(store.remove_if, "lock", b"mine"), again])[2]
            assert names_in(store) == []

    def test_a_file_has_the_age_of_its_last_change(self, store: Store) -> None:
        store.put_new("first", b"")
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
        aged("a", lambda: store.put("a", b"a", over=b"a"))
        aged("a", lambda: replace(store, "a", b"b"))
        assert store.now() < before + 60 + time.monotonic() - begun
        assert names_in(store) == ["a", "first"]

    def test_sizes_are_those_of_all_files_below(self, store: Store) -> None:
        for path, nbytes in (("data/rank/a", 300), ("data/b", 5000), ("c", 7)):
            store.put_new(path, content(nbytes))
        sizes = [total_bytes(store, path) for path in ("data", "data/rank", "c", "no")]
        assert sizes == [5300, 300, 7, 0]
        assert directories_of(store) == ["data"]

    def test_free_space_is_a_number_of_bytes_if_it_is_known(self, store: Store) -> None:
        store.put_new("a", b"a")
        free = store.free_bytes()
        assert free is None or free > 0
