"""The table that says which store a location belongs to."""

from __future__ import annotations

from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from zckpt.errors import UnsupportedError
from zckpt.storage.local_store import LocalStore
from zckpt.storage.location import Location, StrPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.storage.contract import Store

_OBJECTS, _WEB = "zckpt.object_stores.store:ObjectStore", "zckpt.object_stores.store:WebStore"
SCHEMES: dict[str, Callable[[Location], Store] | str] = {
    "": LocalStore, "s3": _OBJECTS, "gs": _OBJECTS, "az": _OBJECTS, "http": _WEB, "https": _WEB,
}  # fmt: skip
"""The class, or another callable, that makes the store of a location, by the location's scheme. A new store adds one
line here. A text names the module and the class, so that they are imported only when a store is made."""
GROUP = "zckpt.stores"
"""The group of entry points by which other packages add stores. The name of each entry point is a scheme."""


def open_store(path: StrPath | Location) -> Store:
    """Returns the store of a path or location. Does no I/O. Raises UnsupportedError if the scheme is unknown."""
    location = path if isinstance(path, Location) else Location.of(path)
    if location.scheme not in SCHEMES:
        for store in entry_points(group=GROUP, name=location.scheme):
            SCHEMES[location.scheme] = store.load()
    if location.scheme not in SCHEMES:
        schemes = "".join(f", or {scheme}://..." for scheme in sorted(SCHEMES) if scheme)
        raise UnsupportedError(
            f"there is no store for the scheme {location.scheme!r}", file=str(location),
            hint=f"give a path of a file system, without a scheme{schemes}; a directory of this name is './{location}'",
        )  # fmt: skip
    make = SCHEMES[location.scheme]
    return (resolve_name(make) if isinstance(make, str) else make)(location)
