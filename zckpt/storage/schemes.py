"""The table that says which store a location belongs to."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from zckpt.errors import UnsupportedError
from zckpt.storage.local_store import LocalStore
from zckpt.storage.location import Location, StrPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from zckpt.storage.contract import Store

GROUP = "zckpt.stores"
"""The group of entry points by which other packages add stores. The name of each entry point is a scheme."""
_OBJECTS = EntryPoint("objects", "zckpt.object_stores.store:ObjectStore", GROUP)
_WEB = EntryPoint("web", "zckpt.object_stores.store:WebStore", GROUP)
SCHEMES: dict[str, Callable[[Location], Store] | EntryPoint] = {
    "": LocalStore, "s3": _OBJECTS, "gs": _OBJECTS, "az": _OBJECTS, "http": _WEB, "https": _WEB,
}  # fmt: skip
"""The class, or another callable, that makes the store of a location, by the location's scheme. A new store adds one
line here. The class of an entry point is imported only when a store is made."""


def open_store(path: StrPath | Location) -> Store:
    """Returns the store of a path or location. Does no I/O. Raises UnsupportedError if the scheme is unknown."""
    location = path if isinstance(path, Location) else Location.of(path)
    if location.scheme not in SCHEMES:
        SCHEMES.update((store.name, store) for store in entry_points(group=GROUP, name=location.scheme))
    if location.scheme not in SCHEMES:
        schemes = "".join(f", or {scheme}://..." for scheme in sorted(SCHEMES) if scheme)
        raise UnsupportedError(
            f"there is no store for the scheme {location.scheme!r}", file=str(location),
            hint=f"give a path of a file system, without a scheme{schemes}; a directory of this name is './{location}'",
        )  # fmt: skip
    make = SCHEMES[location.scheme]
    make = make.load() if isinstance(make, EntryPoint) else make
    return cast("Store", make(location))
