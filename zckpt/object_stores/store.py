"""The stores for S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage, and web servers, which can
only be read. They need the package obstore: ``pip install zckpt[cloud]``."""

from __future__ import annotations

import os
import posixpath
import secrets
import time
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from zckpt.errors import MissingFileError, StorageError, UnsupportedError
from zckpt.format import names
from zckpt.format.rules import broken
from zckpt.object_stores.client import (
    CONNECT_SECONDS,
    RETRY_SECONDS,
    TIMEOUT_SECONDS,
    client_of,
    endpoint,
    load_obstore,
)
from zckpt.object_stores.errors import NO_BUCKET, PAST_THE_END, REFUSED, Errors, without_secrets
from zckpt.object_stores.writer import ObjectWriter
from zckpt.progress import logger
from zckpt.storage.buffers import scatter
from zckpt.storage.contract import ANYTHING, Entry, IOCount, Store, UnfinishedUpload
from zckpt.system.waits import bounded_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zckpt.object_stores.client import Client
    from zckpt.storage.buffers import Bytes
    from zckpt.storage.contract import Condition
    from zckpt.storage.location import Location

REQUESTS_IN_FLIGHT = 16
"""How many requests for data are made at a time."""
Result = TypeVar("Result")
PIECE_BYTES = 1 << 20
"""The smallest piece in bytes in which the answer to a read is copied to its target."""
ATTEMPTS = 3
"""How many times in a row a read may be cut off before its next byte has come, and how many times a put is sent whose
result is unknown. Each time, obstore has already sent the request again by itself."""
REMOVAL_SECONDS = 5.0
"""How long a new file waits for the removal of the file that was there before, in seconds."""
_REMOVED = b"removed by zckpt "
"""How the content of a file begins that is just being removed under a condition."""
_REMOVED_BYTES = len(_REMOVED) + 16
"""The length of this content in bytes."""


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
        filled = scatter(self._pieces(path, offset, offset + sum(map(len, views))), views)
        self.count.add(data_bytes=filled)
        return filled

    def size(self, path: str) -> int:
        self.count.add(reads=1)
        with self._store.errors("look at", path):
            return int(self._store.call("head", path)["size"])

    def close(self) -> None: ...

    def _pieces(self, path: str, start: int, stop: int) -> Iterator[Bytes]:
        """Yields the bytes ``[start, stop)`` of a file piece by piece, or fewer if the file ends before. If the
        connection is cut, asks for the rest. Raises StorageError if the rest is that of another version of the file."""
        if start >= stop:
            self.size(path)  # raises an error if there is no file
            return
        first_version, left = None, ATTEMPTS
        while left:
            self.count.add(reads=1)
            result = _again(partial(self._open, path, start, stop))
            if result is None and first_version is None:
                return
            # Not every server has ETags, and not every one obeys the header If-Match. The answer says its version.
            version = None if result is None else (result.meta["e_tag"] or result.meta["last_modified"])
            if result is None or first_version not in (None, version):
                raise self._store.transient_error("the file was replaced while it was read", path, start, stop)
            first_version, stop = version, min(stop, result.meta["size"])
            try:
                with self._store.errors("read", path, start, stop):
                    for piece in result.stream(min_chunk_size=PIECE_BYTES):
                        yield piece
                        start, left = start + len(piece), ATTEMPTS
                if start >= stop:
                    return
                raise self._store.transient_error("the answer is too short", path, start, stop)
            except StorageError as error:
                left -= 1
                if not error.transient or not left:
                    raise
                logger.debug("%s: continued at byte %d: %s", path, start, error)

    def _open(self, path: str, start: int, stop: int) -> Any:
        """Requests bytes of a file. Returns None if the file ends before them."""
        with self._store.errors("read", path, start, stop):
            try:
                return self._store.call("get", path, options={"range": (start, stop)})
            except Exception as error:
                if PAST_THE_END.search(without_secrets(error)):
                    return None
                raise


class ObjectStore(Store):
    """A store whose files are the objects of a bucket below one prefix."""

    requests_in_flight = REQUESTS_IN_FLIGHT

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        if "@" in self.bucket:
            raise UnsupportedError(
                "a URL may not contain credentials", file=f"{location.scheme}://{self.bucket.rpartition('@')[2]}",
                hint="set the variables of the environment that the provider of the bucket says",
            )  # fmt: skip

    @property
    def parent(self) -> Store:
        return super().parent if self._key("") else self  # There is nothing above a bucket.

    def call(self, name: str, path: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls a function of obstore for a file. Raises what it raises."""
        return getattr(load_obstore(), name)(self.client.bucket, self._key(path), *arguments, **keywords)

    @contextmanager
    def errors(self, action: str, path: str, start: int | None = None, stop: int | None = None) -> Iterator[None]:
        """Inside this block, every error of obstore becomes one of zckpt, which names the file. While requests are
        repeated, this rank counts as alive, because each of them ends by itself. An upload repeats each request itself,
        and is called as often as ``ATTEMPTS`` says."""
        seconds = ATTEMPTS * (RETRY_SECONDS + TIMEOUT_SECONDS)
        with bounded_wait(seconds), Errors(action, str(self.location.child(path)), start, stop):
            yield

    def transient_error(self, message: str, path: str, start: int, stop: int) -> StorageError:
        """Returns the error of a read that may succeed at the next time."""
        error = StorageError(message, file=str(self.location.child(path)), start=start, stop=stop)
        error.transient = True
        return error

    def reader(self) -> ObjectReader:
        return ObjectReader(self)

    def entry(self, path: str) -> Entry | None:
        if self._key(path) and (file := self._file(path)) is not None:
            return file
        return Entry(path, None, 0.0, is_directory=True) if _again(lambda: self._has_files(path)) else None

    def _has_files(self, path: str) -> bool:
        with self.errors("list", path):
            return bool(next(iter(self.call("list", path, chunk_size=1)), None))

    def _file(self, path: str) -> Entry | None:
        with suppress(MissingFileError), self.errors("look at", path):
            found = self.call("head", path)
            return Entry(path, found["size"], found["last_modified"].timestamp())
        return None

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        above = self._key(path)
        objects, directories = _again(lambda: self._list(path, deep=deep))
        entries = [Entry(found["path"], found["size"], found["last_modified"].timestamp()) for found in objects]
        entries += [Entry(directory, None, 0.0, is_directory=True) for directory in directories]
        above = f"{above}/" if above else ""  # Some servers list an empty directory as a file.
        below = [entry for entry in entries if entry.path.startswith(above)]
        return [entry._replace(path=entry.path.removeprefix(above)) for entry in below] or None

    def _list(self, path: str, *, deep: bool) -> tuple[list[Any], list[str]]:
        """Returns obstore's descriptions of the objects in a directory, and the names of its directories."""
        with self.errors("list", path):
            if deep:
                return [found for chunk in self.call("list", path) for found in chunk], []
            listed = self.call("list_with_delimiter", path)
            return listed["objects"], listed["common_prefixes"]

    def sizes(self, paths: Sequence[str]) -> list[int]:
        above = posixpath.commonpath([posixpath.dirname(path) for path in paths]) if paths else ""
        entries = self.entries(above, deep=True) if paths else None
        listed = {posixpath.join(above, entry.path): entry.nbytes or 0 for entry in entries or ()}
        missing = [path for path in paths if path not in listed]
        if missing:
            raise broken("F001", "the file is missing", file=str(self.location.child(missing[0])))
        return [listed[path] for path in paths]

    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        with self.errors("write", path):
            if over is ANYTHING:
                self.call("put", path, data, use_multipart=False)
                return True
            _probe(self)
            if over is None:
                return self.try_to_put(path, data, "create") or self._put_after_removal(path, data)
            there = self.read_version(path, len(over))
            return there is not None and there[0] == over and self.try_to_put(path, data, there[1])

    def try_to_put(self, path: str, data: bytes, mode: Any) -> bool:
        """Puts a file under a condition. Returns whether the condition held. A put whose result is unknown is sent
        again: otherwise the server could still carry it out after this process has given up. Raises what obstore
        raises."""
        errors = load_obstore().exceptions
        for attempt in range(ATTEMPTS):
            try:
                self.call("put", path, data, mode=mode, use_multipart=False)
                return True
            except (errors.AlreadyExistsError, errors.PreconditionError, FileNotFoundError) as error:
                if NO_BUCKET.search(str(error)):
                    raise
                break
            except errors.GenericError as error:
                if attempt == ATTEMPTS - 1 or REFUSED.search(without_secrets(error)):
                    raise
                logger.debug("%s: %s is put again: %s", self.location, path, without_secrets(error))
        there = self.read_version(path, len(data))  # An earlier request may have put it whose answer was lost.
        return there is not None and there[0] == data

    def _put_after_removal(self, path: str, data: bytes) -> bool:
        """Puts a file where another one is, if that one is just being removed."""
        give_up = time.monotonic() + REMOVAL_SECONDS
        while (there := self.read_version(path, _REMOVED_BYTES)) is not None and (there[0] or b"").startswith(_REMOVED):
            if time.monotonic() > give_up:  # The process that removes it has died.
                return self.try_to_put(path, data, there[1])
            time.sleep(0.05)
        return there is None and self.try_to_put(path, data, "create")

    def read_version(self, path: str, bytes_max: int) -> tuple[bytes | None, dict[str, Any]] | None:
        """Returns the content of a file and what identifies this version of it, or None if there is no file. The
        content is None if it has more than ``bytes_max`` bytes."""
        try:
            result = self.call("get", path)
        except FileNotFoundError:
            return None
        version = {field: result.meta[field] for field in ("e_tag", "version") if result.meta[field] is not None}
        return bytes(result.bytes()) if result.meta["size"] <= bytes_max else None, version

    def create(self, path: str, nbytes: int, *, direct: bool, reserve: bool = True) -> ObjectWriter:
        return ObjectWriter(self, path, nbytes)

    def remove(self, *paths: str) -> None:
        keys = [self._key(path) for path in paths if path]
        try:
            delete = partial(load_obstore().delete, self.client.bucket)
            if keys:
                with bounded_wait(RETRY_SECONDS + TIMEOUT_SECONDS):
                    delete(keys)
        except Exception as error:  # what cannot be removed stays
            logger.debug("%s: %s", self.location, without_secrets(error))
            # Some servers refuse to remove many files at once, or a file that is not there.
            if REFUSED.search(without_secrets(error)):
                from zckpt.transfer.tasks import run_tasks  # imported late, because a store needs no torch

                run_tasks([partial(_quietly, delete, key) for key in keys], self.requests_in_flight)

    def remove_if(self, path: str, data: bytes) -> bool:
        # A server removes without a condition. So the file is first replaced under the condition: only the process that
        # has replaced it removes it, and others wait. If the answer to the removal is lost for longer than they wait,
        # the file of another one may be removed. That writer then fails, for its lock is gone, and commits nothing.
        with self.errors("remove", path):
            there = self.read_version(path, len(data))
            mark = _REMOVED + secrets.token_hex(8).encode()
            if there is None or there[0] != data or not self.try_to_put(path, mark, there[1]):
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

    def unfinished(self, age_seconds: float) -> list[UnfinishedUpload]:
        client, above = self._uploads(), f"{self._key('')}/".lstrip("/")
        if client is None:
            return []
        with self.errors("list the unfinished uploads of", ""):
            pages = [*client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=above)]
            now = parsedate_to_datetime(pages[0]["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
            uploads = []
            for upload in (upload for page in pages for upload in page.get("Uploads", ())):
                key, upload_id = upload["Key"], upload["UploadId"]
                if now - upload["Initiated"].timestamp() <= age_seconds:
                    continue
                parts = client.get_paginator("list_parts").paginate(Bucket=self.bucket, Key=key, UploadId=upload_id)
                try:
                    nbytes = sum(part["Size"] for page in parts for part in page.get("Parts", ()))
                except client.exceptions.NoSuchUpload:  # It has ended meanwhile.
                    continue
                uploads.append(UnfinishedUpload(key.removeprefix(above), nbytes, upload_id))
        return uploads

    def give_up(self, upload: UnfinishedUpload) -> None:
        client = self._uploads()
        assert client is not None, "it has listed the upload"
        with self.errors("give up the upload of", upload.path), suppress(client.exceptions.NoSuchUpload):
            client.abort_multipart_upload(Bucket=self.bucket, Key=self._key(upload.path), UploadId=upload.upload_id)

    def _uploads(self) -> Any:
        """Returns what lists the unfinished uploads of a bucket, which obstore cannot do. Returns None if this is not a
        bucket of S3, or boto3 is not installed."""
        try:
            import boto3.session
            import botocore.config
        except ImportError:
            return None
        if self.location.scheme != "s3":
            return None
        config = botocore.config.Config(
            connect_timeout=CONNECT_SECONDS, read_timeout=TIMEOUT_SECONDS, s3={"addressing_style": "path"},
        )  # fmt: skip
        region = os.environ.get("AWS_REGION")
        with self.errors("open", ""):
            session = boto3.session.Session()
            return session.client("s3", endpoint_url=endpoint(), region_name=region, config=config)

    @property
    def bucket(self) -> str:
        """The name of the bucket, or that of the web server."""
        return self.location.path.partition("/")[0]

    @cached_property
    def client(self) -> Client:
        """What makes the requests."""
        return client_of(self.location.scheme, self.bucket)

    def _key(self, path: str) -> str:
        return self.location.child(path).path.partition("/")[2].strip("/")


class WebStore(ObjectStore):
    """A directory of a web server. It can be read, but neither listed nor changed. Only files are found whose paths are
    known."""

    sizes = Store.sizes

    def refuse_read_only(self) -> None:
        raise self._refusal("")

    def entry(self, path: str) -> Entry | None:
        return self._file(path)

    def entries(self, path: str = "", *, deep: bool = False) -> list[Entry] | None:
        known = [] if deep else [self.child(path).entry(name) for name in (names.MANIFEST, names.LATEST)]
        return [entry for entry in known if entry is not None] or None

    def put(self, path: str, data: bytes, over: Condition = None) -> bool:
        raise self._refusal(path)

    def create(self, path: str, nbytes: int, *, direct: bool, reserve: bool = True) -> ObjectWriter:
        raise self._refusal(path)

    def remove(self, *paths: str) -> None: ...

    def remove_if(self, path: str, data: bytes) -> bool:
        raise self._refusal(path)

    def now(self) -> float:
        raise self._refusal("")

    def _refusal(self, path: str) -> UnsupportedError:
        return UnsupportedError(
            "a web server can only be read", file=str(self.location.child(path)),
            hint="write to a path of a file system, or to an object store such as s3://bucket/run",
        )  # fmt: skip


def _again(action: Callable[[], Result]) -> Result:
    """Returns what ``action`` returns. Calls it again if it has failed in a way that may pass. Those errors after which
    obstore has already sent the request again say so. But it does not repeat a request whose answer was cut off."""
    for _ in range(ATTEMPTS - 1):
        try:
            return action()
        except StorageError as error:
            if not error.transient or "retries" in error.message:
                raise
    return action()


def _quietly(action: Callable[[Any], object], argument: Any) -> None:
    with suppress(Exception):  # what cannot be removed stays
        action(argument)


def _probe(store: ObjectStore) -> None:
    """Raises UnsupportedError if the server of a bucket ignores conditions or ranges, as some servers do that speak the
    protocol of S3. There, two writers could replace each other's checkpoint without a word. Uses a small file, once for
    each process and bucket. Raises what obstore raises."""
    client = store.client
    if client.is_probed:
        return
    probe = names.temporary(names.LOCK, secrets.token_hex(4))
    ignores: list[str] = []
    try:
        store.try_to_put(probe, b"one", "create")
        _, old = store.read_version(probe, 0) or (None, {})
        if not old:
            ignores.append("ETag")
        elif not store.try_to_put(probe, b"two", old) or store.try_to_put(probe, b"three", old):
            ignores.append("If-Match")
        if store.try_to_put(probe, b"four", "create"):
            ignores.append("If-None-Match")
        if not ignores:
            store.call("get_range", probe, start=1, length=1)  # raises an error if the server ignores ranges
    finally:
        store.remove(probe)
    if ignores:
        raise UnsupportedError(
            f"the server ignores {' and '.join(ignores)}, so two writers could replace each other's checkpoint",
            file=f"{store.location.scheme}://{store.bucket}",
            hint="use a server with conditional writes, such as S3, Google Cloud Storage, Azure, MinIO or SeaweedFS",
        )
    client.is_probed = True
