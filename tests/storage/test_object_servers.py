"""The object stores of the tests, and the proxy that fails on purpose, do what they say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.support import faulty_proxy
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.waiting import wait_until

obstore = pytest.importorskip("obstore")

from obstore.exceptions import (  # noqa: E402 (obstore may be missing)
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.object_servers import ObjectServer

ROOT = Path(__file__).parents[2]
SERVERS = ("seaweedfs", "moto", "rclone")
CONDITIONAL = ("seaweedfs", "moto")
RACERS = 8


@pytest.fixture
def server(request: pytest.FixtureRequest) -> ObjectServer:
    started: ObjectServer = request.getfixturevalue(request.param)
    return started


@pytest.fixture
def proxy(seaweedfs: ObjectServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        yield proxy


def create(server: ObjectServer, path: str, content: bytes) -> bool:
    """Returns whether this call has made the object."""
    try:
        obstore.put(server.store(), path, content, mode="create")
    except AlreadyExistsError:
        return False
    return True


def content_of(server: ObjectServer, path: str) -> bytes:
    return bytes(obstore.get(server.store(), path).bytes())


def connect(endpoint: str) -> socket.socket:
    address = urlsplit(endpoint)
    assert address.port is not None
    return socket.create_connection(("127.0.0.1", address.port))


# Servers


@pytest.mark.parametrize("server", CONDITIONAL, indirect=True)
def test_a_put_with_a_condition(server: ObjectServer) -> None:
    store = server.store()
    first = obstore.put(store, "condition", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "condition", b"2", mode="create")
    assert content_of(server, "condition") == b"1"
    second = obstore.put(store, "condition", b"3", mode={"e_tag": first["e_tag"]})
    assert second["e_tag"] != first["e_tag"]
    with pytest.raises(PreconditionError):
        obstore.put(store, "condition", b"4", mode={"e_tag": first["e_tag"]})
    assert content_of(server, "condition") == b"3"


def test_rclone_ignores_conditions(rclone: ObjectServer) -> None:
    assert create(rclone, "condition", b"1")
    assert create(rclone, "condition", b"2")
    assert content_of(rclone, "condition") == b"2"


def test_rclone_answers_ranges_with_the_status_of_whole_objects(rclone: ObjectServer) -> None:
    obstore.put(rclone.store(), "range", b"content")
    with pytest.raises(GenericError, match="non-partial response"):
        obstore.get_range(rclone.store(), "range", start=1, end=3)


def test_one_of_many_creates_wins(seaweedfs: ObjectServer) -> None:
    barrier = threading.Barrier(RACERS)

    def race(number: int) -> bool:
        barrier.wait()
        return create(seaweedfs, "race", b"%d" % number)

    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(race, range(RACERS)))
    assert won.count(True) == 1
    assert content_of(seaweedfs, "race") == b"%d" % won.index(True)


@pytest.mark.parametrize("server", ["seaweedfs", "rclone"], indirect=True)
@pytest.mark.parametrize("wrong", [{"secret_key": "wrong"}, {"access_key": "wrong"}])
def test_wrong_credentials_are_refused(server: ObjectServer, wrong: dict[str, str]) -> None:
    store = replace(server, **wrong).store()
    with pytest.raises(PermissionDeniedError):
        obstore.put(store, "refused", b"content")
    with pytest.raises(GenericError, match="403 Forbidden"):
        list(obstore.list(store))


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_many_parts(server: ObjectServer) -> None:
    content = os.urandom(11 << 20)
    obstore.put(server.store(), "parts", content, chunk_size=5 << 20)
    assert content_of(server, "parts") == content


@pytest.mark.linux
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_ends_with_its_test(request: pytest.FixtureRequest, name: str) -> None:
    request.getfixturevalue(name)  # skips the test if the server is not installed
    script = f"""
import signal
from tests.support import object_servers
with object_servers.{name}() as server:
    print(server.endpoint, flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().decode().strip()
        connect(endpoint).close()
        process.send_signal(signal.SIGKILL)

    def is_gone() -> bool:
        try:
            connect(endpoint).close()
        except ConnectionError:  # ConnectionResetError if the server ends in this moment
            return True
        return False

    wait_until(is_gone)


# The proxy


@pytest.mark.parametrize("server", CONDITIONAL, indirect=True)
def test_a_proxy_keeps_signatures_valid(server: ObjectServer) -> None:
    content = bytes(range(256)) * 100
    with FaultyProxy(server.endpoint) as proxy:
        store = server.store(endpoint=proxy.endpoint)
        obstore.put(store, "a b/ä%23", content)
        assert bytes(obstore.get_range(store, "a b/ä%23", start=256, end=512)) == bytes(range(256))
        obstore.head(store, "a b/ä%23")
        assert [entry["path"] for chunk in obstore.list(store, "a b") for entry in chunk] == ["a b/ä%23"]
        put, get, head, listed = proxy.requests()
        assert (put.method, put.status, put.upstream_status, put.body_bytes) == ("PUT", 200, 200, len(content))
        assert (get.method, get.status, get.range, get.response_body_bytes) == ("GET", 206, "bytes=256-511", 256)
        assert (head.method, head.status, head.response_body_bytes) == ("HEAD", 200, 0)
        assert (listed.method, listed.status, listed.body_bytes) == ("GET", 200, 0)
        assert listed.response_body_bytes > 0
        assert "prefix=a+b" in listed.query
        assert put.path == get.path == head.path != listed.path
        assert [request.path for request in proxy.requests(method="GET", query="list-type")] == [listed.path]


def test_a_rule_is_for_some_requests(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    store = seaweedfs.store(endpoint=proxy.endpoint)
    proxy.inject(faulty_proxy.INTERNAL_ERROR, method="PUT", path="/some", times=2)
    obstore.put(store, "other", b"content")
    for _ in range(2):
        with pytest.raises(GenericError):
            obstore.put(store, "some", b"content")
    obstore.put(store, "some", b"content")
    obstore.get(store, "some")
    assert [request.status for request in proxy.requests()] == [200, 500, 500, 200, 200]
    proxy.clear()
    assert proxy.requests() == []


def test_close(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    proxy.inject(faulty_proxy.CLOSE, method="PUT")
    with pytest.raises(GenericError):
        obstore.put(seaweedfs.store(endpoint=proxy.endpoint), "close", b"content")
    (request,) = proxy.requests()
    assert (request.body_bytes, request.upstream_status, request.status) == (7, None, None)
    assert create(seaweedfs, "close", b"new")


def test_lose_answer(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    proxy.inject(faulty_proxy.LOSE_ANSWER, method="PUT")
    with pytest.raises(GenericError):
        obstore.put(seaweedfs.store(endpoint=proxy.endpoint), "lost", b"content")
    (request,) = proxy.requests()
    assert (request.body_bytes, request.upstream_status, request.status) == (7, 200, None)
    assert content_of(seaweedfs, "lost") == b"content"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (faulty_proxy.INTERNAL_ERROR, "InternalError"),
        (faulty_proxy.SLOW_DOWN, "SlowDown"),
        (faulty_proxy.TOO_MANY_REQUESTS, "429"),
        (Fault(status=429, retry_after_seconds=1), "429"),
    ],
)
def test_status(seaweedfs: ObjectServer, proxy: FaultyProxy, fault: Fault, text: str) -> None:
    proxy.inject(fault, method="PUT")
    with pytest.raises(GenericError, match=text):
        obstore.put(seaweedfs.store(endpoint=proxy.endpoint), "status", b"content")
    (request,) = proxy.requests()
    assert (request.fault, request.upstream_status, request.status) == (fault, None, fault.status)


def test_retry_after(proxy: FaultyProxy) -> None:
    proxy.inject(Fault(status=503, retry_after_seconds=7))
    proxy.inject(Fault(status=503))
    for expected in (True, False):
        with connect(proxy.endpoint) as client, client.makefile("rb") as stream:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            answer = stream.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert (b"\r\nRetry-After: 7\r\n" in answer) == expected


def test_stall(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    proxy.inject(Fault(stall_seconds=0.3), path="/stall")
    obstore.put(seaweedfs.store(endpoint=proxy.endpoint), "stall", b"content")
    (request,) = proxy.requests()
    assert request.ended_seconds - request.started_seconds >= 0.3
    assert request.status == 200


@pytest.mark.parametrize("nbytes", [1, 16 << 20])
def test_the_end_of_a_stall_whose_client_has_gone(seaweedfs: ObjectServer, proxy: FaultyProxy, nbytes: int) -> None:
    proxy.inject(Fault(stall_seconds=faulty_proxy.IDLE_SECONDS * 2))
    store = seaweedfs.store(endpoint=proxy.endpoint, timeout_seconds=1)
    with pytest.raises(GenericError):
        obstore.put(store, f"gone-{nbytes}", bytes(nbytes), use_multipart=False)
    (request,) = proxy.requests()  # which waits until no request is in flight
    assert (request.upstream_status, request.status) == (None, None)
    assert create(seaweedfs, f"gone-{nbytes}", b"new")


def test_truncate(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    store = seaweedfs.store(endpoint=proxy.endpoint)
    obstore.put(store, "truncate", bytes(1000))
    proxy.inject(Fault(truncate_bytes=1000), method="GET")
    proxy.inject(Fault(truncate_bytes=999), method="GET")
    assert len(obstore.get_range(store, "truncate", start=0, end=1000)) == 1000
    with pytest.raises(GenericError):
        obstore.get_range(store, "truncate", start=0, end=1000)
    assert [request.response_body_bytes for request in proxy.requests(method="GET")] == [1000, 999]


def test_bytes_per_second(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    store = seaweedfs.store(endpoint=proxy.endpoint)
    proxy.inject(Fault(bytes_per_second=1_000_000), path="/slow", times=None)
    content = os.urandom(300_000)
    obstore.put(store, "slow", content)
    assert bytes(obstore.get(store, "slow").bytes()) == content
    assert [request.ended_seconds - request.started_seconds >= 0.3 for request in proxy.requests()] == [True, True]


def test_requests_in_flight(seaweedfs: ObjectServer, proxy: FaultyProxy) -> None:
    store = seaweedfs.store(endpoint=proxy.endpoint)
    proxy.inject(Fault(stall_seconds=1), times=None)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: obstore.put(store, f"flight-{number}", b"content"), range(3)))
    proxy.wait_until_idle()
    assert proxy.most_in_flight == 3


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Starts a server that reads the head of one request, gives this answer, and closes the connection. Yields its
    URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb", buffering=0) as stream:
                while stream.readline() != b"\r\n":
                    pass
                connection.sendall(answer)

        served = pool.submit(serve)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        served.result()


def test_a_chunked_body() -> None:
    body = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    with answering(answer) as endpoint, FaultyProxy(endpoint) as proxy:
        with connect(proxy.endpoint) as client, client.makefile("rb") as stream:
            client.sendall(b"GET /x?y HTTP/1.1\r\nHost: x\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert stream.read().endswith(b"\r\n\r\n" + body)
        (request,) = proxy.requests()
    assert (request.path, request.query, request.response_body_bytes) == ("/x", "y", 11)


def test_an_answer_before_the_end_of_the_request() -> None:
    with (
        answering(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno") as endpoint,
        FaultyProxy(endpoint) as proxy,
    ):
        with connect(proxy.endpoint) as client, client.makefile("rb") as stream:
            client.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 16777216\r\n\r\n" + bytes(16 << 20))
            client.shutdown(socket.SHUT_WR)
            assert stream.read().endswith(b"\r\n\r\nno")
        (request,) = proxy.requests()
    assert (request.body_bytes, request.upstream_status, request.status) == (16 << 20, 403, 403)


def test_the_proxy_ends_with_open_connections(seaweedfs: ObjectServer) -> None:
    with FaultyProxy(seaweedfs.endpoint) as proxy:
        proxy.inject(Fault(stall_seconds=1000))
        client = connect(proxy.endpoint)
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: proxy.most_in_flight == 1)
    client.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "faulty-proxy" not in names
