"""The rules of the format: one id, one clause of ``spec/format.md``, one error.

Every check, in the reader and in the validator alike, ends in ``broken(id, ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.errors import (
    DigestError,
    FeatureError,
    FormatError,
    MissingFileError,
    SizeError,
    VersionError,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """``clause`` is the first sentence of the clause in the spec, word for word."""

    id: str
    clause: str
    error: type[FormatError] = FormatError


_RULES = (
    # Names
    Rule("N001", "A tensor name is 1 to 1024 bytes of UTF-8 without control characters."),
    Rule(
        "N002", "A tensor name does not begin with `@`, is not `__metadata__` and does not end in `@<digits>:<digits>`."
    ),
    Rule("N003", "A part name matches `[A-Za-z0-9_][A-Za-z0-9_-]{0,63}`."),
    Rule("N004", "A save id is 16 lower-case hexadecimal digits."),
    # latest
    Rule("L001", "`latest` holds the relative path of one checkpoint directory, followed by at most one newline."),
    # Manifest
    Rule("M001", 'A manifest is one msgpack array of four: `"zckpt"`, the version, a digest and the body.'),
    Rule("M002", "A reader refuses a manifest whose major version it does not know.", VersionError),
    Rule("M003", "The digest in the manifest is the xxh3-128 of the body.", DigestError),
    Rule("M004", "A manifest is at most 256 MiB long.", SizeError),
    Rule(
        "M005",
        "The body is one msgpack map without duplicate keys, with every required field, of its type and in its range.",
    ),
    Rule(
        "M006", "A reader refuses a checkpoint that requires a feature which it does not know, by name.", FeatureError
    ),
    Rule("M007", "The names of a manifest are distinct, and so are its parts."),
    Rule("M008", "A shape has at most 64 dimensions, none negative, and the tensor is smaller than 2^62 bytes."),
    Rule("M009", "A dtype is one of the table of dtypes."),
    Rule("M010", "The name ids of a part are strictly ascending, and its columns are equally long."),
    Rule(
        "M011", "The files are listed once each, in ascending order of rank, part and tier, and every id is in range."
    ),
    Rule("M012", "An alias is a valid tensor name, is not itself a name, and stands for a name."),
    Rule(
        "M013",
        "The chunks tile the index file, and those of each layout hold the names of its parts in ascending order.",
    ),
    Rule("M014", "The files of other saves are listed by the id of their save, once each, in ascending order."),
    # Index
    Rule("I001", "The index file is as long as the manifest says.", SizeError),
    Rule("I002", "A chunk has the xxh3-128 digest that the manifest gives.", DigestError),
    Rule(
        "I003",
        "A chunk is one zstd frame that declares its content size, and the size is the one its rows and pieces need.",
    ),
    Rule("I004", "The rows of a chunk are the names that the manifest announces."),
    Rule(
        "I005",
        "The pieces of a tensor follow each other without gap or overlap and make up one or more whole copies of it.",
    ),
    Rule("I006", "Every piece lies in a listed file, inside its data, at a multiple of the element size."),
    Rule("I007", "The pieces in a file have together no more bytes than its data."),
    # Files
    Rule("F001", "Every file that the manifest implies exists.", MissingFileError),
    Rule("F002", "Every file is a regular file reached without following a symbolic link."),
    Rule("F003", "Every file is as long as the manifest says.", SizeError),
    # Data files (shards)
    Rule("S001", "A data file begins with the header's length, 8 bytes little-endian, at most 100,000,000.", SizeError),
    Rule("S002", "The header is one JSON object in UTF-8 with no duplicate key, padded with spaces only."),
    Rule("S003", "The data begins at a multiple of 4096, where the manifest says."),
    Rule("S004", "An entry has a known dtype, a shape and offsets that agree with each other."),
    Rule("S005", "The entries tile the data without gap or overlap, up to the end of the file."),
    Rule(
        "S006",
        "The metadata names the format version, save, part, rank, world size and tier that the file's place implies.",
    ),
    Rule("S007", "The entries are exactly the pieces that the index places in the file."),
    Rule("S008", "A filler is U8, one-dimensional, shorter than 4096 bytes and zero throughout."),
    # Digests
    Rule("D001", "A digest table holds 16 bytes for every block of the rank's files.", SizeError),
    Rule("D002", "A digest table has the xxh3-128 digest that the manifest gives.", DigestError),
    Rule("D003", "A block has the xxh3-128 digest that the table gives.", DigestError),
    # State trees
    Rule("T001", "A tree is one msgpack value of the allowed kinds, without duplicate keys."),
    Rule("T002", "A tree is at most 64 levels deep."),
    Rule("T003", "A reference in a tree names a tensor of the part `state`."),
    Rule("T004", "A tree, with all that is packed again inside it, has at most 256 MiB and 2^22 arrays and maps."),
)

MESSAGE_CHARS_MAX = 2000

RULES: dict[str, Rule] = {rule.id: rule for rule in _RULES}


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
    """The error of ``rule``, to be raised by the caller. ``message`` says what was found, and so may be long."""
    message = message[:MESSAGE_CHARS_MAX]
    return RULES[rule].error(message, rule=rule, file=file, key=key, start=start, stop=stop, hint=hint)
