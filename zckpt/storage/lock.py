"""The lock of a checkpoint, so that only one writer changes it at a time.

The lock is a file in the checkpoint. It says which process on which host is writing, and its time shows that the writer
is alive. Locks of the operating system do not suffice, because not every file system keeps them between the hosts of a
cluster. The lock needs only one atomic operation: putting a file at a path if nothing, or a certain content, is there.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from zckpt.errors import LockedError, MissingFileError, NoSpaceError, ZckptError
from zckpt.format import names
from zckpt.system import linux
from zckpt.system.threads import Worker, stop

if TYPE_CHECKING:
    from typing import Self

    from zckpt.storage.contract import Store

HEARTBEAT_SECONDS = 10.0
"""How often a writer touches its lock, in seconds."""
DEAD_SECONDS = 120.0
"""After how many seconds without a heartbeat a writer counts as dead. This is longer than the time for which a client
of a network file system may show an old time of a file."""
_LOCK_BYTES_MAX = 4096
_ATTEMPTS = 5
_held: set[str] = set()
"""The save ids of the locks that this process holds. If a lock names this process, but its save id is missing here, it
is a leftover and counts as dead."""


class WriteLock:
    """The right to change one checkpoint. Use it as a context manager, or call ``acquire`` and ``release``."""

    def __init__(
        self, store: Store, copied: str = "", save_id: str | None = None, *, removed: str = "", frees: bool = False
    ) -> None:
        """Prepares a lock, which ``acquire`` takes. ``copied`` is the save id of the checkpoint that is copied, or
        empty if the write is not a copy. ``save_id`` is that of the write if another process has drawn it. ``removed``
        is the save id of the checkpoint that is removed, or empty. ``frees`` says that the lock is taken to free space.
        If there is no space for its content, such a lock is an empty file."""
        self.save_id = save_id or secrets.token_hex(8)
        """The id of the write that holds the lock. It makes the lock different from any other lock."""
        self.dead: set[str] = set()
        """The save ids of the dead writers whose locks this one has taken over, and the save ids of the checkpoints
        that these writers were copying."""
        self._store = store
        holder = {
            "host": socket.gethostname(),
            "machine": linux.pid_space(),
            "pid": os.getpid(),
            "started": linux.started(os.getpid()),
            "save_id": self.save_id,
            "copied": copied,
            "removed": removed,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.data = json.dumps(holder).encode()
        """The content of the lock."""
        self._frees = frees
        self._released = threading.Event()
        # The thread is a daemon, so that holding a lock keeps no process alive.
        self._heart = Worker(self._beat, "zckpt-heartbeat", daemon=True)

    def acquire(self) -> None:
        """Takes the lock, and makes the checkpoint's directory if it does not exist. Takes over a lock that a dead
        writer has left. Raises LockedError if another writer is alive, and StorageError."""
        try:
            self._acquire()
            self._heart.start()
        except BaseException:
            self.release()
            raise

    def _acquire(self) -> None:
        holder: bytes | None = None
        for _ in range(_ATTEMPTS):  # other processes may take or release the lock at the same time
            _held.add(self.save_id)
            if self._put(holder):
                # A writer that counts as dead may still be alive, may have checked its lock for the last time, and may
                # be about to commit. Removing the manifest that it has prepared stops the commit, if the store can.
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
                self.dead |= {str(_parse(holder).get(field)) for field in ("save_id", "copied", "removed")}
        raise _locked(self._store, "others keep writing here", b"")

    def _put(self, dead_holder: bytes | None) -> bool:
        try:
            return self._store.put(names.LOCK, self.data, dead_holder)
        except NoSpaceError:
            if not self._frees:
                raise
            self.data = b""
            return self._store.put(names.LOCK, self.data)

    def confirm(self) -> None:
        """Raises LockedError if another process has taken this lock over because this process counted as dead."""
        holder = read_lock(self._store)
        if holder != self.data:
            raise _locked(self._store, "another process has taken over here, for this one gave no sign", holder or b"")

    def release(self) -> None:
        """Releases the lock, and removes each directory that was made for it and that is empty. May be called several
        times. Raises nothing but an interrupt."""
        self._released.set()
        stop([self._heart])
        if self.save_id in _held:
            _held.discard(self.save_id)
            with suppress(ZckptError):  # the lock that stays counts as dead later
                self._store.remove_if(names.LOCK, self.data)
        self._store.remove_made()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            # The next heartbeat may succeed, and `confirm` finds out whether the lock was taken over.
            with suppress(ZckptError):
                self._store.put(names.LOCK, self.data, over=self.data)


def read_lock(store: Store, name: str = names.LOCK) -> bytes | None:
    """Returns the content of a checkpoint's lock, or None if there is no lock. ``name``: that of the lock, or of a
    temporary file of it. Raises StorageError and FormatError (F002)."""
    with closing(store.reader()) as reader:
        try:
            return reader.read(name, 0, _LOCK_BYTES_MAX)
        except MissingFileError:
            return None


def is_held(store: Store, save_id: str) -> bool:
    """Returns whether the lock of a checkpoint is that of the write with this save id, or of a copy of the checkpoint
    with this save id. Raises StorageError and FormatError (F002)."""
    fields = _parse(read_lock(store) or b"")
    return save_id in (fields.get("save_id"), fields.get("copied"))


def removed_by(holder: bytes) -> str:
    """Returns the save id of the checkpoint that the holder of a lock removes, or an empty text."""
    return str(_parse(holder).get("removed", ""))


def refuse_other_holder(store: Store) -> None:
    """Raises LockedError if a process holds the lock of a checkpoint, StorageError, and FormatError (F002)."""
    holder = read_lock(store)
    if holder is not None and is_lock(holder):
        raise _locked(store, "another process has taken over here, for the leader of this write gave no sign", holder)


def is_lock(holder: bytes) -> bool:
    """Returns whether ``holder`` is the content of a lock, and not that of another program's file with the same
    name."""
    return not holder or "machine" in _parse(holder)


def is_alive(store: Store, holder: bytes, name: str = names.LOCK) -> bool:
    """Returns whether the process that wrote ``holder`` to the lock may still be writing. If this process can tell that
    the writer has ended, because both are on the same machine and in the same pid space of Linux, the writer is dead.
    In all other cases, the heartbeat decides. ``name``: as for ``read_lock``. A temporary file has no heartbeat, but
    its process needs it only for an instant."""
    fields = _parse(holder)
    pid, started, machine = fields.get("pid"), fields.get("started"), linux.pid_space()
    if machine is not None and fields.get("machine") == machine:
        gone = type(pid) is int and not linux.is_running(pid, started if type(started) is int else None)
        if gone or (pid == os.getpid() and fields.get("save_id") not in _held):
            return False
    entry = store.entry(name)
    return entry is not None and store.now() - entry.changed_at < DEAD_SECONDS


def who(holder: bytes) -> str:
    """Returns a text that names the process that wrote ``holder`` to the lock."""
    fields = _parse(holder)
    if not fields:
        return "a process that frees space on a full disk"
    return f"process {fields.get('pid')} on {fields.get('host')}, since {fields.get('since')}"


def _parse(holder: bytes) -> dict[str, Any]:
    """Returns the fields of a lock, or an empty dictionary if ``holder`` is not the content of a lock."""
    with suppress(ValueError, RecursionError):  # any program may have made a file of this name
        fields = json.loads(holder)
        if isinstance(fields, dict):
            return fields
    return {}


def _locked(store: Store, message: str, holder: bytes) -> LockedError:
    return LockedError(
        f"{message}: {who(holder)}" if _parse(holder) else message,
        file=str(store.location.child(names.LOCK)),
        hint=f"wait for it; a lock that no process holds is taken over after {DEAD_SECONDS:g} seconds",
    )
