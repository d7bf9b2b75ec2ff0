"""One writer at a time: who holds the lock, who counts as dead, what a killed writer leaves, and what readers see."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

import zckpt
from tests.support.forks import in_processes, stopped_at
from tests.support.slow_writes import slow_write, value
from tests.support.states import write_through
from tests.support.waiting import wait_until
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.errors import CheckpointExistsError, LockedError, MissingFileError, StorageError
from zckpt.storage import lock as lock_module
from zckpt.storage.local_store import LocalStore, Temporary
from zckpt.storage.lock import DEAD_SECONDS, WriteLock
from zckpt.storage.schemes import open_store
from zckpt.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Releases the locks that a test has taken, because they would go on writing in other tests."""
    taken: list[WriteLock] = []
    acquire = WriteLock.acquire

    def acquire_and_note(lock: WriteLock) -> None:
        taken.append(lock)
        acquire(lock)

    monkeypatch.setattr(WriteLock, "acquire", acquire_and_note)
    yield
    for lock in taken:
        lock.release()


def held(path: Path) -> list[float]:
    """Returns the distinct values of the checkpoint. There is only one if no two writes are mixed."""
    return np.unique(zckpt.open(path).load()["master/w"].numpy()).tolist()


def names_in(path: Path) -> list[str]:
    return sorted(entry.name.split("-")[0] for entry in path.iterdir())


COMMITTED = ["data", "manifest.msgpack"]


MANY = 12


def race(path: Path, number: int) -> bool:
    """Returns whether this process, which is one of ``MANY``, gets the lock and has it when all have tried.

    A process that removes the lock of a dead writer may remove a new lock instead. It puts the new lock back,
    unless another process has got the lock in between.
    """
    lock, tried, has_lock = WriteLock(open_store(path / "c")), path / "tried", True
    tried.mkdir(exist_ok=True)
    try:
        lock.acquire()
    except LockedError:
        has_lock = False
    (tried / str(number)).touch()
    wait_until(lambda: len(os.listdir(tried)) == MANY)
    with suppress(LockedError):
        lock.confirm()
        return has_lock  # the process ends without giving the lock back
    return False


def test_one_of_many_gets_the_lock(tmp_path: Path) -> None:
    assert sum(in_processes(MANY, lambda number: race(tmp_path, number))) == 1
    assert names_in(tmp_path / "c") == ["write.lock"], "no temporary name is left"


def hold(path: Path, wait: Callable[[], None]) -> None:
    WriteLock(open_store(path)).acquire()
    wait()


def test_one_of_many_writers_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    holding = stopped_at(partial(hold, tmp_path / "c"))
    with holding as (pid, _), pytest.raises(LockedError, match=f"process {pid} on .*, since 20"):
        WriteLock(open_store(tmp_path / "c")).acquire()
    assert sum(in_processes(MANY, lambda number: race(tmp_path, number))) == 1
    assert names_in(tmp_path / "c") == ["write.lock"]


def leave(path: Path, age_seconds: float, **holder: Any) -> None:
    """Leaves the lock of a process on another machine, whose last sign of life is ``age_seconds`` old."""
    path.mkdir(exist_ok=True)
    lock = path / "write.lock"
    lock.write_text(json.dumps({"host": "other", "machine": "another", "pid": 1, "started": 1, **holder}))
    os.utime(lock, (time.time() - age_seconds,) * 2)


def test_on_another_machine_the_heartbeat_decides(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    leave(tmp_path, DEAD_SECONDS - 30)
    with pytest.raises(LockedError, match="process 1 on other"):
        WriteLock(store).acquire()
    leave(tmp_path, DEAD_SECONDS + 1)
    with WriteLock(store) as lock:
        lock.confirm()
    assert names_in(tmp_path) == []


def test_the_age_is_by_the_clock_of_the_files(tmp_path: Path) -> None:
    """A host whose clock is an hour ahead does not take a living writer for dead."""
    leave(tmp_path, 0)
    now = time.time()
    with mock.patch("time.time", return_value=now + 3600), pytest.raises(LockedError):
        WriteLock(open_store(tmp_path)).acquire()
    assert abs(open_store(tmp_path).now() - now) < 60
    assert names_in(tmp_path) == ["write.lock"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"machine": null}', "[" * 4000, '{"machine": "OWN", "pid": "a\\u0000b"}'],
    ids=["empty", "cut off", "list", "null", "deep", "no process id"],
)
def test_a_lock_that_tells_nothing_is_judged_by_its_age(tmp_path: Path, content: str) -> None:
    lock = tmp_path / "write.lock"
    lock.write_text(content.replace("OWN", str(linux.pid_space())))
    with pytest.raises(LockedError):
        WriteLock(open_store(tmp_path)).acquire()
    os.utime(lock, (0, 0))
    WriteLock(open_store(tmp_path)).acquire()


def test_a_process_id_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    with WriteLock(open_store(tmp_path)):
        machine = json.loads((tmp_path / "write.lock").read_text())["machine"]
    parent, started = os.getppid(), linux.started(os.getppid())
    assert started is not None
    leave(tmp_path, 0, machine=machine, pid=parent, started=started)
    with pytest.raises(LockedError):
        WriteLock(open_store(tmp_path)).acquire()
    leave(tmp_path, 0, machine=machine, pid=parent, started=None)
    with pytest.raises(LockedError):  # another program may write a lock that does not say when it started
        WriteLock(open_store(tmp_path)).acquire()
    leave(tmp_path, 0, machine=machine, pid=parent, started=started - 1)
    with WriteLock(open_store(tmp_path)):
        pass


def test_a_process_that_is_hidden_is_not_taken_for_dead(tmp_path: Path) -> None:
    """If /proc is mounted with hidepid, processes of other users are hidden. Only a signal shows that they exist."""
    leave(tmp_path, 0, machine=linux.pid_space(), pid=1)
    with mock.patch.object(linux, "started", return_value=None):
        for refused in (None, PermissionError):
            with mock.patch("os.kill", side_effect=refused), pytest.raises(LockedError):
                WriteLock(open_store(tmp_path)).acquire()
        with mock.patch("os.kill", side_effect=ProcessLookupError), WriteLock(open_store(tmp_path)):
            pass


def test_without_process_ids_the_heartbeat_decides(tmp_path: Path) -> None:
    """On systems other than Linux, only the age of a lock shows whether its holder is dead, even on the same
    machine."""
    store = open_store(tmp_path)
    with (
        mock.patch.object(linux, "pid_space", return_value=None),
        mock.patch.object(linux, "started", return_value=None),
        mock.patch("os.kill", side_effect=AssertionError("on Windows this ends the process")),
    ):
        leave(tmp_path, DEAD_SECONDS - 30, machine=None, pid=1 << 22, started=None)
        with pytest.raises(LockedError):
            WriteLock(store).acquire()
        leave(tmp_path, DEAD_SECONDS + 1, machine=None, pid=os.getpid(), started=None)
        with WriteLock(store) as lock:
            lock.confirm()
            with pytest.raises(LockedError):
                WriteLock(store).acquire()


def test_a_lock_that_could_not_be_given_back_is_free(tmp_path: Path) -> None:
    lock = WriteLock(open_store(tmp_path))
    lock.acquire()
    with mock.patch.object(LocalStore, "remove_if", side_effect=StorageError("the disk is on fire")):
        lock.release()
    assert names_in(tmp_path) == ["write.lock"]
    with WriteLock(open_store(tmp_path)):
        pass
    assert names_in(tmp_path) == []


def test_a_process_that_stands_still_is_taken_for_dead_after_a_while(tmp_path: Path) -> None:
    """A process on the same machine is treated like one on another machine."""
    holding = stopped_at(partial(hold, tmp_path))
    with holding as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LockedError):
            WriteLock(open_store(tmp_path)).acquire()
        os.utime(tmp_path / "write.lock", (time.time() - DEAD_SECONDS - 1,) * 2)
        with WriteLock(open_store(tmp_path)):
            pass


def test_the_holder_gives_signs_of_life(tmp_path: Path) -> None:
    looks, put = [], LocalStore.put

    def look(store: LocalStore, *arguments: Any, **keywords: Any) -> bool:
        looks.append(store)
        return put(store, *arguments, **keywords)

    def wait_for_looks(count: int) -> None:
        """Waits until the heartbeat has begun to look at the lock so many times from now on."""
        expected = len(looks) + count
        wait_until(lambda: len(looks) >= expected)

    with (
        mock.patch.object(lock_module, "HEARTBEAT_SECONDS", 0.02),
        mock.patch.object(LocalStore, "put", look),
        WriteLock(open_store(tmp_path)) as lock,
    ):
        os.utime(tmp_path / "write.lock", (0, 0))
        wait_until(lambda: (tmp_path / "write.lock").stat().st_mtime > 0)
        assert (tmp_path / "write.lock").stat().st_mtime > time.time() - 600
        leave(tmp_path, 10_000)  # the lock of another writer, which this one leaves alone
        wait_for_looks(1)  # so that a heartbeat that had looked before has ended
        leave(tmp_path, 10_000)
        wait_for_looks(2)
        assert (tmp_path / "write.lock").stat().st_mtime < time.time() - 9_000
        with pytest.raises(LockedError, match="taken over"):
            lock.confirm()
    assert names_in(tmp_path) == ["write.lock"], "nor is it taken away"


# Writes


def test_a_write_holds_the_lock_and_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with mock.patch.object(WriteLock, "confirm", autospec=True, side_effect=WriteLock.confirm) as confirm:
        write_through(path, value(1))
    assert confirm.called
    assert names_in(path) == COMMITTED
    with pytest.raises(CheckpointExistsError):
        write_through(path, value(2))
    assert names_in(path) == COMMITTED
    with (
        mock.patch("zckpt.checkpoint.writing.rank_write.run_writes", side_effect=OSError("no")),
        pytest.raises(OSError, match="no"),
    ):
        write_through(tmp_path / "other", value(1))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("older", [False, True])
def test_of_two_writers_one_wins(tmp_path: Path, older: bool) -> None:
    path = tmp_path / "c"
    if older:
        write_through(path, value(1))
    with stopped_at(lambda wait: slow_write(path, wait, 2, overwrite=True)) as (_, go_on):
        with pytest.raises(LockedError, match="is writing here"):
            write_through(path, value(3), overwrite=True)
        if older:
            assert held(path) == [1.0], "the older one is whole"
        assert go_on() == str(path)
    assert held(path) == [2.0]
    assert zckpt.validate(path).ok
    assert names_in(path) == COMMITTED


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_through(path, value(1))
    with stopped_at(lambda wait: slow_write(path, wait, 2, overwrite=True)) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LockedError):  # the stopped writer may go on
            write_through(path, value(3), overwrite=True)
    assert names_in(path) == ["data", "data", "manifest.msgpack", "write.lock"]
    (path / "manifest.msgpack.0123abcd.tmp").write_bytes(b"half")
    assert held(path) == [1]
    with stopped_at(lambda wait: slow_write(path, wait, 4, overwrite=True)) as (_, go_on):
        assert names_in(path) == ["data", "data", "manifest.msgpack", "write.lock"], "gone before new data takes space"
        go_on()
    assert names_in(path) == COMMITTED
    assert held(path) == [4]


def test_a_writer_that_was_taken_for_dead_does_not_commit(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with stopped_at(lambda wait: slow_write(path, wait, 2)) as (_, go_on):
        save_id = json.loads((path / "write.lock").read_text())["save_id"]
        leave(path, DEAD_SECONDS + 1, save_id=save_id)  # as a writer on another machine sees it
        write_through(path, value(3))
        assert isinstance(go_on(), Exception)
    assert names_in(path) == COMMITTED
    assert held(path) == [3.0]
    # Here the files of the stopped writer are still there, so only the lock keeps it from its commit.
    with stopped_at(lambda wait: slow_write(tmp_path / "d", wait, 2)) as (_, go_on):
        leave(tmp_path / "d", 0)
        error = go_on()
        assert isinstance(error, LockedError)
    assert names_in(tmp_path / "d") == ["write.lock"]


def write_stopped_at(path: Path, wait: Callable[[], None], number: int, when: str) -> object:
    """Writes, and waits just before or just after the rename that commits. At both times the writer has already checked
    its lock."""
    rename = Temporary.commit

    def commit(prepared: Temporary, *over: Any) -> None:
        if when == "before":
            wait()
        rename(prepared, *over)
        if when == "after":
            wait()

    with mock.patch.object(Temporary, "commit", commit):
        return write_through(path, value(number), overwrite=True, latest=False)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("other", ["commits", "dies"])
def test_two_writers_that_commit_lose_nothing_that_was_committed(tmp_path: Path, when: str, other: str) -> None:
    """One writer is stopped around its commit and taken for dead. The writer that takes over commits, or dies
    before."""
    path = tmp_path / "c"
    write_through(path, value(1))
    with stopped_at(lambda wait: write_stopped_at(path, wait, 2, when)) as (_, go_on):
        leave(path, DEAD_SECONDS + 1, save_id=json.loads((path / "write.lock").read_text())["save_id"])
        if other == "commits":
            write_through(path, value(3), overwrite=True)
        else:
            with stopped_at(lambda wait: slow_write(path, wait, 3, overwrite=True)):
                pass
        expected = [3.0] if other == "commits" else [2.0] if when == "after" else [1.0]
        assert held(path) == expected
        error = go_on()
        assert isinstance(error, LockedError), error
        assert "taken over" in str(error)
    assert held(path) == expected
    assert zckpt.validate(path).ok
    write_through(path, value(4), overwrite=True)
    assert names_in(path) == COMMITTED
    assert held(path) == [4.0]


def test_a_writer_that_has_checked_its_lock_is_shut_out_before_its_commit(tmp_path: Path) -> None:
    """The writer that takes over the lock shuts the old one out before it reads the manifest. It does so even if it
    cannot list names, as on a network file system that shows an old directory."""
    path = tmp_path / "c"
    write_through(path, value(1))
    with stopped_at(lambda wait: write_stopped_at(path, wait, 2, "before")) as (_, go_on):
        leave(path, DEAD_SECONDS + 1, save_id=json.loads((path / "write.lock").read_text())["save_id"])
        with mock.patch.object(LocalStore, "entries", return_value=[]), WriteLock(open_store(path)):
            error = go_on()
        assert isinstance(error, LockedError)
    assert held(path) == [1.0]


def test_a_write_in_the_background_holds_its_lock_until_it_ends(tmp_path: Path) -> None:
    path, go_on = tmp_path / "c", threading.Event()
    commit_write = RankWrite.prepare_commit

    def commit(*arguments: Any, **keywords: Any) -> None:
        go_on.wait(60)
        commit_write(*arguments, **keywords)

    with mock.patch.object(RankWrite, "prepare_commit", commit):
        pending = write_through(path, value(1), background=True)
        with pytest.raises(LockedError):
            WriteLock(open_store(path)).acquire()
        go_on.set()
        pending.wait()
    assert names_in(path) == COMMITTED


# Readers


def test_many_processes_open_at_once(tmp_path: Path) -> None:
    write_through(tmp_path / "c", value(7))

    def load(number: int) -> list[float]:
        return held(tmp_path)

    assert in_processes(32, load) == [[7.0]] * 32


def test_readers_of_what_is_overwritten_get_one_state_or_an_error(tmp_path: Path) -> None:
    """The writer begins when each of three readers has read what was written first."""
    path, reading, rounds = tmp_path / "c", tmp_path / "reading", 10
    write_through(path, value(0), step=0)
    reading.mkdir()

    def work(number: int) -> list[Any]:
        if number == 0:
            wait_until(lambda: len(os.listdir(reading)) == 3)
            for i in range(1, rounds):
                write_through(path, value(i), step=i, overwrite=True)
            return []
        seen: list[Any] = []
        while not seen or seen[-1] != rounds - 1:
            try:
                checkpoint = zckpt.open(path)
                (number_written,) = np.unique(checkpoint.load()["master/w"].numpy()).tolist()
                assert number_written == checkpoint.step
                seen.append(number_written)
                (reading / str(number)).touch()
            except MissingFileError:
                pass
        return seen

    _, *readers = in_processes(4, work)
    for seen in readers:
        assert seen == sorted(seen), "never an older one again"
        assert len(set(seen)) > 1
