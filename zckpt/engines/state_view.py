"""What an optimizer keeps for a tensor, as a map that shows some of it in another form."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any


class StateView(MutableMapping[str, Any]):
    """Shows the state that an optimizer keeps for one tensor. A class that derives from this one has other values for
    some keys. What is set or removed here is set or removed in the state itself."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def __getitem__(self, key: str) -> Any:
        return self._state[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
