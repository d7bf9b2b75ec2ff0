"""The pipeline between memory and files: if one of its threads fails, the threads that wait for it end."""

from __future__ import annotations

import threading
from contextlib import suppress

from zckpt.transfer.pipeline import Pipeline
from zckpt.transfer.snapshot import Snapshot
from zckpt.transfer.staging import StagingBuffer, host_pool

MIB = 1 << 20


def test_a_thread_of_a_pipeline_that_fails_ends_those_that_wait_for_it() -> None:
    taking, waiting = threading.Event(), threading.Event()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    def take(item: int, stage: StagingBuffer) -> int:
        taking.set()
        assert waiting.wait(60)
        raise ValueError

    def work() -> None:
        with suppress(ValueError):
            pipeline.work()

    pool = host_pool(MIB)
    pipeline = Pipeline([0], take, lambda item, stage: None, pool, 1, Snapshot(), 1)
    pipeline._changed = Condition()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    with pool.work():
        threads[0].start()
        assert taking.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
