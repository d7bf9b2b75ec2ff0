"""Compares writes to and reads from an object store on loopback with ``rclone copy`` of the same files, and with
PyTorch's distributed checkpoint (DCP) through s3fs and through s3torchconnector, if these two are installed.

    python bench/object_store.py [--size 512MiB] [--dir DIR] [--runs 3]

The store is SeaweedFS on this machine, so it takes processors from those that are measured. rclone may have 64 parts in
flight, and zckpt 8 for each file and 12 for a process. At the end, a training on one core takes steps while other
threads of its process upload the state. If this program may set priorities (as root), the store of this part has the
lowest one, because it would be on another machine.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import zckpt
from common import (
    MIB,
    Contestant,
    Result,
    cut,
    drop_from_cache,
    empty_like,
    interleaved,
    make_state,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from sampler import Metered, metered
from tests.support.object_servers import required, seaweedfs
from zckpt.storage.schemes import open_store
from zckpt.testing import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common import Options
    from tests.support.object_servers import ObjectServer

UPLOADS = ("rclone copy, local to store", "zckpt.cp, local to store, verified", "zckpt writes from memory to store")
DOWNLOADS = ("rclone copy, store to local", "zckpt.cp, store to local, verified", "zckpt loads from store, verified")
PEERS = {"DCP, s3fs": "s3fs", "DCP, s3torchconnector": "s3torchconnector"}
"""The package that each way needs by which DCP reaches an object store."""
SMALL = "small"
"""The name of a tensor of 1 MiB."""
STEPS = 10


def rclone(server: ObjectServer, source: str, destination: str) -> None:
    settings = {
        "RCLONE_CONFIG_STORE_TYPE": "s3", "RCLONE_CONFIG_STORE_PROVIDER": "Other",
        "RCLONE_CONFIG_STORE_ENDPOINT": server.endpoint, "RCLONE_CONFIG_STORE_ACCESS_KEY_ID": server.access_key,
        "RCLONE_CONFIG_STORE_SECRET_ACCESS_KEY": server.secret_key, "RCLONE_CONFIG_STORE_REGION": server.region,
    }  # fmt: skip
    parallel = ["--transfers=16", "--s3-upload-concurrency=4", "--s3-chunk-size=8Mi", "--multi-thread-streams=4"]
    command = [required("rclone"), "--config=", "copy", source, destination, *parallel]
    subprocess.run(command, check=True, env={**os.environ, **settings})


def empty(url: str) -> None:
    store = open_store(url)
    store.remove(*(entry.path for entry in store.entries(deep=True) or ()))


def dcp_storage(package: str, url: str) -> tuple[Any, Any]:
    """Returns what writes a checkpoint of DCP to a store, and what reads it."""
    if package == "s3fs":
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        return FsspecWriter(url, thread_count=4), FsspecReader(url)
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config, region = S3ClientConfig(force_path_style=True), os.environ["AWS_REGION"]
    return S3StorageWriter(region, url, config, thread_count=4), S3StorageReader(region, url, config)


def dcp_save(state: dict[str, torch.Tensor], package: str, url: str) -> None:
    dcp.save(state, storage_writer=dcp_storage(package, url)[0], no_dist=True)


def dcp_load(like: dict[str, torch.Tensor], package: str, url: str) -> None:
    dcp.load(empty_like(like), storage_reader=dcp_storage(package, url)[1], no_dist=True)


def main() -> None:
    options = parse_options(__doc__)
    result = Result("object_store", "Write to an object store and read from it", options)
    with (
        workspace(options, 3 * options.size) as directory,
        seaweedfs() as server,
        mock.patch.dict(os.environ, server.environment()),
    ):
        measure(result, server, directory, options)
    with workspace(options, options.size) as directory, ExitStack() as server_of_training:
        if os.geteuid() == 0:
            os.nice(19)
        server = server_of_training.enter_context(seaweedfs())
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with mock.patch.dict(os.environ, server.environment()):
            measure_training(result, directory / "run", f"s3://{server.bucket}/run", options)
    result.finish()


def measure(result: Result, server: ObjectServer, directory: Path, options: Options) -> None:
    state = make_state(options.size)
    state[f"master/{SMALL}"] = torch.randn(MIB // 4)
    nbytes, ranks = total_bytes(state), cut(state, 2)
    source, local = directory / "checkpoint", directory / "copy"
    write_checkpoint(source, ranks)
    there, new = f"s3://{server.bucket}/there", f"s3://{server.bucket}/new"
    zckpt.cp(source, there)
    uploads: dict[str, Callable[[], object]] = {
        UPLOADS[0]: partial(rclone, server, str(source), f"store:{server.bucket}/new"),
        UPLOADS[1]: partial(zckpt.cp, source, new),
        UPLOADS[2]: partial(write_checkpoint, new, ranks),
    }
    downloads: dict[str, Callable[[], object]] = {
        DOWNLOADS[0]: partial(rclone, server, f"store:{server.bucket}/there", str(local)),
        DOWNLOADS[1]: partial(zckpt.cp, there, local),
        DOWNLOADS[2]: lambda: zckpt.open(there).load(),
    }
    small = {key: tensor for key, tensor in state.items() if key.endswith(SMALL)}
    one: dict[str, Callable[[], object]] = {"zckpt, verified": lambda: zckpt.open(there).load(list(small))}
    peers = {label: package for label, package in PEERS.items() if find_spec(package)}
    for label, package in peers.items():
        of_peer = f"s3://{server.bucket}/{package}"
        dcp_save(state, package, of_peer)
        uploads[f"{label}, from memory to store"] = partial(dcp_save, state, package, new)
        downloads[f"{label}, loads from store"] = partial(dcp_load, state, package, of_peer)
        one[label] = partial(dcp_load, small, package, of_peer)
    fresh = partial(drop_from_cache, directory)
    for actions, clean, ours in (
        (uploads, partial(empty, new), UPLOADS), (downloads, partial(remove, local), DOWNLOADS),
    ):  # fmt: skip
        rounds = interleaved([Contestant(label, run, fresh, clean) for label, run in actions.items()], options.runs)
        result.add(rounds, nbytes)
        for label in ours[1:]:
            result.at_least(f"{label}, against {ours[0]}", speedup(rounds, label, over=ours[0]), 1)
        for label in [label for label in actions if label not in ours]:
            result.at_least(f"{ours[2]}, against {label}", speedup(rounds, ours[2], over=label), 1.5)
    result.add(interleaved([Contestant(*item) for item in one.items()], options.runs), MIB, "one tensor of 1 MiB")
    measure_memory(result, options.size, new, there, peers)


def measure_memory(result: Result, size: int, new: str, there: str, peers: dict[str, str]) -> None:
    """Measures by how much the memory of a process grows at the most. A load has to keep the tensors themselves."""
    peaks = {}
    for label, package in {"zckpt": "", **peers}.items():
        of_peer = there if not package else there.replace("there", package)
        for what, url in (("write", new), ("load", of_peer)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks[f"{label}, {what}"] = pool.apply(peak_mib, (what, package, url, size))
            empty(new)
    result.extra["peak_mib"] = peaks
    budget = zckpt.Budget.from_environment().nbytes / MIB
    result.at_most("peak memory of a write, MiB", peaks["zckpt, write"], budget, "MiB")
    result.at_most("peak memory of a load beside its tensors, MiB", peaks["zckpt, load"], budget + 128, "MiB")


def peak_mib(what: str, package: str, url: str, size: int) -> float:
    state = make_state(size)
    figures: Metered = {}
    with metered(figures, "peak"):
        if what == "write" and package:
            dcp_save(state, package, url)
        elif what == "write":
            write_checkpoint(url, cut(state, 2))
        elif package:
            dcp.load(state, storage_reader=dcp_storage(package, url)[1], no_dist=True)
        else:
            zckpt.open(url).load(list(state), out=state)
    return figures["peak"]["peak_mib"]


def measure_training(result: Result, path: Path, url: str, options: Options) -> None:
    """Measures the steps after a write, with an upload of its checkpoint in the background and without. The two
    kinds of round differ in nothing else."""
    torch.set_num_threads(1)
    engine = ReferenceEngine({"w": (options.size // 16,)}, frozen=())
    left, right = torch.randn(1500, 1500), torch.randn(1500, 1500)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * options.runs):
        label, copy_to = (("without", None), ("with", url))[number % 2]
        zckpt.write(engine, path / f"{number}", copy_to=copy_to)
        began = time.perf_counter()
        for _ in range(STEPS):
            for _ in range(20):
                torch.mm(left, right)
        seconds[label].append(time.perf_counter() - began)
        zckpt.wait()
        remove(path)
        engine = ReferenceEngine({"w": (options.size // 16,)}, frozen=())
    result.extra["seconds_of_steps"] = seconds
    ratio = statistics.median(seconds["with"]) / statistics.median(seconds["without"])
    result.at_most(f"{STEPS} steps on one core beside an upload, over those without", ratio, 1.05)


if __name__ == "__main__":
    main()
