"""What a checkpoint keeps of a model's adapters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import zckpt
from zckpt.format import names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


def _write(directory: Path) -> Any:
    from tests.support.live_export import save_pretrained
    from tests.support.lora import make_engine, make_model
    from tests.support.models import make_engine as make_plain_engine

    engine = make_engine("several", stage=3)
    zckpt.write(engine, directory / "adapters")
    save_pretrained(engine, make_model("several", seed=1), directory / "saved")
    zckpt.write(make_plain_engine(stage=0), directory / "none")


def test_a_checkpoint_keeps_the_configuration_of_each_adapter(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(_write, 2, tmp_path)
    kept = zckpt.open(tmp_path / "adapters").state[names.ADAPTERS]
    assert list(kept) == ["default", "second"]
    for name, folder in {"default": ".", "second": "second"}.items():
        saved = json.loads((tmp_path / "saved" / folder / "adapter_config.json").read_text())
        saved["target_modules"].sort()  # a set, which has no order
        assert json.loads(kept[name]) == saved
    assert names.ADAPTERS not in zckpt.open(tmp_path / "none").state
