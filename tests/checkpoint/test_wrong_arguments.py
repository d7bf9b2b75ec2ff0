"""Arguments of the wrong kind are refused by a message that says what to do, and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from zckpt.testing.engine import ReferenceEngine

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_no_engine_is_refused_with_the_call_to_use(tmp_path: Path) -> None:
    with pytest.raises(zckpt.UnsupportedError, match="write_state_dict writes a dict"):
        zckpt.write({"w": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(TypeError, match="the engine comes first"):
        zckpt.restore(str(tmp_path / "a"), ReferenceEngine())  # type: ignore[call-overload]


@pytest.mark.parametrize("step", ["3", 2.7, -2, True])
def test_a_wrong_step_is_refused_and_the_engine_keeps_its_own(tmp_path: Path, step: Any) -> None:
    engine = ReferenceEngine()
    with pytest.raises(ValueError, match="step must be a whole number"):
        zckpt.write(engine, tmp_path / "a", step=step)
    with pytest.raises(ValueError, match="step must be a whole number"):
        zckpt.write_state_dict({"w": torch.ones(1)}, tmp_path / "a", step=step)
    zckpt.write(engine, tmp_path / "a")
    assert zckpt.open(tmp_path / "a").step == 0


def test_tensors_of_out_that_keys_does_not_ask_for_are_named_in_their_order(tmp_path: Path) -> None:
    """All ranks have to raise the same error, whatever the order of a set is on each of them."""
    zckpt.write_state_dict({"w": torch.ones(1)}, tmp_path / "a")
    keys = [f"z/{number}" for number in (3, 1, 4, 2, 0)]
    with pytest.raises(zckpt.MismatchError, match=", ".join(keys)):
        zckpt.open(tmp_path / "a").load("param/w", out=dict.fromkeys(keys, torch.ones(1)))
