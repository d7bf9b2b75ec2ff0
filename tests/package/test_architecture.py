"""All names in ``docs/architecture.md`` and its picture exist, and the picture is the one that its script draws."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zckpt"
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def load_picture() -> Any:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for the module there
    spec.loader.exec_module(module)
    return module


picture = load_picture()
LISTS = [picture.WRITE_PLAN, picture.TAKE, picture.COMMIT, picture.AFTER, picture.READ, picture.READ_PLAN]
BOXES = [picture.PIPELINE, picture.RUN_READS, *(box for boxes in LISTS for box in boxes)]


def defined_in(*files: Path) -> set[str]:
    return {name for file in files for name in re.findall(r"^ *(?:def|class) (\w+)", file.read_text(), re.MULTILINE)}


def test_the_picture_is_what_its_script_draws() -> None:
    assert (ROOT / "docs" / "architecture.svg").read_text() == picture.draw()


@pytest.mark.parametrize("box", BOXES, ids=lambda box: box.names)
def test_the_names_in_the_picture_exist(box: Any) -> None:
    defined = [defined_in(PACKAGE / file) for file in box.where.split(", ")]
    names = box.names.split(", ")
    assert set(names) <= set().union(*defined)
    assert all(set(names) & of_file for of_file in defined), "a file has none of the names"
    mentioned = re.findall(r"\b[A-Z]\w+\.[a-z_]+|\b[a-z]+_[a-z_]+|\b[A-Z][a-z]+[A-Z]\w+", " ".join(box.lines))
    words = {word for name in mentioned for word in name.split(".")} - {"exp_avg"}
    assert words <= defined_in(*PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_links_and_paths_lead_somewhere(text: Path) -> None:
    content = text.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", content)
    paths = re.findall(r"`((?:bench|docs|fuzz|spec|tests|zckpt)/[\w/.]+)`", content)
    assert [link for link in links if not (text.parent / link).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("text", [*TEXTS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda text: text.name)
def test_links_to_headings_lead_somewhere(text: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text.read_text())
    pages = [(text.parent / path if path else text, heading) for path, heading in links]
    assert [(page, heading) for page, heading in pages if page.suffix == ".md" and heading not in anchors(page)] == []


def anchors(page: Path) -> set[str]:
    """Returns the names by which links can refer to the headings of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
