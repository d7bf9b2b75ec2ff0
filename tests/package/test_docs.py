"""Every code block of README and docs runs, and the messages, files and extras that the pages name exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from torch import UntypedStorage

from tests.support import console
from tests.support.documents import LAUNCHERS, PAGES, ROOT, blocks, furnish, run_alone, run_on_ranks, save_files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

TROUBLES = ROOT / "docs" / "troubles.md"
BLOCKS = {str(page.relative_to(ROOT)): [b for b in blocks(page.read_text()) if b.language != "text"] for page in PAGES}
RUNNING = [page for page, page_blocks in BLOCKS.items() if page_blocks]


def is_quick(page: str) -> bool:
    """Returns whether the blocks of the page run in seconds.

    Most commands of shell blocks import torch, which takes seconds. For README and the quick start,
    ``test_the_commands_of_a_page_with_launchers_run`` runs the shell blocks.
    """
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
    if any("zckpt.offload" in block.code for block in BLOCKS[page]) and not hasattr(UntypedStorage, "_swap_data_ptr_"):
        pytest.skip("zckpt.offload needs torch 2.13")
    if any(block.is_of_ranks for block in BLOCKS[page]):
        cluster.run(run_on_ranks, 2, page, directory)
    commands = "none" if is_quick(page) else "short"
    cluster.run(run_alone, 1, page, directory, commands, init=False, timeout=600)


@pytest.mark.matrix
@pytest.mark.parametrize("page", [page for page in RUNNING if launches(page)])
def test_the_commands_of_a_page_with_launchers_run(cluster: Cluster, directory: str, page: str) -> None:
    cluster.run(run_alone, 1, page, directory, "all", init=False, timeout=600)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_is_indented_instead_of_fenced(page: Path) -> None:
    """An indented block has no language, so no test would run it."""
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
    assert page.count("\n$ zckpt ") >= 15
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    assert console.masked(console.renewed(page, tmp_path)) == console.masked(page), console.__doc__


def test_the_files_that_the_readme_shows_are_those_of_a_checkpoint(furnished: Path) -> None:
    layout = next(b.code for b in blocks((ROOT / "README.md").read_text()) if b.code.startswith("checkpoints/\n"))
    shown = [line.split()[0] for line in layout.splitlines() if "." in line.split()[0]]
    assert len(shown) >= 5
    checkpoint = furnished / "checkpoints" / "global_step100"
    assert [path for path in shown if len(list(checkpoint.glob(re.sub("-[0-9a-f]+…", "-*", path)))) != 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_extras_that_a_page_installs_are_declared(page: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.findall(r"pip install '?(?:zckpt|\.)\[(\w+)\]", page.read_text())} <= {*declared}


def test_the_messages_of_the_page_of_troubles_are_those_of_the_code() -> None:
    """Each heading of the page is a message, with … for the parts that vary."""
    headings = [
        with_backticks or plain
        for with_backticks, plain in re.findall(r"^### (?:`` (.+) ``|`([^`]+)`)$", TROUBLES.read_text(), re.MULTILINE)
    ]
    assert len(headings) == len(re.findall("^### ", TROUBLES.read_text(), re.MULTILINE))
    assert len(headings) > 20
    messages = [text for file in (ROOT / "zckpt").rglob("*.py") for text in texts(ast.parse(file.read_text()))]
    assert [heading for heading in headings if not any(heading in message for message in messages)] == []


def texts(tree: ast.AST) -> list[str]:
    """Returns the strings in the code except docstrings, with … for the values that an f-string inserts."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = []
    for node in ast.walk(tree):
        if node in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            strings.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    return strings
