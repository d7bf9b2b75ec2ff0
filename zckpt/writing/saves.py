"""Counts the saves of an attached engine: which of them have all of its state, and which have only the weights."""

from __future__ import annotations

_SAVES = "_zckpt_saves"
"""The name of the attribute of an attached engine that has its ``Saves``."""


class Saves:
    """The count of the saves of one attached engine. All ranks count alike."""

    def __init__(self, engine: object, full_every: int, settings: str = "checkpoint") -> None:
        self.settings = settings
        """Whose settings the engine has after a load: those of the "checkpoint" or those of the "engine"."""
        self.told: set[str] = set()
        """The paths of the values that the saves change or leave out, and of which a warning has told."""
        self._full_every = full_every
        self._number: int | None = None
        """The number of the last save. A full save has the number 0. None means that the next save is full."""
        self._last: tuple[str, int] | None = None
        """The path and the step of the last save."""
        setattr(engine, _SAVES, self)

    def have_next_full(self) -> None:
        """Makes the next save a full one, whatever the count is."""
        self._number = None

    def begin(self, path: str, step: int) -> int:
        """Returns the number of the save that begins. If this save fails, ``end`` is not called, and then the next save
        is a full one."""
        number, self._number = self._number, None
        if number is None or (path, step) == self._last:  # with ZeRO-3, Trainer saves each checkpoint twice
            return number or 0
        return (number + 1) % self._full_every

    def end(self, number: int, path: str = "", step: int = 0) -> None:
        """Notes that a checkpoint was saved, or that a full one was loaded."""
        self._number, self._last = number, (path, step)


def saves_of(engine: object) -> Saves | None:
    """Returns the saves of an attached engine, or None for any other object."""
    saves = getattr(engine, _SAVES, None)
    return saves if isinstance(saves, Saves) else None


def forget_saves(engine: object) -> None:
    """Forgets the saves of an engine, which is no longer attached."""
    vars(engine).pop(_SAVES, None)
