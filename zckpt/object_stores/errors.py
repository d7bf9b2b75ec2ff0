"""Turns the errors of the library obstore, and of boto3, into errors of zckpt."""

from __future__ import annotations

import re

from zckpt.errors import NoSpaceError, StorageError, UnsupportedError, ZckptError
from zckpt.format.rules import broken

REFUSED = re.compile(r"status code: 4(?!08|29)|redirect|Range request")
"""Matches the text of an error if the server would refuse the same request again."""
_FULL = re.compile(r"status code: 507|QuotaExceeded|StorageFull")
"""Matches the text of an error if there is no space left."""
PAST_THE_END = re.compile(r"status code: 416")
"""Matches the text of an error if a range begins at the end of the file or after it."""
NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
"""Matches the text of an error if the bucket does not exist, which obstore reports like a file that does not exist."""
_NO_RANGES = re.compile(r"Range request not supported|non-partial response")
"""Matches the text of an error if the server has sent the whole file instead of a part."""
_HINTS = (
    (NO_BUCKET, "the bucket does not exist; make it, or give the name of another one"),
    (re.compile("redirect|AuthorizationHeaderMalformed"), "the bucket is in another region: set AWS_REGION to it"),
    (
        re.compile(r"169\.254\.169\.254|metadata\.google|no credentials were found"),
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or what the provider of the bucket says; for "
        "a bucket that anybody may read, set AWS_SKIP_SIGNATURE=true",
    ),
    (
        re.compile(r"status code: 40[13]|necessary privileges"),
        "the credentials are missing or wrong, or do not allow this; zckpt reads, writes, lists and removes files",
    ),
    (re.compile("HTTP error"), "the server cannot be reached, or does not answer in time; check the address"),
)
"""What the user can do about an error, by its text. The first that matches is told."""
_OTHER_SERVER = re.compile(r"status code: 40[13]|necessary privileges|HTTP error")
"""Matches the text of an error of S3 if the request may have gone to a server that does not have the bucket."""
_QUERY = re.compile(r"\?[^\s\"')>]*")
"""Matches the query of a URL, which may contain a signature or a token."""
_XML = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
"""Matches the code and the message in the body of an answer. The rest of the body may repeat credentials."""


class Errors:
    """Turns the errors of obstore into errors of zckpt that name the file and contain no credentials."""

    def __init__(self, action: str, file: str, start: int | None, stop: int | None) -> None:
        self._action, self._file, self._start, self._stop = action, file, start, stop

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, ZckptError):
            return
        from obstore import exceptions as errors

        # obstore raises OSErrors while it uploads, and ValueErrors for paths. boto3's errors have no common base class.
        is_known = isinstance(error, (errors.BaseError, OSError, ValueError)) or "botocore" in str(kind)
        if not is_known:
            return
        text = without_secrets(error)
        is_missing = isinstance(error, FileNotFoundError) and not NO_BUCKET.search(text)
        if is_missing and self._action in ("look at", "read"):
            raise broken("F001", "the file is missing", file=self._file) from None
        if _NO_RANGES.search(text):
            raise UnsupportedError(
                "the server sends whole files instead of the parts that are asked for", file=self._file,
                hint="use a server that answers requests with the header Range, or copy the files from there first",
            ) from None  # fmt: skip
        is_full = _FULL.search(text) is not None
        failed = (NoSpaceError if is_full else StorageError)(
            f"cannot {self._action}: {text}", file=self._file, start=self._start, stop=self._stop,
            hint=hint_of(text, self._file),
        )  # fmt: skip
        may_pass = isinstance(error, (errors.GenericError, OSError)) and not isinstance(error, FileNotFoundError)
        failed.transient = may_pass and not is_full and not REFUSED.search(text)
        raise failed from None


def without_secrets(error: BaseException) -> str:
    """Returns the text of an error in one line, without the queries of URLs, and without what the server has sent
    except its code and message."""
    text, _, body = str(error).partition("Debug source:")[0].partition("<")
    sent = _XML.search(f"<{body}")
    told = ": ".join(filter(None, sent.groups())) if sent else ""
    return _QUERY.sub("?...", f"{text}{told}").replace("\n", " ").strip()


def hint_of(text: str, url: str) -> str | None:
    """Returns what the user can do about an error with this text, or None. ``url``: the bucket, or something in it."""
    hint = next((hint for pattern, hint in _HINTS if pattern.search(text)), None)
    if hint and url.startswith("s3://") and _OTHER_SERVER.search(text):
        hint += "; if the bucket is not one of AWS, set AWS_ENDPOINT_URL"
    return hint
