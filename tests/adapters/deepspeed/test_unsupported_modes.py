"""An engine that zckpt could not save and restore completely is refused before a write. The error names the mode."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import zckpt
from tests.support.models import make_engine
from zckpt.adapters.deepspeed.zero3 import Zero3
from zckpt.adapters.deepspeed.zero12 import Bf16Optimizer, Zero12

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

ENABLED, DISABLED = ({"shared_parameters": {"enabled": enabled}} for enabled in (True, False))
COMPRESSION = {"weight_quantization": DISABLED, "row_pruning": ENABLED, "layer_reduction": {"enabled": True}}


def write_with_what_older_versions_have(path: str) -> None:
    """Checks modes that only DeepSpeed 0.16 to 0.18 have. The engine gets the attributes in which they keep these
    modes."""
    engine = make_engine(2)
    mpu = SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2)
    for owner, name, value, message in (
        (engine, "progressive_layer_drop", object(), "progressive_layer_drop"),
        (engine, "quantizer", object(), "quantize_training (MoQ)"),
        (engine._config, "compression_config", COMPRESSION, "compression_training.row_pruning"),
        (type(engine), "zeropp_loco_param", lambda self: {"err_beta": 0.8}, "zero_optimization.zeropp_loco_param"),
        (type(engine), "amp_enabled", lambda self: True, "amp (NVIDIA Apex)"),
        (engine, "mpu", mpu, "pipeline parallelism (mpu, 2 stages)"),
    ):
        with mock.patch.object(owner, name, value, create=True), pytest.raises(zckpt.UnsupportedError) as refused:
            zckpt.write(engine, path)
        assert str(refused.value).startswith(f"zckpt does not support this DeepSpeed engine: {message}\n")
        assert not Path(path).exists()
    off: dict[str, Any] = {"progressive_layer_drop": None, "quantizer": None}
    with mock.patch.multiple(engine, **off, create=True):
        zckpt.write(engine, path)


def test_modes_of_older_versions_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_with_what_older_versions_have, 1, str(tmp_path / "c"))


def write_with_sequences_cut(path: str) -> None:
    engine = make_engine(1, config={"sequence_parallel_size": 2, "data_parallel_size": 1})
    assert engine.sequence_parallel_size == 2
    with pytest.raises(zckpt.UnsupportedError, match=r"sequence parallelism .*\[0, 1\] by a device mesh"):
        zckpt.write(engine, path)


def test_sequence_parallelism_is_refused_if_ranks_do_not_share_the_state(cluster: Cluster, tmp_path: Path) -> None:
    """If this mode were allowed, each rank would take itself for the whole engine, and all would write the same
    checkpoint."""
    cluster.run(write_with_sequences_cut, 2, str(tmp_path / "c"))


def test_muon_s_momentum_moves_in_backward_passes_before_deepspeed_0_19() -> None:
    muon = SimpleNamespace(param_groups=[{"use_muon": False}, {"use_muon": True}])
    for kind, method in ((Zero12, "_commit_muon_momentum"), (Zero3, "_apply_muon_to_accumulated_grads")):
        assert not kind.changes_only_in_step(SimpleNamespace(optimizer=muon))
        assert kind.changes_only_in_step(SimpleNamespace(optimizer=muon, **{method: None}))
        assert kind.changes_only_in_step(SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}])))
    assert Bf16Optimizer.changes_only_in_step(SimpleNamespace(optimizer=muon))
