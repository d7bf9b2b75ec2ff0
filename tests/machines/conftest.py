from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.machines import Machine, Machines, why_no_clocks, why_no_common_files, why_no_machines

HERE = Path(__file__).parent

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.hookimpl(tryfirst=True)  # The marker has to be there before pytest leaves tests out by their markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("machines")


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Makes three machines, ``machines.nodes``."""
    if reason := why_no_machines():
        pytest.skip(reason)
    with Machines(3) as machines:
        yield machines


@pytest.fixture
def files(machines: Machines) -> Machine:
    """Makes a further machine, whose files the three machines mount at the same path."""
    if reason := why_no_common_files():
        pytest.skip(reason)
    files = machines.add("files")
    files.export_files()
    for node in machines.nodes:
        node.mount_common(files)
    return files


@pytest.fixture
def clocks() -> None:
    """Skips the test if the clocks of machines cannot differ."""
    if reason := why_no_clocks():
        pytest.skip(reason)
