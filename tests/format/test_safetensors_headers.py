"""Headers like those of safetensors' own tests. zckpt refuses all that safetensors refuses, and some that it allows.

The cases have the names of the tests in safetensors' Rust sources, and headers like theirs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors

from zckpt.errors import FormatError
from zckpt.format import data_file as data_file_format
from zckpt.format.names import Tier

FILE_ID = data_file_format.DataFileId("0123456789abcdef", 0, 1, "master", Tier.DEVICE)
METADATA = json.loads(data_file_format.encode_header(FILE_ID, [], {})[8:])["__metadata__"]


def entry(dtype: str = "I32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def text(**entries: Any) -> bytes:
    return json.dumps({"__metadata__": METADATA, **entries}).encode()


def file(content: bytes, data: bytes = b"", pad: bytes = b" ", length: int | None = None) -> bytes:
    padded = content.ljust(4088, pad)
    return (len(padded) if length is None else length).to_bytes(8, "little") + padded + data


ZEROS = bytes(16)
TEN = {f"weight_{i}": entry() for i in range(10)}
SOUND = text(test=entry())
# The values are the rule by which zckpt refuses the file, whether safetensors allows the file, and the file.
CASES: dict[str, tuple[str | None, bool, bytes]] = {
    "deserialization": (None, True, file(SOUND, ZEROS)),
    "empty": (None, True, file(text())),
    "empty shapes allowed": (None, True, file(text(test=entry(shape=(), offsets=(0, 4))), bytes(4))),
    "zero sized tensor": (None, True, file(text(test=entry(shape=(2, 0), offsets=(0, 0))))),
    "whitespace padded header": ("S002", True, file(text() + b"\r\n\t ")),
    "whitespace start padded header": ("S002", True, file(b"\t\n" + text())),
    "json attack": ("S005", False, file(text(**TEN), ZEROS)),
    "metadata incomplete buffer, more": ("S005", False, file(SOUND, ZEROS + b"extra_bogus_data_for_polyglot_file")),
    "metadata incomplete buffer, less": ("S005", False, file(SOUND, ZEROS[:-2])),
    "header too large": ("S001", False, file(SOUND, ZEROS, length=0xFFFF_FF00_0000_1000 - 8)),
    "header too small": ("S001", False, b""),
    "invalid header length": ("S001", False, (4088).to_bytes(8, "little")),
    "invalid header non utf8": ("S002", False, file(SOUND.replace(b"test", b"te\xffst"), ZEROS)),
    "invalid header not json": ("S002", False, file(b"{")),
    "no header": ("S002", False, file(b"")),
    "invalid info": ("S004", False, file(text(test=entry(offsets=(0, 4))), bytes(4))),
    "validation overflow, shape": ("S004", False, file(text(test=entry(shape=(2, (1 << 64) - 2))), ZEROS)),
    "validation overflow, bytes": ("S004", False, file(text(test=entry(shape=(2, 1 << 62))), ZEROS)),
    "validation overflow, nothing": (
        *("S004", True),
        file(text(test=entry(shape=(0, 1 << 61, 8), offsets=(0, 0)))),
    ),
    "hole": ("S005", False, file(text(a=entry(), b=entry(offsets=(20, 36))), bytes(36))),
    "hole in front": ("S005", False, file(text(a=entry(offsets=(4, 20))), bytes(20))),
    "overlap": ("S005", False, file(text(a=entry(), b=entry(offsets=(8, 24))), bytes(24))),
    "offsets turned round": ("S004", False, file(text(a=entry(offsets=(16, 0))), ZEROS)),
    "unknown dtype": ("S004", False, file(text(a=entry("I33")), ZEROS)),
    "negative": ("S004", False, file(text(a=entry(shape=(-2, -2))), ZEROS)),
    "minus zero": ("S002", False, file(SOUND.replace(b"[0, 16]", b"[-0, 16]"), ZEROS)),
    "fraction": ("S004", False, file(SOUND.replace(b"[0, 16]", b"[0.0, 16]"), ZEROS)),
    "duplicate name": ("S002", True, file(SOUND[:-1] + SOUND[SOUND.index(b', "test"') :], ZEROS)),
    "unknown field": ("S004", True, file(text(test=entry() | {"more": 1}), ZEROS)),
    "zeros as padding": ("S002", False, file(SOUND, ZEROS, pad=b"\0")),
    "an array": ("S002", False, file(b"[1]")),
    "metadata of numbers": ("S006", False, file(text().replace(b'"pt"', b"7"))),
}


@pytest.mark.parametrize("name", CASES)
def test_we_are_as_strict_as_safetensors(name: str) -> None:
    rule, allowed, raw = CASES[name]
    if allowed:
        safetensors.deserialize(raw)
    else:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(raw)
    broken_rule = None
    try:
        data_start = data_file_format.header_bytes(raw[:8], "file")
        data_file_format.decode_header(raw[:data_start], len(raw), FILE_ID)
    except FormatError as error:
        broken_rule = error.rule
    assert broken_rule == rule
    assert allowed or rule, "nothing is allowed that safetensors refuses"
