"""Compares writes to and reads from an object store on loopback with ``rclone copy`` of the same files.

    python bench/object_store.py [--size 512MiB] [--dir DIR] [--runs 3]

The store is SeaweedFS on this machine, so it takes processors from those that are measured. rclone runs with as many
transfers and parts at a time as zckpt has requests.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

import zckpt
from common import (
    Contestant,
    Result,
    cut,
    drop_from_cache,
    interleaved,
    make_state,
    parse_options,
    remove,
    speedup,
    total_bytes,
    workspace,
    write_checkpoint,
)
from tests.support.object_servers import required, seaweedfs
from zckpt.storage.schemes import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common import Options
    from tests.support.object_servers import ObjectServer

UPLOADS = ("rclone copy, local to store", "zckpt.cp, local to store, verified", "zckpt writes from memory to store")
DOWNLOADS = ("rclone copy, store to local", "zckpt.cp, store to local, verified", "zckpt loads from store, verified")


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


def main() -> None:
    options = parse_options(__doc__)
    result = Result("object_store", "Write to an object store and read from it", options)
    with (
        workspace(options, 3 * options.size) as directory,
        seaweedfs() as server,
        mock.patch.dict(os.environ, server.environment()),
    ):
        measure(result, server, directory, options)
    result.finish()


def measure(result: Result, server: ObjectServer, directory: Path, options: Options) -> None:
    state = make_state(options.size)
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
    fresh = partial(drop_from_cache, directory)
    for actions, clean in ((uploads, partial(empty, new)), (downloads, partial(remove, local))):
        rounds = interleaved([Contestant(label, run, fresh, clean) for label, run in actions.items()], options.runs)
        result.add(rounds, nbytes)
        first, *ours = actions
        for label in ours:
            result.at_least(f"{label}, against {first}", speedup(rounds, label, over=first), 1)


if __name__ == "__main__":
    main()
