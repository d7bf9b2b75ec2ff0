"""Checkpoints in the buckets of the object stores that the tests start."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import boto3
import obstore

from zckpt.checkpoint.cleaning import work
from zckpt.object_stores import client as object_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from tests.support.object_servers import ObjectServer

RETRIES = 3


def use(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None, timeout_seconds: float = 60
) -> None:
    """Lets zckpt use a server, directly or through a proxy. It repeats requests that fail soon, and a few times only,
    and gives each one up after ``timeout_seconds``."""
    for name, value in server.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_client, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(object_client, "RETRIES", RETRIES)
    monkeypatch.setattr(object_client, "TIMEOUT_SECONDS", timeout_seconds)
    object_client._client.cache_clear()


def keys(server: ObjectServer, path: str) -> list[str]:
    """Returns the paths of all files in and below an ``s3://`` path, relative to it."""
    prefix = path.partition("://")[2].partition("/")[2].strip("/")
    found = [entry["path"] for chunk in obstore.list(server.store(), prefix) for entry in chunk]
    return sorted(key.removeprefix(f"{prefix}/") for key in found)


def unfinished(server: ObjectServer) -> list[str]:
    """Returns the keys of the uploads that nobody has finished."""
    client = client_of(server)
    return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])]


def client_of(server: ObjectServer) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
    )


@contextmanager
def a_day_later() -> Iterator[None]:
    """Lets ``zckpt.gc`` take everything for old."""
    with mock.patch.object(work, "OLD_SECONDS", -60.0):
        yield
