"""What this process knows about the checkpoints of an engine: which run they belong to, and which one the engine has
written, or was restored from, last."""

from __future__ import annotations

import gc
import secrets
from weakref import ReferenceType, ref

_HISTORY = "_zckpt_history"
"""The name of the attribute of an engine that has its ``History``."""
_writes = 0
"""The number of writes in this process so far."""
_written: dict[str, tuple[ReferenceType[object], int]] = {}
"""The engine that has written the last checkpoint of each run, and the number of that write."""
_writers: dict[str, tuple[str, ReferenceType[object]]] = {}
"""Who has written last to each directory of a run, and to each directory of a checkpoint: the identity of the run, and
the engine."""


class History:
    """The checkpoints of one engine."""

    run_id = ""
    """The identity of the engine's run, as in ``Lineage``. It is empty until the engine has written a checkpoint or was
    restored from one."""
    by_contents = False
    """Whether ``run_id`` is made of the names of what is written, as for a state dict. Then all objects that have it
    are one run, because each write makes a new object."""
    since = 0
    """The number of writes in this process when ``run_id`` was set, or when the engine last wrote."""
    last: str | None = None
    """The path of the checkpoint that the engine has written, or was restored from, last."""
    beside = False
    """Whether the engine writes to a directory to which another engine of this process writes, too."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[tuple[int, int], bytes]] = {}
        """For frozen weights of which other ranks hold replicas, by key: the address of the memory with the number of
        changes that torch has counted, and a digest of the values. They may be most of a model, and what has not
        changed is not read again."""


def history_of(engine: object) -> History:
    history = getattr(engine, _HISTORY, None)
    if not isinstance(history, History):
        history = History()
        setattr(engine, _HISTORY, history)
    return history


def run_id_of_next_write(engine: object) -> str:
    """Returns the identity of the run that the next checkpoint of ``engine`` belongs to. It is a new one if the engine
    has none yet, or if another engine of this process has gone on with the same run since: an actor and a critic that
    were restored from one checkpoint become two runs."""
    history = history_of(engine)
    if history.by_contents:
        return history.run_id
    writer, number = _written.get(history.run_id, (None, 0))
    taken = writer is not None and number > history.since and _exists_beside(writer, engine)
    return secrets.token_hex(8) if taken or not history.run_id else history.run_id


def note_write(engine: object, run_id: str) -> None:
    """Notes that ``engine`` writes a checkpoint of the run with this identity."""
    global _writes  # noqa: PLW0603  it orders the writes of all engines
    _writes += 1
    _written[run_id] = ref(engine), _writes
    history = history_of(engine)
    history.run_id, history.since = run_id, _writes


def note_restore(engine: object, path: str, run_id: str | None) -> None:
    """Notes that ``engine`` was restored from the checkpoint at this path. ``run_id``: the identity of the run with
    which it goes on, or None if it stays in its own."""
    history = history_of(engine)
    history.last = path
    history.replicas.clear()  # The restore has changed memory without a change that torch counts.
    if run_id is not None:
        history.run_id, history.since = run_id, _writes


def claim(engine: object, directory: str) -> bool:
    """Notes that ``engine`` writes to this directory, which is that of a run or of a checkpoint, and returns True.
    Returns False, and notes nothing, if another engine of this process, which belongs to another run, has written there
    and still exists."""
    run_id, writer = _writers.get(directory, ("", None))
    own_run_id = history_of(engine).run_id
    if writer is not None and run_id != own_run_id and _exists_beside(writer, engine):
        return False
    _writers[directory] = own_run_id, ref(engine)
    return True


def _exists_beside(noted: ReferenceType[object], engine: object) -> bool:
    """Returns whether the engine that was noted is another one than ``engine``, and still exists."""
    if noted() not in (None, engine) and not history_of(engine).beside:
        gc.collect()  # An engine that nobody uses any more may be in a cycle of references.
    return noted() not in (None, engine)
