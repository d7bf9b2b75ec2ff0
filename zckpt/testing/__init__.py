"""Helpers for tests: an engine that needs no framework, and the contracts of stores and engines as test suites.

``StoreContract`` has the tests that every store must pass. ``EngineContract`` has the tests that every engine's adapter
must pass. Both need pytest. ``ReferenceEngine`` is a small engine of plain tensors, for any device and any number of
ranks. ``zckpt.write`` and ``zckpt.restore`` accept it as they accept DeepSpeed's:

    engine = ReferenceEngine(device="cuda")
    engine.train(steps=3)
    zckpt.write(engine, "checkpoints/a")
    zckpt.restore(ReferenceEngine(device="cuda", seed=1), "checkpoints/a")

``zckpt.testing.fragments.write_fragments`` writes a checkpoint of given tensors without an engine.

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
    """Imports a contract when it is first used, because the contracts need pytest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # This makes a failed assert show its values.
    modules = (
        "engine_definition", "adapter_contract", "engine_contract", "store_calls", "store_data_contract",
        "store_contract",
    )  # fmt: skip
    pytest.register_assert_rewrite(*(f"zckpt.testing.{name}" for name in modules))
    from zckpt.testing.engine_contract import EngineContract
    from zckpt.testing.store_contract import StoreContract

    return {"EngineContract": EngineContract, "StoreContract": StoreContract}[name]
