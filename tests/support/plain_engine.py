"""An engine of one tensor that is its own adapter. It lets tests write checkpoints without a framework."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch

import zckpt
from tests.support.states import fragment, same_all
from zckpt.engines.history import History
from zckpt.plan.inventory import Fragment, Inventory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


def engines_are_adapters() -> AbstractContextManager[object]:
    """Lets ``zckpt.write`` take its argument for an adapter."""
    return mock.patch("zckpt.checkpoint.writing.prepare.readable", lambda engine: engine)


class Engine:
    """An engine over one tensor, with all that ``zckpt.write`` asks of an adapter. All objects of this class stand for
    one engine at different times, so their checkpoints belong to one run."""

    _zckpt_history = History()

    def __init__(self, nbytes: int = 4096, seed: int = 0, step: int = 5) -> None:
        torch.manual_seed(seed)
        self.weight = torch.randn(nbytes // 4)
        self.step = step
        self.description = {"framework": "none"}
        self.parts: tuple[str, ...] = ("master", "exp_avg")
        self.devices = ()
        self.module = None
        self.peft_configs: dict[str, str] = {}
        self.trains = True
        self.names_differ = False

    def sample(self) -> dict[str, bytes]:
        return {}

    def refuse_unsupported(self, *, drop_gradients: bool = False, leave_out: bool = False) -> None:
        pass

    def inventory(self, parts: object) -> Inventory:
        return Inventory(tuple(self.fragments()))

    def fragments(self) -> list[Fragment]:
        return [fragment(part, "w", self.weight, 0, len(self.weight)) for part in ("master", "exp_avg")]

    def state(self) -> dict[str, object]:
        return {"steps": self.step}

    def rank_state(self) -> dict[str, object]:
        return {}

    def after_write(self) -> None:
        pass


def is_whole(path: Path, engine: Engine) -> bool:
    checkpoint = zckpt.open(path)
    loaded = checkpoint.load()
    assert zckpt.validate(path).ok
    return checkpoint.step == engine.step and same_all(loaded, dict.fromkeys(("master/w", "exp_avg/w"), engine.weight))


def everything(path: Path) -> dict[str, bytes | None]:
    """Returns the content of all files below ``path``. The content of a directory is None."""
    return {str(file.relative_to(path)): file.read_bytes() if file.is_file() else None for file in path.rglob("*")}
