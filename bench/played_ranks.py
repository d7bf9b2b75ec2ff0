"""A measurement of ``thousand_ranks``: rank 0 writes a checkpoint of many pieces, while one thread plays all other
ranks. It answers with what they would send, so the time and the memory are those of rank 0 alone."""

from __future__ import annotations

import gc
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import zckpt
from common import PARTS
from index_scale import ONE_KEY, measure
from sampler import field_bytes
from tests.support.thread_ranks import ONE_THREAD
from zckpt.checkpoint.open import open_loader
from zckpt.checkpoint.writing.prepare import plan, prepare
from zckpt.checkpoint.writing.rank_write import RankWrite
from zckpt.format import names
from zckpt.format.digest import BLOCK_BYTES, DIGEST_BYTES
from zckpt.geometry import all_of
from zckpt.plan import catalog
from zckpt.plan.data_files import plan_data_files
from zckpt.plan.inventory import Fragment
from zckpt.ranks import family, tree
from zckpt.ranks.collectives import _pack
from zckpt.ranks.groups import close_groups
from zckpt.ranks.job import Job, in_job
from zckpt.system.linux import trim_heap
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

INDEX_BYTES = 25
"""The bytes of a piece in the decompressed index."""


class Player(Job):
    """The job as rank 0 sees it. All other ranks are played: they answer at once, with what they would send."""

    is_over = False

    def __init__(self, size: int, records: list[tuple[bytes, int]]) -> None:
        super().__init__()
        self.size = size
        self.seconds = 0.0
        """The processor time that the player has taken itself."""
        self.received_bytes = self.sent_bytes = self.messages = 0
        self._records = records
        self._below: dict[int, list[int]] = {child: [] for child in tree.children(0, size)}
        for rank in range(1, size):
            child = rank
            while tree.parent(child):
                child = tree.parent(child)
            self._below[child].append(rank)
        self.told: dict[str, Any] = {}
        """What rank 0 has told in each step."""

    rank = 0

    def members(self, group: object) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def store(self) -> Any:
        return PlayedStore()

    def connect(self, *_: object) -> Any:
        return PlayedChildren(self)

    def reports(self) -> list[bytes]:
        """Returns what the children of rank 0 send in this step."""
        (group,) = self.groups.values()
        doing = str(group.lives._doing)
        step = f"{group.lives._call}, to {doing}"
        return [
            _pack(
                tree.StepReport(
                    step, {rank: _pack(result) for rank in ranks if (result := self.result(doing, rank)) is not None}
                )
            )
            for ranks in self._below.values()
        ]

    def result(self, doing: str, rank: int) -> Any:
        if doing == "prepare the write":
            return self.told["prepare"]._replace(buffers={}, host=f"host-{rank // 8}")
        if doing == "plan the write":
            record, nbytes = self._records[rank]
            return self.told["plan"]._replace(rank_record=record, data_bytes=nbytes)
        return bytes(DIGEST_BYTES) if doing == "write" else None


class PlayedStore:
    """A store in which each rank is there and shows that it runs."""

    _looks = 0

    def check(self, keys: list[str]) -> bool:
        return not any(key.endswith(("/gone", "/failure")) for key in keys)

    def get(self, key: str) -> bytes:
        PlayedStore._looks += 1
        return f"1 {PlayedStore._looks} {PlayedStore._looks}".encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [*map(self.get, keys)]

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int:
        return amount

    def delete_key(self, key: str) -> bool:
        return True

    def has_extended_api(self) -> bool:
        return True


class PlayedChildren:
    """The connections of rank 0 with its children."""

    def __init__(self, player: Player) -> None:
        self._player, self._reports = player, list[bytes]()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1 + len(tree.children(0, self._player.size))

    def gather(self, outputs: Any, inputs: Any, _: object) -> Any:
        start = time.thread_time()
        player, reports = self._player, self._player.reports()
        sent = [family._slot(len(report), 0, report) for report in reports]
        if max(map(len, reports)) > family._FITTING_BYTES:
            self._reports = reports
        for target, message in zip(outputs[0][1:], sent, strict=True):
            target.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self._count(received=sum(map(len, sent)), messages=len(sent))
        player.seconds += time.thread_time() - start
        return Ended()

    def scatter(self, outputs: Any, inputs: Any, _: object) -> Any:
        self._count(sent=sum(message.nbytes for message in inputs[0][1:]), messages=len(inputs[0]) - 1)
        return Ended()

    def alltoall_base(self, received: Any, sent: Any, received_bytes: Any, sent_bytes: Any) -> Any:
        start = time.thread_time()
        at = 0
        for report in self._reports:
            received[at : at + len(report)] = torch.frombuffer(bytearray(report), dtype=torch.uint8)
            at += len(report)
        self._reports = []
        self._count(received=received.nbytes, sent=sent.nbytes, messages=len(sent_bytes) - 1)
        self._player.seconds += time.thread_time() - start
        return Ended()

    def _count(self, *, received: int = 0, sent: int = 0, messages: int) -> None:
        self._player.received_bytes += received
        self._player.sent_bytes += sent
        self._player.messages += messages


class Ended:
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object) -> None: ...


SAVE_ID = "5a" * 8


def measure_played(directory: str, ranks_text: str, parameters_text: str) -> dict[str, Any]:
    size, parameters, path = int(ranks_text), int(parameters_text), f"{directory}/run/c"
    torch.set_num_threads(1)
    rng = random.Random(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(parameters):  # shares of several sizes, and tensors with fewer elements than there are ranks
        kind, few = rng.random(), (rng.randint(1, size),)
        name = f"model.layers.{number // 10}.block{number % 10}.weight"
        shapes[name] = (rng.randint(2, 5), rng.randint(size, 2 * size)) if kind < 0.95 else few
    records, pieces = [], 0
    for rank in range(size):
        shares = {name: -(-math.prod(shape) // size) for name, shape in shapes.items()}
        spans = [
            (name, all_of(shape).clip(rank * shares[name], (rank + 1) * shares[name])) for name, shape in shapes.items()
        ]
        fragments = [Fragment(of_part, name, "F32", span) for of_part in PARTS for name, span in spans if span.numel]
        pieces += len(fragments)
        plans = plan_data_files(fragments, SAVE_ID, rank, size, block_bytes=BLOCK_BYTES)
        records.append((catalog.pack(catalog.rank_record(rank, plans)), sum(plan.nbytes for plan in plans)))
    player = Player(size, records)

    def noted(function: Callable[..., Any], message: Callable[[Any], Any]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made = function(*arguments, **options)
            player.told[function.__name__] = message(made)
            return made

        return mock.patch(f"zckpt.checkpoint.write.{function.__name__}", call)

    with (
        in_job(player),
        noted(prepare, lambda made: made.facts),
        noted(plan, lambda made: made[-1]),
        mock.patch.object(RankWrite, "check_files"),  # The files of another rank are not there.
        mock.patch("zckpt.checkpoint.writing.decide.secrets", mock.Mock(token_hex=lambda _: SAVE_ID)),
    ):
        engine = ReferenceEngine(shapes, frozen=())
        gc.collect()
        trim_heap()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = field_bytes("/proc/self/status", "VmRSS")
        own, wall = time.thread_time(), time.perf_counter()
        zckpt.write(engine, path, parts=PARTS, budget=ONE_THREAD)
        own, wall = time.thread_time() - own - player.seconds, time.perf_counter() - wall
        peak_bytes = field_bytes("/proc/self/status", "VmHWM") - before
        close_groups(player)
    manifest = open_loader(path).manifest
    runs = [
        measure(ONE_KEY, path, f"master/model.layers.{number}.block1.weight")
        for number in range(min(9, parameters // 10))
    ]
    sizes = [Path(path, names.MANIFEST).stat().st_size, manifest.index_bytes]
    return {
        "ranks": size,
        "parameters": parameters,
        "pieces": pieces,
        "own_seconds": own,
        "player_seconds": player.seconds,
        "wall_seconds": wall,
        "peak_bytes": peak_bytes,
        "messages": player.messages,
        "received_bytes": player.received_bytes,
        "sent_bytes": player.sent_bytes,
        "index_bytes_decompressed": sum(chunk.pieces for chunk in manifest.chunks) * INDEX_BYTES,
        "manifest_bytes": sizes[0],
        "index_bytes": sizes[1],
        "bytes_per_piece": sum(sizes) / pieces,
        "one_key": min(runs, key=lambda run: run["seconds"]),  # The others were held up by other programs.
    }
