"""The stores for S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage, and web servers, which can
only be read. They need the package obstore: ``pip install zckpt[cloud]``."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zckpt.errors import MissingFileError, NoSpaceError, StorageError, UnsupportedError
from zckpt.format import names
from zckpt.format.rules import broken
from zckpt.progress import logger
from zckpt.storage.contract import ANYTHING, Entry, IOCount, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Condition

PART_BYTES = 8 << 20
"""The size in bytes of the parts in which a large file is uploaded."""
PARTS_IN_FLIGHT = 4
"""How many parts of one file are uploaded at a time."""
REQUESTS_IN_FLIGHT = 16
"""How many requests for data are made at a time."""
PIECE_BYTES = 1 << 20
"""The smallest piece in bytes in which the answer to a read is copied to its target."""
ATTEMPTS = 5
"""How often a read is continued after its connection was cut."""
REMOVAL_SECONDS = 5.0
"""How long a new file waits for the removal of the file that was there before, in seconds."""
TIMEOUT_SECONDS, CONNECT_SECONDS = 60, 10
"""How long one request may take, and how long a connection may take to be made, in seconds."""
RETRIES, RETRY_SECONDS = 8, 120
"""How often a request that failed is sent again, and for how many seconds."""
_CONDITIONS = {"If-None-Match": "create", "If-Match": {"e_tag": '"00000000000000000000000000000000"'}}
"""The headers by which a put has a condition, and modes of obstore that use them."""
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")
"""How the names of the variables of the environment begin that say where a bucket is, and who may use it."""
_REMOVED = b"removed by zckpt "
"""How the content of a file begins that is just being removed under a condition."""
_REFUSED = re.compile("status code: 4(?!08|29)")
"""Matches the text of an error by which a server has refused a request for good."""
_SECRETS = re.compile(r"\?[^\s\"')>]*")
"""Matches the query of a URL, which may contain a signature or a token."""


class ObjectReader:
    """Reads the objects below one prefix by ranged requests."""

    direct = None

    def __init__(self, store: ObjectStore) -> None:
        self.count = IOCount()
        self._store = store

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        data = b"".join(bytes(piece) for piece in self._pieces(path, offset, offset + nbytes))
        if data.startswith(_REMOVED):
            raise broken("F001", "the file is being removed", file=str(self._store.location.child(path)))
        self.count.add(metadata_bytes=len(data))
        return data

    def read_into(self, path: str, views: Sequence[Bytes | memoryview], offset: int) -> int:
        targets = [np.asarray(view) for view in views if len(view)]
        filled = number = start = 0
        for piece in self._pieces(path, offset, offset + sum(map(len, targets))):
            data = np.frombuffer(piece, np.uint8)
            filled += len(data)
            while len(data):
                room = targets[number][start:]
                nbytes = min(len(room), len(data))
                room[:nbytes] = data[:nbytes]
                data, start = data[nbytes:], start + nbytes
                if start == len(targets[number]):
                    number, start = number + 1, 0
        self.count.add(data_bytes=filled)
        return filled

    def size(self, path: str) -> int:
        self.count.add(reads=1)
        with self._store.errors("look at", path):
            return int(self._store.call("head", path)["size"])

    def close(self) -> None: ...

    def _pieces(self, path: str, start: int, stop: int) -> Iterator[Bytes]:
        """Yields the bytes ``[start, stop)`` of a file piece by piece, or fewer if the file ends before. If the
        connection is cut, asks for the rest of the same version of the file."""
        if start >= stop:
            self.size(path)  # raises an error if there is no file
            return
        version: str | None = None
        for attempt in range(ATTEMPTS):
            self.count.add(reads=1)
            try:
                options = {"range": (start, stop)} | ({"if_match": version} if version else {})
                with self._store.errors("read", path, start, stop):
                    result = self._store.call("get", path, options=options)
                    version, stop = result.meta["e_tag"], min(stop, result.meta["size"])
                    for piece in result.stream(min_chunk_size=PIECE_BYTES):
                        yield piece
                        start += len(piece)
                return
            except StorageError as error:
                # A server refuses a range that begins at the end of the file, or after it.
                if not attempt and start >= self.size(path):
                    return
                if not error.transient or attempt == ATTEMPTS - 1:
                    raise
                logger.debug("%s: continued at byte %d: %s", path, start, error)


class ObjectWriter:
    """Uploads one new file in parts, in the order of the file. The bytes are copied once, because obstore refers to
    them until their part is uploaded."""

    sharing = None

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store, self._path = store, path
        self._file: Any = None
        self._early: dict[int, bytes] = {}
        self._position = 0
        self._lock = threading.Lock()

    def write(self, data: Bytes | memoryview, offset: int) -> None:
        with self._lock, self._store.errors("write", self._path, offset, offset + len(data)):
            self._early[offset] = bytes(data)
            while (early := self._early.pop(self._position, None)) is not None:
                self._upload(early)

    def _upload(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._store.call(
                "open_writer", self._path, buffer_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
            )
        self._file.write(data)
        self._position += len(data)

    def sync(self) -> None:
        assert not self._early, "every byte of the file was written"
        with self._store.errors("write", self._path, 0, self._position):
            self._upload(b"")
            self._file.close()
        self._file = None

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(Exception):  # The upload that stays is never shown, and is removed by gc.
                file.__exit__(StorageError, StorageError("given up"), None)  # This is how obstore gives an upload up.


class ObjectStore(Store):
    """A store whose files are the objects of a bucket below one prefix."""

    requests_in_flight = REQUESTS_IN_FLIGHT

    def call(self, name: str, path: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls a function of obstore for a file. Raises what it raises."""
        return getattr(_obstore(), name)(self.client.bucket, self._key(path), *arguments, **keywords)

    def errors(self, action: str, path: str, start: int | None = None, stop: int | None = None) -> _Errors:
        """Returns a context manager in which every error of obstore becomes one of zckpt, which names the file."""
        return _Errors(action, str(self.location.child(path)), start, stop)

    def reader(self) -> ObjectReader:
        return ObjectReader(self)

    def entry(self, path: str) -> Entry | None:
        if self._key(path):
            with suppress(MissingFileError), self.errors("look at", path):
                found = self.call("head", path)
                return Entry(path, found["size"], found["last_modified"].timestamp())
        with self.errors("list", path):
            below = next(iter(self._list(path, chunk_size=1)), None)
        return Entry(path, None, 0.0, is_directory=True) if below else None

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        above = self._key(path)
        with self.errors("list", path):
            if deep:
                objects, directories = [found for chunk in self._list(path) for found in chunk], []
            else:
                listed = self.call("list_with_delimiter", path)
                objects, directories = listed["objects"], listed["common_prefixes"]
        entries = [Entry(found["path"], found["size"], found["last_modified"].timestamp()) for found in objects]
        entries += [Entry(directory, None, 0.0, is_directory=True) for directory in directories]
        above = f"{above}/" if above else ""  # Some servers list an empty directory as a file.
        below = [entry for entry in entries if entry.path.startswith(above)]
        return [entry._replace(path=entry.path.removeprefix(above)) for entry in below] or None

    def sizes(self, paths: Sequence[str]) -> list[int]:
        above = os.path.commonpath(paths) if len(paths) > 1 else ""
        listed = {f"{above}/{entry.path}".lstrip("/"): entry.nbytes for entry in self.entries(above, deep=True) or ()}
        missing = [path for path in paths if path not in listed]
        if missing:
            raise broken("F001", "the file is missing", file=str(self.location.child(missing[0])))
        return [listed[path] or 0 for path in paths]

    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        with self.errors("write", path):
            if over is ANYTHING:
                self.call("put", path, data, use_multipart=False)
                return True
            _try_out(self)
            if over is None:
                return self._put(path, data, "create") or self._put_after_removal(path, data)
            there = self._there(path)
            return there is not None and there[0] == over and self._put(path, data, there[1])

    def _put(self, path: str, data: bytes, mode: Any) -> bool:
        """Puts a file under a condition. Returns whether the condition held."""
        obstore = _obstore()
        try:
            self.call("put", path, data, mode=mode, use_multipart=False)
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError, FileNotFoundError):
            # If the answer to a put is lost, it is sent again, and then finds its own file.
            there = self._there(path)
            return there is not None and there[0] == data
        return True

    def _put_after_removal(self, path: str, data: bytes) -> bool:
        """Puts a file where another one is, if that one is just being removed."""
        give_up = time.monotonic() + REMOVAL_SECONDS
        while (there := self._there(path)) is not None and there[0].startswith(_REMOVED):
            if time.monotonic() > give_up:  # The process that removes it has died.
                return self._put(path, data, there[1])
            time.sleep(0.05)
        return there is None and self._put(path, data, "create")

    def _there(self, path: str) -> tuple[bytes, dict[str, Any]] | None:
        """Returns the content of a small file and what identifies this version of it, or None if there is none."""
        try:
            result = self.call("get", path)
        except FileNotFoundError:
            return None
        version = {field: result.meta[field] for field in ("e_tag", "version") if result.meta[field] is not None}
        return bytes(result.bytes()), version

    def create(self, path: str, reserved_bytes: int, *, direct: bool) -> ObjectWriter:
        return ObjectWriter(self, path)

    def remove(self, *paths: str) -> None:
        keys = [self._key(path) for path in paths if path]
        delete = partial(_obstore().delete, self.client.bucket)
        try:
            if keys:
                delete(keys)
        except Exception as error:  # what cannot be removed stays, and some servers refuse a file that is not there
            logger.debug("%s: %s", self.location, _without_secrets(error))
            with ThreadPoolExecutor(self.requests_in_flight) as pool:
                pool.map(partial(_quietly, delete), keys)

    def remove_if(self, path: str, data: bytes) -> bool:
        # A server removes without a condition. So the file is first replaced under the condition: only the process that
        # has replaced it removes it, and others wait.
        with self.errors("remove", path):
            there = self._there(path)
            mark = _REMOVED + secrets.token_hex(8).encode()
            if there is None or there[0] != data or not self._put(path, mark, there[1]):
                return False
            self.call("delete", path)
        return True

    def now(self) -> float:
        probe = names.temporary(names.LOCK, secrets.token_hex(4))
        with self.errors("write", probe):
            try:
                self.call("put", probe, b"", use_multipart=False)
                return float(self.call("head", probe)["last_modified"].timestamp())
            finally:
                self.remove(probe)

    def _list(self, path: str, **options: Any) -> Any:
        return self.call("list", path, **options)

    @property
    def bucket(self) -> str:
        """The name of the bucket, or that of the web server."""
        return self.location.path.partition("/")[0]

    @property
    def client(self) -> _Client:
        """What makes the requests."""
        settings = ((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
        return _bucket(self.location.scheme, self.bucket, os.getpid(), *sorted(settings))

    def _key(self, path: str) -> str:
        return self.location.child(path).path.partition("/")[2].strip("/")


class WebStore(ObjectStore):
    """A directory of a web server or of a model hub. It can be read, but neither listed nor changed."""

    def entry(self, path: str) -> Entry | None:
        try:
            with self.errors("look at", path):
                found = self.call("head", path)
                return Entry(path, found["size"], found["last_modified"].timestamp())
        except MissingFileError:
            return None

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        return None

    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        raise UnsupportedError(
            "a web server can only be read", file=str(self.location.child(path)),
            hint="write to a path of a file system, or to an object store such as s3://bucket/run",
        )  # fmt: skip


class _Errors:
    """Turns the errors of obstore into errors of zckpt that name the file and contain no credentials."""

    def __init__(self, action: str, file: str, start: int | None, stop: int | None) -> None:
        self._action, self._file, self._start, self._stop = action, file, start, stop

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        errors = _obstore().exceptions
        if isinstance(error, FileNotFoundError) and self._action in ("look at", "read"):
            raise broken("F001", "the file is missing", file=self._file) from None
        if not isinstance(error, (errors.BaseError, FileNotFoundError)):
            return
        text = _without_secrets(error)
        error_class, hint = StorageError, None
        if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
            hint = "the credentials of the environment or of the profile are missing or wrong, or may not do this"
        elif "Quota" in text or "507" in text:
            error_class = NoSpaceError
        failed = error_class(
            f"cannot {self._action}: {text}", file=self._file, start=self._start, stop=self._stop, hint=hint
        )
        failed.transient = type(error) is errors.GenericError and not _REFUSED.search(text)
        raise failed from None


def _without_secrets(error: BaseException) -> str:
    """Returns the text of an error without the queries of URLs, in one line."""
    return _SECRETS.sub("?...", str(error).partition("Debug source:")[0]).replace("\n", " ").strip()


def _quietly(action: Callable[[Any], object], argument: Any) -> None:
    with suppress(Exception):  # what cannot be removed stays
        action(argument)


def _obstore() -> Any:
    """Returns the module obstore. Raises UnsupportedError if it is not installed."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UnsupportedError(
            "an object store needs the package obstore", hint="install it: pip install 'zckpt[cloud]'"
        ) from error
    return obstore


@dataclass(eq=False)
class _Client:
    """What makes the requests for a bucket, or for a web server."""

    bucket: Any
    """obstore's object."""
    is_tried_out: bool = False
    """Whether the server is known to keep conditions and ranges."""


@lru_cache
def _bucket(scheme: str, bucket: str, pid: int, *settings: tuple[str, str]) -> _Client:
    """Returns the client for a bucket, or for a web server. A forked process needs a client of its own, and so do
    other ``settings``, which are those variables of the environment that the client is made from."""
    obstore = _obstore()
    client = {"timeout": timedelta(seconds=TIMEOUT_SECONDS), "connect_timeout": timedelta(seconds=CONNECT_SECONDS)}
    backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 3}
    retries = {"backoff": backoff, "max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    common = {"client_options": client, "retry_config": retries}
    url = f"{scheme}://{bucket}"
    try:
        if scheme != "s3":
            return _Client(obstore.store.from_url(url, **common))
        return _Client(obstore.store.S3Store(bucket, **_s3_options(), **common))
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise StorageError(f"cannot open the bucket: {_without_secrets(error)}", file=url) from None


def _s3_options() -> dict[str, Any]:
    """Returns the options of a bucket of S3. obstore finds credentials in the environment, and on machines of AWS. The
    credentials of a profile, as ``aws sso login`` makes them, are found by boto3, if it is installed."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {}
    if endpoint:
        options["endpoint"] = endpoint
        options["config"] = {"allow_http": endpoint.startswith("http://")}
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return options
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return options
    session = boto3.session.Session()
    if session.get_credentials() is not None:
        options["credential_provider"] = Boto3CredentialProvider(session)
    return options


def _try_out(store: ObjectStore) -> None:
    """Raises UnsupportedError if the server of a bucket ignores conditions or ranges, as some servers do that speak the
    protocol of S3. There, two writers could replace each other's checkpoint without a word. Uses a small file, once for
    each process and bucket."""
    client = store.client
    if client.is_tried_out:
        return
    probe, errors = names.temporary(names.LOCK, secrets.token_hex(4)), _obstore().exceptions
    refusals = (errors.AlreadyExistsError, errors.PreconditionError)

    def ignored(mode: Any) -> bool:
        try:
            store.call("put", probe, b"two", mode=mode, use_multipart=False)
        except refusals:
            return False
        return True

    try:
        store.call("put", probe, b"one", mode="create", use_multipart=False)
        ignores = [what for what, mode in _CONDITIONS.items() if ignored(mode)]
        if not ignores and bytes(store.call("get_range", probe, start=1, length=1)) != b"n":
            ignores = ["ranges"]
    except errors.NotSupportedError:
        ignores = ["ranges"]
    finally:
        store.remove(probe)
    if ignores:
        raise UnsupportedError(
            f"the server ignores {' and '.join(ignores)}, so two writers could replace each other's checkpoint",
            file=f"{store.location.scheme}://{store.bucket}",
            hint="use a server with conditional writes, such as S3, Google Cloud Storage, Azure, MinIO or SeaweedFS",
        )
    client.is_tried_out = True
