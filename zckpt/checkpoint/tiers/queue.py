"""Runs the uploads of each group of ranks in a thread, one at a time, while the training writes further checkpoints."""

from __future__ import annotations

import os
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from zckpt.checkpoint.copying.copy import TRIES
from zckpt.errors import RankError, ZckptError, first_few, warn
from zckpt.system.threads import Worker

if TYPE_CHECKING:
    from zckpt.checkpoint.tiers.upload import Upload
    from zckpt.ranks.collectives import Ranks
    from zckpt.storage.location import Location

SHOWN_MAX = 5
"""The largest number of checkpoints that a warning names."""
_all: dict[tuple[int, ...], Uploads] = {}
"""The uploads of this process, by the numbers in the job of the ranks that make them together."""


class Uploads:
    """The uploads of the checkpoints that some ranks write.

    A write first calls ``expect``, and then ``add`` once its checkpoint is committed, or ``cancel`` if it has failed.
    Rank 0 chooses which checkpoint is uploaded next: the newest one. Those that are older and wait too are skipped.
    """

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        """The ranks of the newest upload."""
        self._changed = threading.Condition()
        self._expected: dict[str, Upload] = {}
        """The uploads of the checkpoints that are being written, by save id."""
        self._waiting: list[Upload] = []
        """The uploads that can begin, the newest last."""
        self._under_way: list[Upload] = []
        self._failed: Upload | None = None
        """The upload that is tried again with the next one."""
        self._error: BaseException | None = None
        """The error of the last upload, if it has failed."""
        self._worker: Worker | None = None

    def expect(self, upload: Upload) -> None:
        """Starts the thread, if it is not running, which then waits for this upload. Raises ZckptError if the system
        cannot create a thread."""
        with self._changed:
            if self._worker is None:
                # The interpreter waits for threads that are no daemons before it exits.
                worker = Worker(self._run, "zckpt-upload", daemon=False)
                worker.start()
                self._worker = worker
            self._expected[upload.save_id] = upload

    def add(self, upload: Upload) -> None:
        """Begins the upload, as soon as no other is under way. Raises nothing."""
        with self._changed:
            self._expected.pop(upload.save_id, None)
            self._waiting.append(upload)
            self._changed.notify_all()

    def cancel(self, upload: Upload) -> None:
        """Gives up an upload whose checkpoint was not written. Raises nothing."""
        with self._changed:
            self._expected.pop(upload.save_id, None)
            self._changed.notify_all()

    @property
    def needed(self) -> list[Upload]:
        """The uploads that are under way or wait. Their checkpoints must not be removed."""
        with self._changed:
            failed = [] if self._failed is None else [self._failed]
            return [*self._under_way, *failed, *self._waiting[-1:]]

    @property
    def is_idle(self) -> bool:
        return self._worker is None

    def wait_until_ended(self) -> None:
        """Waits until no upload is expected or under way. Raises nothing except KeyboardInterrupt."""
        while (worker := self._worker) is not None:
            worker.wait()

    def give_up(self, reason: str) -> None:
        """Ends the uploads early, with errors."""
        with self._changed:
            for upload in (*self._under_way, *self._waiting):
                upload.tries.snapshot.give_up(reason)

    def finish(self) -> None:
        """Waits for all uploads, together with the other ranks. Raises the error of the last one if it has failed,
        once."""
        assert self.ranks is not None, "it was made by ``uploads_of``"
        ranks = self.ranks.foreground("zckpt.wait")
        with ranks.undivided():
            ranks.together(self.wait_until_ended, "wait for the copies")
            ranks.together(self._raise, "finish the copies")

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (newest := self._next()) is not None:
            try:
                self._copy_newest(newest)
            except BaseException as error:
                with self._changed:
                    self._under_way = []
                    self._waiting = [upload for upload in self._waiting if upload is not newest]
                self._end(newest, error)

    def _next(self) -> Upload | None:
        """Waits for an upload and returns the newest one. Returns None if none is expected any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._expected)
            if self._waiting:
                return self._waiting[-1]
            self._worker = None
            return None

    def _copy_newest(self, newest: Upload) -> None:
        ranks = newest.ranks
        if ranks.lost:
            raise RankError("a rank was lost")
        failed = "" if self._failed is None else self._failed.save_id
        chosen, all_failed = ranks.decide(
            lambda: [newest.save_id, failed],
            lambda of_ranks: (of_ranks[0][0], all(other == of_ranks[0][1] for _, other in of_ranks)),
            "choose the checkpoint",
        )
        skipped = ranks.together(lambda: self._take(chosen), "choose the checkpoint")
        with self._changed:
            (upload,), retry, self._failed = self._under_way, self._failed, None
            if retry is not None and retry.target != upload.target and all_failed:
                self._under_way.insert(0, retry)
        sources = [other.source for other in skipped if other.target != upload.target]
        if sources and ranks.rank == 0:
            listed = first_few(sources, SHOWN_MAX)
            _tell(f"not copied to {upload.run}, because a newer checkpoint was there first: {listed}")
        for each in [*self._under_way]:
            try:
                each.copy(ranks)
            except BaseException as error:
                self._end(each, error)
            else:
                self._end(each, None)

    def _take(self, save_id: str) -> list[Upload]:
        """Waits until the upload that rank 0 has chosen is here, and takes it. Returns those that it takes the place
        of."""
        with self._changed:
            self._changed.wait_for(lambda: self._position(save_id) is not None or save_id not in self._expected)
            position = self._position(save_id)
            if position is None:
                raise ZckptError(f"this rank has not written the checkpoint {save_id}")
            skipped = self._waiting[:position]
            self._under_way = [self._waiting[position]]
            del self._waiting[: position + 1]
            return skipped

    def _position(self, save_id: str) -> int | None:
        return next((number for number, upload in enumerate(self._waiting) if upload.save_id == save_id), None)

    def _end(self, upload: Upload, error: BaseException | None) -> None:
        """Notes the end of an upload. Rank 0 tells its error, unless a newer checkpoint has taken the place of the one
        that was copied."""
        again = error is not None and 0 < upload.tries.count < TRIES
        if error is not None:
            # The frames refer to open files and large buffers, which would stay alive as long as the error.
            traceback.clear_frames(error.__traceback__)
        with self._changed:
            if any(other.target == upload.target for other in (*self._waiting, *self._expected.values())):
                again, error = False, None
            self._under_way = [other for other in self._under_way if other is not upload]
            self._error = error
            if again:
                self._failed = upload
        if error is not None and upload.ranks.rank == 0:
            what_next = (
                "It is tried again with the next checkpoint" if again
                else f"It is given up; zckpt.cp({str(upload.source)!r}, {str(upload.target)!r}) copies it"
            )  # fmt: skip
            reason = f"{type(error).__name__}: {error}"
            _tell(f"{upload.source} was not copied to {upload.target}: {reason}\n{what_next}.")


def _tell(message: str) -> None:
    with suppress(Warning):  # even if warnings are errors, the next upload has to go on
        warn(message)


def uploads_of(ranks: Ranks) -> Uploads:
    """Returns the uploads of these ranks. All of the ranks have to call this, because they wait for the uploads
    together."""
    uploads = _all.setdefault(ranks.members, Uploads())
    uploads.ranks = ranks
    return uploads


def all_uploads() -> list[Uploads]:
    """Returns the uploads of this process, in the order in which they were first made."""
    return [*_all.values()]


def wait_until_all_ended() -> None:
    """Waits for the end of all uploads, with or without an error. Unlike ``Uploads.finish``, a single rank may call
    it."""
    for uploads in all_uploads():
        uploads.wait_until_ended()


def needed_sources() -> dict[str, Location]:
    """Returns the directories of the checkpoints that uploads of this process still need, by their save ids."""
    return {upload.save_id: upload.source for uploads in all_uploads() for upload in uploads.needed}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all.clear)  # a forked process has none of these threads
