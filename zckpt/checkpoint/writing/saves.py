"""Counts the saves of an attached engine: which of them have all of its state, and which have only the weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zckpt.storage.location import Location, StrPath

if TYPE_CHECKING:
    from zckpt.checkpoint.writing.options import CopyTo

_SAVES = "_zckpt_saves"
"""The name of the attribute of an attached engine that has its ``Saves``."""


class Saves:
    """The count of the saves of one attached engine, for each directory that it saves to. All ranks count alike."""

    def __init__(
        self, engine: object, full_every: int, settings: str = "checkpoint", copy_to: CopyTo | None = None
    ) -> None:
        self.settings = settings
        """Whose settings the engine has after a load: those of the "checkpoint" or those of the "engine"."""
        self.copy_to = copy_to
        """The place to which the saves are copied, and in which a load looks too. None if there is none."""
        self.told: set[str] = set()
        """The paths of the values that the saves change or leave out, and of which a warning has told."""
        self.weights_from: tuple[str, int] | None = None
        """The directory and the step of the checkpoint from which a call of its own has loaded the weights, until
        another call loads what belongs to the optimizer."""
        self._full_every = full_every
        self._numbers: dict[str, int] = {}
        """The number of the last save to each directory. A full save has the number 0. The next save is full if there
        is none."""
        self._next_is_full = False
        self._last: tuple[str, int] | None = None
        """The path and the step of the last save."""
        setattr(engine, _SAVES, self)

    def have_next_full(self) -> None:
        """Makes the next save a full one, whatever the count is, also if the save before it is still under way."""
        self._next_is_full = True

    def begin_anew(self) -> None:
        """Makes the next save to each directory a full one. No save may be under way."""
        self._numbers.clear()

    def begin(self, directory: StrPath, path: str, step: int) -> int:
        """Returns the number of the save that begins. If it fails, ``end`` is not called, and then the next save is a
        full one. ``directory``: that of the run. ``path``: that of the checkpoint."""
        number = self._numbers.pop(_series(directory), None)
        if self._next_is_full:
            self._next_is_full = False
            return 0
        if number is None or (path, step) == self._last:  # with ZeRO-3, Trainer saves each checkpoint twice
            return number or 0
        return (number + 1) % self._full_every

    def end(self, number: int, directory: StrPath, path: str = "", step: int = 0) -> None:
        """Notes that a checkpoint was saved, with the ``number`` that ``begin`` has returned. After the load of a
        checkpoint that has all of the state, ``number`` is 0. The other arguments are those of ``begin``."""
        self._numbers[_series(directory)], self._last = number, (path, step)


def _series(directory: StrPath) -> str:
    """Returns a text that is the same for all directories to which the saves of one run go. Trainer, Accelerate and
    Lightning make a directory for each save, whose name has the number of the save or of the step."""
    return re.sub(r"[0-9]+", "#", str(Location.of(directory).absolute()))


def saves_of(engine: object) -> Saves | None:
    """Returns the saves of an attached engine, or None for any other object."""
    saves = getattr(engine, _SAVES, None)
    return saves if isinstance(saves, Saves) else None


def forget_saves(engine: object) -> None:
    """Forgets the saves of an engine, which is no longer attached."""
    vars(engine).pop(_SAVES, None)
