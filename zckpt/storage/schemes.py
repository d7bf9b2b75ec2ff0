"""Which store a location belongs to: the one table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError
from zckpt.storage.local_store import LocalStore
from zckpt.storage.location import Location, StrPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.storage.contract import Store

SCHEMES: dict[str, Callable[[Location], Store]] = {"": LocalStore}
"""What makes the store at a location, by the location's scheme. A new store is one line here; a store that needs a
package of its own imports that when it is made."""


def open_store(given: StrPath | Location) -> Store:
    """The store at a path or location. Nothing is touched. Raises UnsupportedError for an unknown scheme."""
    location = given if isinstance(given, Location) else Location.of(given)
    if location.scheme not in SCHEMES:
        known = "".join(f", or {scheme}://..." for scheme in sorted(SCHEMES) if scheme)
        raise UnsupportedError(
            f"there is no store for the scheme {location.scheme!r}", file=str(location),
            hint=f"give a path of a file system, without a scheme{known}; a directory of this name is './{location}'",
        )  # fmt: skip
    return SCHEMES[location.scheme](location)
