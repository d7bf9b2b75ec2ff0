"""A proxy for HTTP/1.1 that fails on purpose. It stands on loopback between a client and an object store.

``with FaultyProxy(server.endpoint) as proxy`` starts it. ``proxy.inject(fault, method=..., path=..., query=...)`` tells
it what to do with the next requests that match, and ``proxy.requests()`` returns what it has seen. The header Host
reaches the server as the client has sent it, because the signatures of S3 cover it.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from io import BufferedReader
    from types import TracebackType
    from typing import Self

PIECE_BYTES = 64 * 1024
PACES_PER_SECOND = 20
IDLE_SECONDS = 120
CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}
BODILESS = (204, 304)


@dataclass(frozen=True)
class Fault:
    """What the proxy does with a request. The default is to pass it on. Faults of different kinds can be combined."""

    close: bool = False
    """Reads the request, and closes the connection. The server gets nothing."""
    lose_answer: bool = False
    """Passes the request on, reads the whole answer of the server, and closes the connection without an answer."""
    status: int | None = None
    """Answers with this status and an error in XML, as S3 does. The server gets nothing."""
    code: str | None = None
    """The code of the error in such an answer, or None for one that fits the status."""
    retry_after_seconds: int | None = None
    """The value of the header Retry-After in such an answer, or None for no such header."""
    stall_seconds: float = 0
    """Waits after the request has been read, before anything else, and gives up if the client closes the connection."""
    truncate_bytes: int | None = None
    """Closes the connection after so many bytes of the answer's body, if it has more."""
    bytes_per_second: int | None = None
    """Passes the bodies of the request and of the answer on at this rate at most."""


PASS = Fault()
CLOSE = Fault(close=True)
LOSE_ANSWER = Fault(lose_answer=True)
INTERNAL_ERROR = Fault(status=500)
SLOW_DOWN = Fault(status=503)
TOO_MANY_REQUESTS = Fault(status=429)


@dataclass
class Request:
    """A request that the proxy has seen, and what became of it."""

    method: str
    path: str
    query: str
    range: str | None
    """The header Range, such as ``bytes=0-9``, or None."""
    fault: Fault
    started_seconds: float
    """When the head of the request was there, by ``time.monotonic``."""
    ended_seconds: float = 0
    """When the last byte of the answer was sent, or the connection was closed."""
    body_bytes: int = 0
    """The length of the request's body, as far as the client has sent it."""
    upstream_status: int | None = None
    """The status with which the server has answered, or None if it got no whole request."""
    status: int | None = None
    """The status that the client got, or None if it got no answer."""
    response_body_bytes: int = 0
    """The length of the answer's body, as far as the client got it."""


@dataclass
class Rule:
    """Which requests a fault is for."""

    fault: Fault
    method: str | None
    path: str
    query: str
    left: int | None
    """For how many more requests, or None for all."""

    def matches(self, method: str, path: str, query: str) -> bool:
        return self.left != 0 and self.method in (None, method) and self.path in path and self.query in query


@dataclass
class Head:
    """The first line and the headers of a request or of an answer."""

    line: bytes
    headers: list[bytes] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        for header in self.headers:
            key, _, value = header.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode("latin-1")
        return None

    def with_connection(self, value: str) -> bytes:
        """Returns the bytes of the head. The header Connection, which is not signed, gets this value."""
        kept = [header for header in self.headers if not header.lower().startswith((b"connection:", b"keep-alive:"))]
        return b"".join([self.line, *kept, f"Connection: {value}\r\n\r\n".encode()])


class FaultyProxy:
    """Forwards each request to the server at the URL ``upstream`` on a connection of its own."""

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        assert address.hostname is not None
        assert address.port is not None
        self._upstream = (address.hostname, address.port)
        self._changed = threading.Condition()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []
        self._in_flight = 0
        self._most_in_flight = 0
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections, and waits for the end of all threads."""
        with self._changed:
            self._closed = True
            for connection in (self._listener, *self._sockets):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def inject(
        self, fault: Fault, *, method: str | None = None, path: str = "", query: str = "", times: int | None = 1
    ) -> None:
        """Does ``fault`` to the next ``times`` requests, or to all of them if it is None, that have this method, and
        whose path and query contain these strings. The rule that was added first is looked at first."""
        with self._changed:
            self._rules.append(Rule(fault, method, path, query, times))

    def clear(self) -> None:
        """Forgets all rules and all requests."""
        self.wait_until_idle()
        with self._changed:
            self._rules.clear()
            self._requests.clear()
            self._most_in_flight = 0

    def wait_until_idle(self) -> None:
        """Waits until no request is in flight. A client may have its answer before the proxy has written it down."""
        with self._changed:
            idle = self._changed.wait_for(lambda: self._in_flight == 0, IDLE_SECONDS)
        assert idle, f"a request has been in flight for {IDLE_SECONDS} s"

    def requests(self, *, method: str | None = None, path: str = "", query: str = "") -> list[Request]:
        """Returns the requests so far that match, in the order in which they came in."""
        self.wait_until_idle()
        wanted = Rule(PASS, method, path, query, None)
        with self._changed:
            return [
                request for request in self._requests if wanted.matches(request.method, request.path, request.query)
            ]

    @property
    def most_in_flight(self) -> int:
        """The largest number of requests that were in flight at one time."""
        with self._changed:
            return self._most_in_flight

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="faulty-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _opened(self, connection: socket.socket) -> None:
        """Lets ``close`` end this connection too."""
        with self._changed:
            if self._closed:
                raise ConnectionAbortedError("the proxy is closed")
            self._sockets.add(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _serve(self, client: socket.socket) -> None:
        """Serves the requests of one connection, one after another."""
        with suppress(OSError, EOFError), client, client.makefile("rb") as stream:
            try:
                self._opened(client)
                while self._handle_next(client, stream):
                    pass
            finally:
                with self._changed:
                    self._sockets.discard(client)

    def _handle_next(self, client: socket.socket, stream: BufferedReader) -> bool:
        """Serves a request. Returns whether the connection stays open."""
        head = read_head(stream)
        method, target, _ = head.line.decode("latin-1").split(" ", 2)
        path, _, query = target.partition("?")
        with self._changed:
            rule = next((rule for rule in self._rules if rule.matches(method, path, query)), None)
            if rule is not None and rule.left is not None:
                rule.left -= 1
            fault = PASS if rule is None else rule.fault
            request = Request(method, path, query, head.get("range"), fault, time.monotonic())
            self._requests.append(request)
            self._in_flight += 1
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            body: Iterable[Piece] = received(stream, head, request)
            if fault.stall_seconds:
                # The end of a connection is behind its data, so it is seen only if the body has been read.
                body = list(body)
                if hangs_up(client, fault.stall_seconds):
                    return False
            if fault.close or fault.status is not None:
                for _ in body:
                    pass
                return fault.status is not None and self._refuse(client, request, fault, fault.status)
            return self._forward(client, head, body, request)
        finally:
            with self._changed:
                request.ended_seconds = time.monotonic()
                self._in_flight -= 1
                self._changed.notify_all()

    def _refuse(self, client: socket.socket, request: Request, fault: Fault, status: int) -> bool:
        code = fault.code or CODES.get(status, "Error")
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>on purpose</Message></Error>'.encode()
        lines = [f"HTTP/1.1 {status} {code}", "Content-Type: application/xml", f"Content-Length: {len(body)}"]
        if fault.retry_after_seconds is not None:
            lines.append(f"Retry-After: {fault.retry_after_seconds}")
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        request.status = status
        if request.method != "HEAD":
            client.sendall(body)
            request.response_body_bytes = len(body)
        return True

    def _forward(self, client: socket.socket, head: Head, body: Iterable[Piece], request: Request) -> bool:
        upstream = socket.create_connection(self._upstream)
        with upstream, upstream.makefile("rb") as answers:
            try:
                self._opened(upstream)
                upstream.sendall(head.with_connection("close"))
                reads = True
                for piece in body:
                    if reads:
                        try:
                            upstream.sendall(piece.content)
                        except OSError:  # The server has answered without reading the body, such as with 403.
                            reads = False
                answer = read_head(answers)
                request.upstream_status = int(answer.line.split(b" ", 2)[1])
                return self._answer(client, answers, answer, request, request.upstream_status)
            finally:
                with self._changed:
                    self._sockets.discard(upstream)

    def _answer(
        self, client: socket.socket, answers: BufferedReader, answer: Head, request: Request, status: int
    ) -> bool:
        fault = request.fault
        bodiless = request.method == "HEAD" or status in BODILESS
        has_end = bodiless or answer.get("content-length") is not None or answer.get("transfer-encoding") is not None
        if not fault.lose_answer:
            client.sendall(answer.with_connection("keep-alive" if has_end else "close"))
            request.status = status
        if bodiless:
            return not fault.lose_answer
        for piece in body_pieces(answers, answer, fault, until_end=not has_end):
            if fault.lose_answer:
                continue
            left = None if fault.truncate_bytes is None else fault.truncate_bytes - request.response_body_bytes
            if left is not None and piece.is_payload and len(piece.content) > left:
                client.sendall(piece.content[:left])
                request.response_body_bytes += left
                return False
            client.sendall(piece.content)
            request.response_body_bytes += payload_bytes(piece)
        return has_end and not fault.lose_answer


@dataclass(frozen=True)
class Piece:
    """A part of the body of a request or of an answer, as it goes over the network."""

    content: bytes
    is_payload: bool = True
    """False for the lines between the chunks of a chunked body."""


def received(stream: BufferedReader, head: Head, request: Request) -> Iterator[Piece]:
    """Yields the body of a request, and counts its bytes."""
    for piece in body_pieces(stream, head, request.fault):
        request.body_bytes += payload_bytes(piece)
        yield piece


def payload_bytes(piece: Piece) -> int:
    return len(piece.content) if piece.is_payload else 0


def read_head(stream: BufferedReader) -> Head:
    """Raises EOFError if the connection was closed."""
    head = Head(read_line(stream))
    while (line := read_line(stream)) != b"\r\n":
        head.headers.append(line)
    return head


def read_line(stream: BufferedReader) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def body_pieces(stream: BufferedReader, head: Head, fault: Fault, until_end: bool = False) -> Iterator[Piece]:
    """Yields a body in small pieces, as slowly as the fault says. ``until_end`` is for an answer whose body ends with
    the connection."""
    if head.get("transfer-encoding") == "chunked":
        while True:
            line = read_line(stream)
            yield Piece(line, is_payload=False)
            nbytes = int(line.split(b";")[0], 16)
            yield from paced(stream, nbytes, fault)
            if nbytes == 0:
                break
            yield Piece(read_line(stream), is_payload=False)
        while (trailer := read_line(stream)) != b"\r\n":
            yield Piece(trailer, is_payload=False)
        yield Piece(trailer, is_payload=False)
    else:
        yield from paced(stream, None if until_end else int(head.get("content-length") or 0), fault)


def paced(stream: BufferedReader, nbytes: int | None, fault: Fault) -> Iterator[Piece]:
    """Yields the next ``nbytes``, or all that come if it is None, and raises EOFError if there are fewer."""
    rate = fault.bytes_per_second
    limit = PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, rate // PACES_PER_SECOND))
    start, done = time.monotonic(), 0
    while nbytes is None or done < nbytes:
        content = stream.read1(limit if nbytes is None else min(limit, nbytes - done))
        if not content:
            if nbytes is None:
                return
            raise EOFError
        done += len(content)
        if rate is not None:
            time.sleep(max(0, start + done / rate - time.monotonic()))
        yield Piece(content)


def hangs_up(client: socket.socket, seconds: float) -> bool:
    """Waits. Returns true, and at once, if the client closes the connection."""
    poller = select.poll()
    poller.register(client, select.POLLRDHUP)
    return bool(poller.poll(seconds * 1000))
