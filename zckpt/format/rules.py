"""The rules of the format. Every check that finds a rule broken, in the reader and in the validator, raises what
``broken`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from zckpt.errors import DigestError, FeatureError, FormatError, MissingFileError, SizeError, VersionError


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the format."""

    id: str
    """The id of the rule, such as ``"D003"``."""
    clause: str
    """The first sentence of the rule in the specification, word for word."""
    error: type[FormatError] = FormatError
    """The class of the error that is raised if the rule is broken."""


_RULES = (
    # Names
    Rule("N001", "A tensor name MUST be 1 to 1024 bytes of UTF-8 without control characters."),
    Rule("N002", "A tensor name MUST NOT begin with `@`, be `__metadata__`, or end in `@<digits>:<digits>`."),
    Rule("N003", "A part name MUST match `[A-Za-z0-9_][A-Za-z0-9_-]{0,63}`."),
    Rule("N004", "A save id MUST be 16 lower-case hexadecimal digits."),
    # latest
    Rule(
        "L001", "`latest` MUST contain the relative path of one checkpoint directory, followed by at most one newline."
    ),
    # Manifest
    Rule(
        "M001",
        'The manifest file MUST be one msgpack array of four items: `"zckpt"`, the version, a digest and the body.',
    ),
    Rule("M002", "A reader MUST refuse a manifest whose major version it does not know.", VersionError),
    Rule("M003", "The digest in the manifest MUST be the xxh3-128 digest of the body.", DigestError),
    Rule("M004", "A manifest MUST be at most 256 MiB long.", SizeError),
    Rule(
        "M005",
        "The body MUST be one msgpack map without duplicate keys, with all required fields, of their types and ranges.",
    ),
    Rule(
        "M006",
        "A reader MUST refuse a checkpoint that requires a feature that it does not know, and MUST name the feature.",
        FeatureError,
    ),
    Rule("M007", "All items of `names` MUST be distinct, and the names of all parts MUST be distinct."),
    Rule("M008", "A shape MUST have at most 64 dimensions, and a tensor MUST be smaller than 2^62 bytes."),
    Rule("M009", "A dtype MUST be one of the table of dtypes."),
    Rule("M010", "The name ids of a part MUST be strictly ascending, and its columns MUST be equally long."),
    Rule(
        "M011",
        "The data files MUST be listed once each, in ascending order of rank, part and tier, and with ids in range.",
    ),
    Rule(
        "M012",
        "An alias MUST be a valid tensor name that is not in `names`, and MUST stand for a name that is in `names`.",
    ),
    Rule("M013", "The chunks MUST tile the index file, and the chunks of each layout MUST tile its rows."),
    Rule(
        "M014",
        "The shared files MUST be listed once each, in ascending order, under the id of the save that wrote them.",
    ),
    Rule("M015", "A grid MUST have each index of each dimension once, and MUST fit the shapes of its tensors."),
    # Index
    Rule("I001", "`index.bin` MUST be exactly `index_bytes` bytes long.", SizeError),
    Rule("I002", "A chunk MUST have the digest that the manifest gives.", DigestError),
    Rule(
        "I003", "A chunk MUST be one zstd frame that declares its content size, and that size MUST be 8 R + 25 P bytes."
    ),
    Rule("I004", "The rows of a chunk MUST be the tensors that the manifest lists for it, in the same order."),
    Rule(
        "I005",
        "The pieces of a tensor MUST follow each other without gap or overlap and make up one or more whole copies.",
    ),
    Rule("I006", "Every piece MUST be in a listed data file, inside its data, at a multiple of the element size."),
    Rule("I007", "The pieces in a data file MUST together have no more bytes than the data of the data file."),
    # Files
    Rule("F001", "Every file that the manifest implies MUST exist.", MissingFileError),
    Rule("F002", "Every file MUST be a regular file that is reached without following a symbolic link."),
    Rule("F003", "Every data file MUST be as long as its `bytes` in the manifest.", SizeError),
    # Data files
    Rule(
        "S001",
        "A data file MUST begin with the length N of its header text, 8 bytes little-endian, at most 100,000,000.",
        SizeError,
    ),
    Rule("S002", "The header text MUST be one JSON object in UTF-8 without duplicate keys, padded with spaces only."),
    Rule("S003", "The data of a data file MUST begin at a multiple of 4096, at the byte that the manifest gives."),
    Rule("S004", "The dtype, the shape and the offsets of an entry MUST be valid and MUST agree with each other."),
    Rule("S005", "The entries MUST tile the data without gap or overlap, up to the end of the data file."),
    Rule(
        "S006",
        "The metadata MUST name the version, save, part, rank, world size and tier that the data file's path implies.",
    ),
    Rule("S007", "The entries that are not fillers MUST be exactly the pieces that the index places in the data file."),
    Rule("S008", "A filler MUST be U8, one-dimensional, shorter than 4096 bytes and zero throughout."),
    # Digests
    Rule(
        "D001",
        "A digest table MUST contain 16 bytes for every block of the rank's data files, and nothing else.",
        SizeError,
    ),
    Rule("D002", "A digest table MUST have the digest that the manifest gives.", DigestError),
    Rule("D003", "A block MUST have the digest that the digest table gives.", DigestError),
    # State trees
    Rule("T001", "A tree MUST be one msgpack value of the allowed kinds, without duplicate keys."),
    Rule("T002", "A tree MUST be at most 64 levels deep."),
    Rule(
        "T003",
        "A reference in a tree MUST name a tensor of the part `state`, and no two references in a tree the same one.",
    ),
    Rule(
        "T004", "A tree and all payloads packed inside it MUST together have at most 256 MiB and 2^22 arrays and maps."
    ),
)

MESSAGE_CHARS_MAX = 2000
"""The most characters of the message of an error."""

RULES: dict[str, Rule] = {rule.id: rule for rule in _RULES}
"""All rules by id, in the order of the specification's table of rules."""


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
    return RULES[rule].error(message, rule=rule, file=file, key=key, start=start, stop=stop, hint=hint)
