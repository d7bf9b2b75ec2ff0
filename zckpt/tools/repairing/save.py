"""Finds the save that is repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.checkpoint.listing.runs import directories_of
from zckpt.checkpoint.listing.salvage import FoundSave, find_save
from zckpt.errors import RepairError
from zckpt.format import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.format.manifest import Manifest
    from zckpt.storage.contract import Store


def the_save(store: Store, old: Manifest | None, finding: str) -> FoundSave:
    """Returns the only save whose data are in ``store`` and complete. ``old`` is its manifest. If that is lost or
    damaged, ``old`` is None and ``finding`` says what is wrong with it. Raises RepairError, which lists everything that
    is missing or damaged."""
    saves = [name for name in directories_of(store) if names.is_data_dir(name)]
    if old is not None:
        saves = [name for name in saves if name == names.data_dir(old.save_id)]
    if len(saves) != 1:
        what = f"{finding}, and there are the data of {len(saves)} saves" if old is None else "its data are gone"
        raise refused(store, [what, *saves], "leave the data directory of one save here, and take the others away")
    save, problems = find_save(store, saves[0].removeprefix("data-"), old)
    if save is None or problems:
        raise refused(store, problems, "restore these files from a copy; they cannot be rebuilt")
    return save


def refused(store: Store, problems: Sequence[str], hint: str) -> RepairError:
    """Returns the error that lists all ``problems``."""
    message = "\n".join(["it cannot be rebuilt:", *(f"  {problem}" for problem in problems)])
    return RepairError(message, file=str(store.location), hint=hint)
