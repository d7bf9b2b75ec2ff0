"""The rules of the format, whose clauses are in ``spec/format.md``. Every check that finds a rule broken, in the reader
and in the validator, raises what ``broken`` returns."""

from __future__ import annotations

from zckpt.errors import DigestError, FeatureError, FormatError, MissingFileError, SizeError, VersionError

RULES: dict[str, type[FormatError]] = {
    "N001": FormatError, "N002": FormatError, "N003": FormatError, "N004": FormatError,  # names
    "L001": FormatError,  # latest
    "M001": FormatError, "M002": VersionError, "M003": DigestError, "M004": SizeError, "M005": FormatError,  # manifest
    "M006": FeatureError, "M007": FormatError, "M008": FormatError, "M009": FormatError, "M010": FormatError,
    "M011": FormatError, "M012": FormatError, "M013": FormatError, "M014": FormatError, "M015": FormatError,
    "I001": SizeError, "I002": DigestError, "I003": FormatError, "I004": FormatError, "I005": FormatError,  # index
    "I006": FormatError, "I007": FormatError,
    "F001": MissingFileError, "F002": FormatError, "F003": SizeError,  # files
    "S001": SizeError, "S002": FormatError, "S003": FormatError, "S004": FormatError, "S005": FormatError,  # data files
    "S006": FormatError, "S007": FormatError, "S008": FormatError,
    "D001": SizeError, "D002": DigestError, "D003": DigestError,  # digests
    "T001": FormatError, "T002": FormatError, "T003": FormatError, "T004": FormatError,  # state trees
}  # fmt: skip
"""The class of the error of each rule, by the id of the rule, in the order of the specification's table of rules."""
MESSAGE_CHARS_MAX = 2000
"""The most characters of the message of an error."""


def broken(
    rule: str,
    message: str,
    *,
    file: str | None = None,
    key: str | None = None,
    start: int | None = None,
    stop: int | None = None,
    hint: str | None = None,
) -> FormatError:
    """Returns the error of a rule, for the caller to raise. ``message`` says what was found. It may contain values of
    the checkpoint, so it is cut to ``MESSAGE_CHARS_MAX``. The other arguments are the attributes of ``ZckptError``."""
    message = message[:MESSAGE_CHARS_MAX]
    return RULES[rule](message, rule=rule, file=file, key=key, start=start, stop=stop, hint=hint)
