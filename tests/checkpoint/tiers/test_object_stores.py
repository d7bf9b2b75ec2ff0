"""Checkpoints are copied to an object store, and restored from a disk and from the store together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support.faulty_proxy import Fault, FaultyProxy
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.object_servers import ObjectServer

FORBIDDEN = Fault(status=403)
"""An answer after which the client does not try again."""


def write_and_wait(engine: ReferenceEngine, path: Path, **options: Any) -> None:
    zckpt.write(engine, path, **options)
    zckpt.wait()


def test_a_run_goes_on_from_a_disk_and_an_object_store(
    seaweedfs: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near, far = tmp_path / "near", f"s3://{seaweedfs.bucket}{tmp_path}/far"
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        for name, value in seaweedfs.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        engine = ReferenceEngine()
        engine.train(1)
        proxy.inject(FORBIDDEN, method="PUT", path="exp_avg_sq.safetensors")
        with pytest.warns(UserWarning, match="step1 .*s3://.*403"), pytest.raises(OSError, match="403"):
            write_and_wait(engine, near / "step1", copy_to=far)
        with pytest.raises(zckpt.CheckpointNotFoundError):
            zckpt.open(far)
        sent = len(proxy.requests())
        engine.train(1)
        write_and_wait(engine, near / "step2", copy_to=far, copy_keep_last=1, background=True)
        again = [request.path for request in proxy.requests()[sent:] if request.method == "PUT"]
        assert any("step1" in path and "exp_avg_sq.safetensors" in path for path in again)
        assert not any("step1" in path and "master.safetensors" in path for path in again), "it is there already"
        assert zckpt.validate(far).ok
        with pytest.raises(zckpt.CheckpointNotFoundError):
            zckpt.open(f"{far}/step1")
        (gone,) = near.glob("step2/data-*/*/exp_avg.safetensors")
        nbytes = gone.stat().st_size
        gone.unlink()
        sent = len(proxy.requests())
        restored = ReferenceEngine(seed=1)
        zckpt.restore(restored, [near, far], rng=True)
        received = [request for request in proxy.requests()[sent:] if request.method == "GET"]
        from_files = [request for request in received if "/data-" in request.path]
        assert {request.path.rpartition("/")[2] for request in from_files} == {gone.name}
        assert sum(request.response_body_bytes for request in from_files) <= nbytes
    for each in (engine, restored):
        each.train(3)
    for part, tensors in engine.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, restored.tensors[part][name]), f"{part}/{name}"
