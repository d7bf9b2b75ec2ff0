"""Selects the tensors of an export, and names them. A selection maps each name in the export to the name of the tensor
in the source. A tied weight has several names in the export. Each function takes a selection and returns a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.errors import KeyNotFoundError, first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def everything(sources: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Returns the selection of all tensors, under the names that they have in the model. ``aliases``: maps the other
    names of tied weights to their names in ``sources``."""
    names = {name: name for name in sources}
    return names | {alias: name for alias, name in aliases.items() if name in names}


def with_prefix(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Returns the tensors whose names begin with ``prefix``, without this prefix. Raises KeyNotFoundError if there are
    none."""
    selected = {name.removeprefix(prefix): source for name, source in names.items() if name.startswith(prefix)}
    if not selected:
        modules = list(dict.fromkeys(f"{name.partition('.')[0]}." for name in names if "." in name))
        raise KeyNotFoundError(
            f"there is no weight or buffer with a name that begins with {prefix!r}",
            key=prefix,
            hint=f"the names begin with: {first_few(modules, 10) or 'nothing that is a module'}",
        )
    return selected


def first_names(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the first name in the export of each tensor of the source."""
    first: dict[str, str] = {}
    for name, source in names.items():
        first.setdefault(source, name)
    return first
