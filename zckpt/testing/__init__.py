"""For tests: a training engine that needs no framework, and the contracts of zckpt as tests.

``StoreContract`` has the tests that every store passes, ``EngineContract`` those that every engine's adapter passes;
both need pytest. ``ReferenceEngine`` is a small engine of plain tensors, on any device and any number of ranks.
``zckpt.write`` and ``zckpt.restore`` take it as they take DeepSpeed's:

    engine = ReferenceEngine(device="cuda")
    engine.train(steps=3)
    zckpt.write(engine, "checkpoints/a")
    zckpt.restore(ReferenceEngine(device="cuda", seed=1), "checkpoints/a")

``zckpt.testing.fragments.write_fragments`` writes a checkpoint of given tensors, without an engine.

All of this may change from one version of zckpt to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.testing.engine import ReferenceEngine

if TYPE_CHECKING:
    from zckpt.testing.engine_contract import EngineContract
    from zckpt.testing.store_contract import StoreContract

__all__ = ["EngineContract", "ReferenceEngine", "StoreContract"]


def __getattr__(name: str) -> Any:
    """The contracts are imported when they are asked for: they need pytest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # so that a failed assert shows its values
    pytest.register_assert_rewrite("zckpt.testing.engine_contract", "zckpt.testing.store_contract")
    from zckpt.testing.engine_contract import EngineContract
    from zckpt.testing.store_contract import StoreContract

    return {"EngineContract": EngineContract, "StoreContract": StoreContract}[name]
