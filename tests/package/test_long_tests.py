"""The list of tests that take long names tests that exist, and the script chooses what it says."""

from __future__ import annotations

from tests.conftest import LONG_TESTS
from tests.support.long_tests import long_tests

ROOT = LONG_TESTS.parents[1]


def test_each_name_is_that_of_a_test() -> None:
    for name in LONG_TESTS.read_text().splitlines():
        path, *_, function = name.partition("[")[0].split("::")
        assert (ROOT / path).is_file(), name
        # A test of a contract suite is defined in the class from which its class derives.
        suites = [ROOT / path, *(ROOT / "zckpt/testing").glob("*.py")]
        assert any(f"def {function}(" in suite.read_text() for suite in suites), name


def test_every_function_keeps_the_variants_that_take_the_least_time() -> None:
    log = """
2.00s call     tests/a.py::test_one[x y]
1.50s call     tests/a.py::test_one[z]
0.40s setup    tests/a.py::test_one[z]
9.00s call     tests/a.py::test_two
11.00s call    tests/a.py::test_three
"""
    assert long_tests(log) == ["tests/a.py::test_one[x y]", "tests/a.py::test_three"]
