"""Keys can be selected by a key, a glob, a list or a predicate, and by the aliases of tied weights."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.errors import KeyNotFoundError
from zckpt.plan.select import select

KEYS = ["master/a.weight", "master/a.bias", "exp_avg/a.weight", "master/w[0]", "master/w*", "master/w?"]


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        (None, KEYS),
        ("master/a.bias", ["master/a.bias"]),
        ("*/a.weight", ["master/a.weight", "exp_avg/a.weight"]),
        (["exp_avg/*", "master/a.bias", "master/a.*"], ["master/a.weight", "master/a.bias", "exp_avg/a.weight"]),
        ((key for key in ["master/a.bias"] * 2), ["master/a.bias"]),
        (lambda key: key.endswith("weight"), ["master/a.weight", "exp_avg/a.weight"]),
        (lambda key: False, None),
        ([], []),
        ("master/w[0]", ["master/w[0]"]),  # an exact key is not a glob, whatever its characters are
        ("master/w*", ["master/w*"]),
        ("master/w?", ["master/w?"]),
        ("master/w[*]", ["master/w*"]),
        ("MASTER/*", None),
        ("master/a.weights", None),
        (["master/a.bias", "nothing*"], None),
        ("", None),
    ],
)
def test_keys_are_selected(wanted: Any, selected: list[str] | None) -> None:
    if selected is None:
        with pytest.raises(KeyNotFoundError) as caught:
            select(KEYS, wanted)
        assert callable(wanted) or caught.value.key in ([wanted] if isinstance(wanted, str) else wanted)
        assert any(key in str(caught.value) for key in KEYS)
    else:
        assert select(KEYS, wanted) == selected


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        ("master/*", ["master/a", "master/None"]),
        ("*", ["master/a", "master/None", "exp_avg/a"]),
        ("master/tied", ["master/tied"]),
        (["master/tied", "master/a"], ["master/a", "master/tied"]),
        ("master/t*", ["master/tied", "master/twin"]),
        ("*/tie?", ["exp_avg/tied", "master/tied"]),
        ("*ied", ["exp_avg/tied", "master/tied"]),
        ("*a/tied", None),
        ("master/nothing", None),
        ("exp_avg/far", None),  # its tensor is in another part
        ("master/far", ["master/far"]),
        (lambda key: key.endswith("tied"), None),
        (None, ["master/a", "master/None", "exp_avg/a"]),
    ],
)
def test_keys_are_selected_by_aliases(wanted: Any, selected: list[str] | None) -> None:
    keys = ["master/a", "master/None", "exp_avg/a"]
    aliases = {"tied": "a", "twin": "a", "far": "None"}
    if selected is None:
        with pytest.raises(KeyNotFoundError):
            select(keys, wanted, aliases)
    else:
        assert select(keys, wanted, aliases) == selected


def test_the_name_of_a_part_is_not_a_key() -> None:
    with pytest.raises(KeyNotFoundError, match=r"all keys .*'exp_avg/\*'"):
        select(["exp_avg/a.weight", "exp_avg_sq/a.weight"], "exp_avg")


def test_the_error_for_an_unknown_part_names_the_parts() -> None:
    with pytest.raises(KeyNotFoundError) as caught:
        select(["param/a", "param/b", "buffer/c"], "master/*")
    assert caught.value.hint == "its parts are: param, buffer; the nearest are: param/b, param/a, buffer/c"


def test_the_error_for_an_unknown_key_names_the_nearest_keys() -> None:
    with pytest.raises(KeyNotFoundError, match=r"nearest are: exp_avg/a\.weight"):
        select(KEYS, "exp_avg/a.wieght")
    with pytest.raises(KeyNotFoundError, match="holds no tensors"):
        select([], "a")
