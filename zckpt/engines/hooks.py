"""Calls functions before or after a method of a live object is called."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def call_before(action: Callable[[], None], methods: Sequence[tuple[Any, str]]) -> None:
    """Arranges that ``action`` is called once, before the next call of any of ``methods``. Each of these is an object
    and the name of a method."""
    pending = [action]

    def once() -> None:
        if pending:
            undo()
            pending.pop()()

    undo = before_calls([(owner, name, once) for owner, name in methods])


def before_calls(methods: Iterable[tuple[Any, str, Callable[[], None]]]) -> Callable[[], None]:
    """Arranges that an action is called before each call of a method. Returns a function that ends this. Each of
    ``methods`` is an object, the name of a method, and an action. For the method ``__call__`` of a module, the action
    runs before the module's other hooks."""
    hooks = ExitStack()
    for owner, name, action in methods:
        if name == "__call__":
            # This hook must be the first one, because the hooks of ZeRO-3 gather the weights.
            hooks.callback(owner.register_forward_pre_hook(_hook(action), prepend=True).remove)
        else:
            hooks.callback(_watched(owner, name).add(action, after=False))
    return hooks.close


def after_calls(methods: Iterable[tuple[Any, str, Callable[[], None]]]) -> Callable[[], None]:
    """Arranges that an action is called after each call of a method that returns. Returns a function that ends this.
    ``methods``: as in ``before_calls``, but ``__call__`` of a module is not possible."""
    hooks = ExitStack()
    for owner, name, action in methods:
        hooks.callback(_watched(owner, name).add(action, after=True))
    return hooks.close


def _watched(owner: Any, name: str) -> _Watched:
    """Returns the ``_Watched`` of a method, which is made if the method is not wrapped yet."""
    return getattr(getattr(owner, name), _WATCHED, None) or _Watched(owner, name)


_WATCHED = "_zckpt_watched"
"""The attribute in which the wrapper of a method has its ``_Watched``. If others wrap that wrapper with
``functools.wraps``, their wrapper gets the attribute too, so no method is wrapped here a second time."""


class _Watched:
    """A method of an object that is wrapped, so that actions are called before and after it."""

    def __init__(self, owner: Any, name: str) -> None:
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self._owner, self._name, self._original = owner, name, vars(owner).get(name)
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            for action in tuple(self._before):
                action()
            returned = method(*args, **kwargs)
            for action in tuple(self._after):
                action()
            return returned

        setattr(call, _WATCHED, self)
        setattr(owner, name, call)
        self._wrapper = vars(owner)[name]

    def add(self, action: Callable[[], None], *, after: bool) -> Callable[[], None]:
        """Arranges that ``action`` is called before or after each call. Returns a function that ends this."""
        actions = self._after if after else self._before
        actions.append(action)
        return functools.partial(self._remove, actions, action)

    def _remove(self, actions: list[Callable[[], None]], action: Callable[[], None]) -> None:
        actions.remove(action)
        owner, name = self._owner, self._name
        # If somebody has put another wrapper around this one, this one cannot be removed. Without actions it does
        # nothing.
        if not self._before and not self._after and vars(owner).get(name) is self._wrapper:
            vars(owner).pop(name) if self._original is None else setattr(owner, name, self._original)


def _hook(action: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        action()

    return hook
