"""For tests: a training engine that needs no framework."""

from zckpt.testing.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
