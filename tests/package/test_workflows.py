"""The workflows call targets that the Makefile has, with the oldest and the newest Python, and the forms for issues ask
for commands that exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from zckpt.cli import make_parser

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))


def test_workflows_call_targets_of_the_makefile() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    called = {*re.findall(r"\brun: make ([\w-]+)", text), *re.findall(r"\btarget: ([\w-]+)", text)}
    assert called >= {"test", "test-pythons", "test-torch", "docs", "lint-workflows"}
    assert called <= {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)}


@pytest.mark.parametrize("name", ["tests", "elsewhere", "release"])
def test_workflows_use_the_oldest_and_the_newest_python(name: str) -> None:
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    (newest,) = re.findall(r"^PYTHONS \?= python([\d.]+)$", MAKEFILE, re.MULTILINE)
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    assert {*re.findall(r'"(3\.\d+)"', text)} == {oldest, newest}


def test_workflows_need_no_secret() -> None:
    """PyPI and the pages know a workflow by a token of GitHub, which only the job that publishes can get."""
    for path in WORKFLOWS:
        text = path.read_text()
        assert "secrets." not in text
        assert "\npermissions:\n  contents: read\n" in text
        assert text.count("id-token: write") == (path.stem in ("docs", "release"))


def test_the_forms_for_issues_ask_for_commands_that_exist() -> None:
    lines = re.findall(r"`zckpt ([^`]+)`", "".join(path.read_text() for path in FORMS))
    assert {"info CHECKPOINT --json", "doctor DIRECTORY --json"} <= {*lines}
    for line in lines:
        make_parser(shlex.split(line)).parse_args(shlex.split(line))
