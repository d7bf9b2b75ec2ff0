"""One writer at a time: a file in the checkpoint that says who writes it, on which host, and that it is alive.

No lock of the operating system: those are not kept between the hosts of a cluster by every file system. What has to be
atomic is that a file is made, with its content, only where there is none.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from contextlib import closing, suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from zckpt.errors import LockedError, MissingFileError, ZckptError
from zckpt.format import names
from zckpt.system import linux
from zckpt.system.threads import Worker, stop

if TYPE_CHECKING:
    from typing_extensions import Self

    from zckpt.storage.contract import Store

HEARTBEAT_SECONDS = 10.0
DEAD_SECONDS = 120.0
"""Without a heartbeat, after which a writer is taken for dead. More than a client of a network file system may show old
times for."""
_LOCK_BYTES_MAX = 4096
_ATTEMPTS = 5
_held: set[str] = set()
"""The save ids of the locks that this process holds. A lock of this process whose save id is missing here was left
over, and counts as dead."""


class WriteLock:
    """The right to change one checkpoint. A context manager, or ``acquire`` and ``release``."""

    def __init__(self, store: Store, copied: str = "") -> None:
        """``copied``: the save id of the checkpoint that is copied, if what is written is a copy of one."""
        self.save_id = secrets.token_hex(8)
        """Of the write that it is for; it makes this lock unlike any other."""
        self.dead: set[str] = set()
        """The save ids of dead writers whose locks this one has taken over, and those of the data that they copied."""
        self._store = store
        holder = {
            "host": socket.gethostname(),
            "machine": linux.pid_space(),
            "pid": os.getpid(),
            "started": linux.started(os.getpid()),
            "save_id": self.save_id,
            "copied": copied,
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self._data = json.dumps(holder).encode()
        self._released = threading.Event()
        # A daemon: to be the holder keeps no process alive
        self._heart = Worker(self._beat, "zckpt-heartbeat", daemon=True)

    def acquire(self) -> None:
        """Makes the checkpoint's directory too. A lock that a dead writer has left is taken over. Raises LockedError,
        StorageError."""
        try:
            self._acquire()
            self._heart.start()
        except BaseException:
            self.release()
            self._store.remove_if_empty("")
            raise

    def _acquire(self) -> None:
        for _ in range(_ATTEMPTS):  # others may come and go, or take over what is dead, at the same time
            self._store.make_directories("")
            _held.add(self.save_id)
            if self._store.claim(names.LOCK, self._data):
                # A writer that was taken for dead may already have checked its lock for the last time, and be about to
                # commit.
                for save_id in self.dead:
                    prepared = names.temporary(names.MANIFEST, names.prepared_digits(save_id))
                    if names.is_temporary(prepared, names.MANIFEST):
                        self._store.remove(prepared)
                return
            _held.discard(self.save_id)
            holder = read_lock(self._store)
            if holder is not None:
                if is_alive(self._store, holder):
                    raise _locked(self._store, "another process is writing here", holder)
                self.dead |= {str(_parse(holder).get(field)) for field in ("save_id", "copied")}
                self._store.withdraw(names.LOCK, holder)
        raise _locked(self._store, "others keep writing here", b"")

    def confirm(self) -> None:
        """Raises LockedError if somebody has taken this lock over: this process was taken for dead."""
        holder = read_lock(self._store)
        if holder != self._data:
            raise _locked(self._store, "another process has taken over here, for this one gave no sign", holder or b"")

    def release(self) -> None:
        """As often as one likes. Raises nothing but an interrupt."""
        self._released.set()
        stop([self._heart])
        if self.save_id in _held:
            _held.discard(self.save_id)
            with suppress(ZckptError):  # then it is taken for dead later
                self._store.withdraw(names.LOCK, self._data)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with suppress(ZckptError):  # the next one may come through; whose it is, `confirm` tells
                if read_lock(self._store) == self._data:
                    self._store.touch(names.LOCK)


def read_lock(store: Store) -> bytes | None:
    """What the lock of a checkpoint holds; None if there is none. Raises StorageError, FormatError (F002)."""
    with closing(store.reader()) as reader:
        try:
            return reader.read(names.LOCK, 0, _LOCK_BYTES_MAX)
        except MissingFileError:
            return None


def is_lock(holder: bytes) -> bool:
    """Whether this is the content of a lock, and not of another program's file that has the same name."""
    return "machine" in _parse(holder)


def is_alive(store: Store, holder: bytes) -> bool:
    """Whether the process that left ``holder`` in the lock may still be writing. Where process ids mean nothing to this
    process, as on another machine, or tell too little, as on another system than Linux, its heartbeat alone decides."""
    known = _parse(holder)
    pid, machine = known.get("pid"), linux.pid_space()
    if machine is not None and known.get("machine") == machine:
        gone = type(pid) is int and not linux.is_running(pid, known.get("started"))
        if gone or (pid == os.getpid() and known.get("save_id") not in _held):
            return False
    last_sign = store.changed_at(names.LOCK)
    return last_sign is not None and store.now() - last_sign < DEAD_SECONDS


def who(holder: bytes) -> str:
    """Names the process that left ``holder`` in the lock."""
    known = _parse(holder)
    return f"process {known.get('pid')} on {known.get('host')}, since {known.get('since')}"


def _parse(holder: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):  # Any program may have made a file of this name.
        known = json.loads(holder)
        if isinstance(known, dict):
            return known
    return {}


def _locked(store: Store, message: str, holder: bytes) -> LockedError:
    return LockedError(
        f"{message}: {who(holder)}" if _parse(holder) else message,
        file=str(store.location.child(names.LOCK)),
        hint=f"wait for it; a lock that no process holds is taken over after {DEAD_SECONDS:g} seconds",
    )
