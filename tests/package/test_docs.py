"""Every code block of README and docs runs, and what they quote is there."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import console
from tests.support.documents import LAUNCHERS, PAGES, ROOT, blocks, furnish, run_alone, run_on_ranks, save_files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

TROUBLES = ROOT / "docs" / "troubles.md"
BLOCKS = {str(page.relative_to(ROOT)): [b for b in blocks(page.read_text()) if b.language != "text"] for page in PAGES}
RUNNING = [page for page, found in BLOCKS.items() if found]


def is_quick(page: str) -> bool:
    """Commands of shell blocks take seconds: most import torch. Those of these two pages are left to the test below."""
    return page in ("README.md", "docs/quickstart.md") or all(block.language != "sh" for block in BLOCKS[page])


def launches(page: str) -> bool:
    return any(block.language == "sh" and any(map(LAUNCHERS.match, block.code.split("\n"))) for block in BLOCKS[page])


@pytest.fixture(scope="module")
def furnished(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    cluster.run(furnish, 2, str(directory))
    return directory


@pytest.fixture
def directory(furnished: Path, tmp_path: Path, page: str) -> str:
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    save_files(page, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    "page", [page if is_quick(page) else pytest.param(page, marks=pytest.mark.matrix) for page in RUNNING]
)
def test_the_blocks_of_a_page_run(cluster: Cluster, directory: str, page: str) -> None:
    if any(block.is_of_ranks for block in BLOCKS[page]):
        cluster.run(run_on_ranks, 2, page, directory)
    commands = "none" if is_quick(page) else "short"
    cluster.run(run_alone, 1, page, directory, commands, init=False, timeout=600)


@pytest.mark.matrix
@pytest.mark.parametrize("page", [page for page in RUNNING if launches(page)])
def test_what_a_page_launches_runs(cluster: Cluster, directory: str, page: str) -> None:
    cluster.run(run_alone, 1, page, directory, "all", init=False, timeout=600)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_is_indented_instead_of_fenced(page: Path) -> None:
    """Such a block has no language, so nothing would run it."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?![-*\d]).*\n\n    .*", prose, re.MULTILINE) == []


@pytest.mark.matrix
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs what `make docs` installs")
    pytest.importorskip("mkdocstrings", reason="needs what `make docs` installs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "site" / "docs" / "api.html").exists()


def test_the_commands_print_what_their_page_shows(furnished: Path, tmp_path: Path) -> None:
    page = console.PAGE.read_text()
    assert page.count("\n$ zckpt ") >= 20
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    assert console.masked(console.renewed(page, tmp_path)) == console.masked(page), console.__doc__


def test_the_messages_of_the_page_of_troubles_are_those_of_the_code() -> None:
    """A heading there is a message, with … for what differs from time to time."""
    headings = [
        one or two for one, two in re.findall(r"^### (?:`` (.+) ``|`([^`]+)`)$", TROUBLES.read_text(), re.MULTILINE)
    ]
    assert len(headings) == len(re.findall("^### ", TROUBLES.read_text(), re.MULTILINE))
    assert len(headings) > 20
    messages = [text for file in (ROOT / "zckpt").rglob("*.py") for text in texts(ast.parse(file.read_text()))]
    assert [one for one in headings if not any(one in message for message in messages)] == []


def texts(tree: ast.AST) -> list[str]:
    """The strings in the code, with … for what an f-string fills in; no docstrings."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if node in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found
