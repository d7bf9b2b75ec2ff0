"""Makes the objects of the library obstore by which the object stores send their requests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from zckpt.errors import StorageError, UnsupportedError
from zckpt.object_stores.errors import hint_of, without_secrets

TIMEOUT_SECONDS, CONNECT_SECONDS = 60, 10
"""How long one request may take, and how long a connection may take to be made, in seconds."""
RETRIES, RETRY_SECONDS = 30, 120
"""How often obstore sends a request again that has failed, and for how many seconds. The pauses are such that the time
is over first."""
PAUSE_SECONDS = 0.2
"""How long obstore waits before it sends a request again for the first time, in seconds. Later pauses are longer."""
SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")
"""How the names of the variables of the environment begin that say where a bucket is, and who may use it."""
_process: int | None = None
"""The id of the process that has used obstore first. Its threads do not exist in a process that is forked from it."""


def load_obstore() -> Any:
    """Returns the module obstore. Raises UnsupportedError if it is not installed, and in a process in which it would
    hang."""
    global _process  # noqa: PLW0603
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UnsupportedError(
            "an object store needs the package obstore", hint="install it: pip install 'zckpt[cloud]'"
        ) from error
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise UnsupportedError(
            "a process that was forked from one that has used an object store cannot use one",
            hint='start processes by multiprocessing.get_context("spawn")',
        )
    return obstore


@dataclass(eq=False)
class Client:
    """What makes the requests for a bucket, or for a web server."""

    bucket: Any
    """obstore's object."""
    is_probed: bool = False
    """Whether the server is known to keep conditions and ranges."""


def client_of(scheme: str, bucket: str) -> Client:
    """Returns the client for a bucket, or for a web server. There is one for each setting of the environment that says
    where the bucket is, and who may use it. Raises StorageError and UnsupportedError."""
    settings = ((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS))
    return _client(scheme, bucket, *sorted(settings))


@lru_cache
def _client(scheme: str, bucket: str, *settings: tuple[str, str]) -> Client:
    """Makes a client. ``settings`` are the variables of the environment that it is made from."""
    obstore = load_obstore()
    client = {
        "timeout": timedelta(seconds=TIMEOUT_SECONDS), "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "allow_http": scheme == "http",
    }  # fmt: skip
    backoff = {"init_backoff": timedelta(seconds=PAUSE_SECONDS), "max_backoff": timedelta(seconds=10), "base": 3}
    retries = {"backoff": backoff, "max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    common = {"client_options": client, "retry_config": retries}
    url = f"{scheme}://{bucket}"
    try:
        if scheme != "s3":
            return Client(obstore.store.from_url(url, **common))
        return Client(obstore.store.S3Store(bucket, **_s3_options(), **common))
    except Exception as error:  # also of boto3, whose errors have no base class without it
        text = without_secrets(error)
        raise StorageError(f"cannot open the bucket: {text}", file=url, hint=hint_of(text, url)) from None


def endpoint() -> str | None:
    """Returns the URL of the server of S3 buckets, or None for that of AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _s3_options() -> dict[str, Any]:
    """Returns the options of a bucket of S3. obstore finds credentials in the environment, and on machines of AWS. The
    credentials of a profile, as ``aws sso login`` makes them, are found by boto3, if it is installed."""
    url, options = endpoint(), dict[str, Any]()
    if url:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"AWS_ENDPOINT_URL has to begin with http:// or https://, and it is {url!r}")
        options["endpoint"] = url
        options["config"] = {"allow_http": url.startswith("http://")}
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return options
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return options
    session = boto3.session.Session()
    if session.get_credentials() is None:  # obstore would look for them for a minute
        raise ValueError("no credentials were found")
    options["credential_provider"] = Boto3CredentialProvider(session)
    if session.region_name and not os.environ.get("AWS_REGION"):
        options["region"] = session.region_name
    return options
