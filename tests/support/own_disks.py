"""Gives each simulated machine a disk of its own, in ranks that in truth share one file system."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from zckpt.storage.local_store import LocalStore
from zckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zckpt.storage.location import Location


@contextmanager
def own_disk(directory: str) -> Iterator[None]:
    """Makes paths that begin with ``disk://`` those of files below ``directory``, in this process."""

    class Disk(LocalStore):
        def __init__(self, location: Location) -> None:
            super().__init__(location)
            self._root = os.path.join(directory, location.path)

    with mock.patch.dict(SCHEMES, disk=Disk):
        yield
