"""Makes any one function of zckpt run out of memory when it is called."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import zckpt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

OURS = str(Path(zckpt.__file__).parent)

original_codes: dict[FunctionType, CodeType] = {}
"""The own code of each function whose code has been replaced."""


@contextmanager
def called_functions(codes: dict[CodeType, None]) -> Iterator[None]:
    """Inside this block, ``codes`` gets the code of each function of zckpt that this thread calls."""

    def record(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename.startswith(OURS):
            codes.setdefault(frame.f_code)

    sys.settrace(record)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def failing_once(code: CodeType) -> Iterator[None]:
    """Inside this block, the first call of a function with this code raises MemoryError.

    The function gets other code. A trace function could raise the error too, but Python 3.11 may crash if one raises.
    """
    for function in functions_by_code()[code]:
        original_codes[function] = function.__code__
        function.__code__ = with_failure(function.__code__, code)
    try:
        yield
    finally:
        restore()


@cache
def functions_by_code() -> dict[CodeType, list[FunctionType]]:
    """Returns the functions of zckpt that exist at the first call, by their code and by that of every function that is
    defined in them."""
    gc.unfreeze()  # gc.get_objects leaves out frozen objects
    functions = [o for o in gc.get_objects() if isinstance(o, FunctionType) and o.__code__.co_filename.startswith(OURS)]
    by_code: dict[CodeType, list[FunctionType]] = {}
    for function in functions:
        for code in nested(function.__code__):
            by_code.setdefault(code, []).append(function)
    return by_code


def restore() -> None:
    """Gives all functions their own code back. Several threads may call this at the same time."""
    for function, code in [*original_codes.items()]:
        function.__code__ = code
        original_codes.pop(function, None)


def fail(*_: object, **__: object) -> None:
    from tests.support.failing_functions import restore  # this code runs with the globals of another module

    restore()
    raise MemoryError


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and that of every function that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def with_failure(code: CodeType, failing: CodeType) -> CodeType:
    """Returns the same code, but with the code of ``fail`` in place of ``failing``."""
    if code == failing:
        return fail.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name, co_qualname=code.co_qualname)
    constants = (with_failure(c, failing) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=tuple(constants))
