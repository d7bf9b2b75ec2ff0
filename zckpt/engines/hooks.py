"""Calls into a live object, noticed before they happen."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def call_before(action: Callable[[], None], methods: Sequence[tuple[Any, str]]) -> None:
    """Has ``action`` called once, before the next call of any of ``methods``, each an object and a method's name."""
    wrappers: list[tuple[Any, str, Any, Any]] = []
    pending = [action]

    def release() -> None:
        if pending:
            for owner, name, wrapper, before in wrappers:
                # Somebody may have wrapped the wrapper since: then it stays, and does nothing.
                if vars(owner).get(name) is wrapper:
                    vars(owner).pop(name) if before is None else setattr(owner, name, before)
            pending.pop()()

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            release()
            return method(*args, **kwargs)

        return call

    for owner, name in methods:
        wrapper, before = wrapped(getattr(owner, name)), vars(owner).get(name)
        setattr(owner, name, wrapper)
        wrappers.append((owner, name, wrapper, before))
