"""A web server on loopback that serves the files of a directory, with ranges or without."""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    """Serves whole files, as the server of Python does. It has no ETags, and refuses every method but GET and HEAD."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...


class RangeHandler(Handler):
    """Serves a part of a file to a request with the header Range."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if asked is None or not os.path.isfile(path):
            super().do_GET()
            return
        size, start = os.path.getsize(path), int(asked[1])
        if start >= size:
            self.send_error(416)
            return
        stop = min(int(asked[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Last-Modified", self.date_time_string(os.path.getmtime(path)))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            self.wfile.write(file.read(stop - start))


@contextmanager
def web_server(directory: Path, *, ranges: bool = True) -> Iterator[str]:
    """Serves a directory, and yields the URL of the server."""
    handler = partial(RangeHandler if ranges else Handler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
