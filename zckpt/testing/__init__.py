"""For tests: a training engine that needs no framework.

``ReferenceEngine`` is a small engine of plain tensors, on any device and any number of ranks. ``zckpt.write`` and
``zckpt.restore`` take it as they take DeepSpeed's:

    engine = ReferenceEngine(device="cuda")
    engine.train(steps=3)
    zckpt.write(engine, "checkpoints/a")
    zckpt.restore(ReferenceEngine(device="cuda", seed=1), "checkpoints/a")

It may change from one version of zckpt to the next.
"""

from zckpt.testing.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
