"""Calls into a live object, noticed before they happen."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def call_before(action: Callable[[], None], methods: Sequence[tuple[Any, str]]) -> None:
    """Has ``action`` called once, before the next call of any of ``methods``, each an object and a method's name."""
    pending = [action]

    def once() -> None:
        if pending:
            undo()
            pending.pop()()

    undo = before_calls([(owner, name, once) for owner, name in methods])


def before_calls(methods: Iterable[tuple[Any, str, Callable[[], None]]]) -> Callable[[], None]:
    """Has an action called before each call of a method. Returns a function that ends this. Each of ``methods`` is an
    object, a method's name and an action. The method ``__call__`` of a module runs its other hooks
    after the action."""
    undone: list[Callable[[], None]] = []
    for owner, name, action in methods:
        if name == "__call__":
            # The first hook of all: those of ZeRO-3 gather the weights.
            undone.append(owner.register_forward_pre_hook(_hook(action), prepend=True).remove)
        else:
            watched = _watched(owner, name)
            watched.actions.append(action)
            undone.append(functools.partial(watched.remove, action))

    def undo() -> None:
        while undone:
            undone.pop()()

    return undo


def after_calls(methods: Iterable[tuple[Any, str, Callable[[], None]]]) -> Callable[[], None]:
    """Has an action called after each call of a method that has returned. Otherwise as ``before_calls``; for no
    ``__call__`` of a module."""
    undone: list[Callable[[], None]] = []
    for owner, name, action in methods:
        watched = _watched(owner, name)
        watched.after.append(action)
        undone.append(functools.partial(watched.remove, action))

    def undo() -> None:
        while undone:
            undone.pop()()

    return undo


def _watched(owner: Any, name: str) -> _Watched:
    return getattr(getattr(owner, name), _WATCHED, None) or _Watched(owner, name)


_WATCHED = "_zckpt_watched"
"""The attribute of a method's wrapper with its ``_Watched``. ``functools.wraps`` gives it to the wrappers that others
put around that wrapper, so no method is wrapped here a second time."""


class _Watched:
    """A method of an object, wrapped."""

    def __init__(self, owner: Any, name: str) -> None:
        self.actions: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self._owner, self._name, self._before = owner, name, vars(owner).get(name)
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            for action in tuple(self.actions):
                action()
            returned = method(*args, **kwargs)
            for action in tuple(self.after):
                action()
            return returned

        setattr(call, _WATCHED, self)
        setattr(owner, name, call)
        self._wrapper = vars(owner)[name]

    def remove(self, action: Callable[[], None]) -> None:
        (self.actions if action in self.actions else self.after).remove(action)
        owner, name = self._owner, self._name
        # Somebody may have wrapped the wrapper since: then it stays, and does nothing.
        if not self.actions and not self.after and vars(owner).get(name) is self._wrapper:
            vars(owner).pop(name) if self._before is None else setattr(owner, name, self._before)


def _hook(action: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        action()

    return hook
