"""Public functions and methods say what each argument is, what they return and what they raise."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

import zckpt
from zckpt import types

if TYPE_CHECKING:
    from collections.abc import Callable

SECTIONS = ("Args", "Returns", "Raises")
PUBLIC = {name: getattr(zckpt, name) for name in sorted({*zckpt.__all__, *zckpt._HOME})} | {
    name: getattr(types, name) for name in dir(types)
}
CLASSES = [value for value in PUBLIC.values() if inspect.isclass(value)]
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
METHODS = {
    f"{owner.__name__}.{name}": function
    for owner in CLASSES
    if owner is not zckpt.ProgressBar  # its methods are those of Progress
    for name, value in vars(owner).items()
    if inspect.isfunction(function := getattr(value, "__func__", value)) and not name.startswith("_")
}


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the text of each section of the docstring, and the text before the first section as "Summary"."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(function.__doc__ or ""), flags=re.MULTILINE)
    return {"Summary": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def missing(function: Callable[..., Any]) -> list[str]:
    """Returns what is missing in the docstring: arguments, the value that is returned, or a summary of one line."""
    section_texts = sections(function)
    signature = inspect.signature(function)
    described = re.findall(r"^    (\w+): \S", section_texts.get("Args", ""), re.MULTILINE)
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    lacking = [] if described == parameters else [f"Args: {parameters}, and not {described}"]
    if signature.return_annotation not in ("None", inspect.Signature.empty) and "Returns" not in section_texts:
        lacking.append("Returns")
    if "\n" in section_texts["Summary"].partition("\n\n")[0].strip():
        lacking.append("a summary of one line")
    return lacking


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_returns_and_raises(name: str) -> None:
    assert missing(FUNCTIONS[name]) == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_takes_and_returns(name: str) -> None:
    if len(inspect.signature(METHODS[name]).parameters) > 1:
        assert missing(METHODS[name]) == []


def test_a_constructor_says_what_it_takes() -> None:
    described = re.findall(r"^    (\w+): \S", sections(zckpt.Budget).get("Args", ""), re.MULTILINE)
    assert described == [field.name for field in fields(zckpt.Budget)]
    assert [missing(made.__init__) for made in (zckpt.dcp.Writer, zckpt.dcp.Reader)] == [[], []]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_raises(name: str) -> None:
    errors = re.findall(r"^    (\w+): \S", sections(FUNCTIONS[name]).get("Raises", ""), re.MULTILINE)
    assert errors or name == "detach"
    builtin = vars(__builtins__) if inspect.ismodule(__builtins__) else __builtins__
    assert [error for error in errors if not (hasattr(zckpt, error) or error in builtin)] == []
