"""Names of tensors, parts, pieces, files and directories.

All paths are relative to the checkpoint's directory, and have ``/`` between their components.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from zckpt.format.limits import LATEST_BYTES_MAX, NAME_BYTES_MAX
from zckpt.format.rules import broken
from zckpt.geometry import all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zckpt.geometry import Span

MANIFEST = "manifest.msgpack"
"""The name of the manifest."""
LATEST = "latest"
"""The name of the file in a run that names one of its checkpoints."""
LOCK = "write.lock"
"""The name of the lock."""
INDEX = "index.bin"
"""The name of the index, in the data directory."""
DIGESTS = "digests.bin"
"""The name of the digest table of a rank, in the directory of the rank."""
FILLER_PREFIX = "@"
"""The first character of the names of fillers."""
METADATA = "__metadata__"
"""The key of the metadata in the header of a data file."""
CLIENT_STATE = "client_state"
"""The key of the caller's own values in the root tree and in the tree of a rank."""
CLIENT_RANK_STATE = "client_rank_state"
"""The key, in the tree of a rank, of the caller's values that this rank alone has."""
ADAPTERS = "adapters"
"""The key, in the root tree, of the configurations of a PEFT model's adapters. Its value is a map from the name of each
adapter to the text of its configuration."""
LEFT_OUT = "left_out"
"""The key, in the root tree, of a list with the names of the optimizer's parts that a write or a copy has left out."""
LINEAGE = "lineage"
"""The key, in the root tree, of a map that says which run the checkpoint belongs to, and what it can be used for."""
MACHINES = "machines"
"""The key, in the root tree, of a list of machines, if each has written the files of its own ranks to a disk of its
own. Each is a map with the name of its ``host`` and the numbers of its ``ranks``."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", re.ASCII)
_SAVE_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp", re.ASCII)
_OLD = re.compile(r"\.[0-9a-f]{8}\.old", re.ASCII)
_RANK = re.compile(r"rank-([0-9]{5,7})", re.ASCII)
_PIECE = re.compile(r"(?s)(.*)@([0-9]{1,19}):([0-9]{1,19})", re.ASCII)
_RANGE_SUFFIX = re.compile(r"@[0-9]+:[0-9]+\Z", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Tier(IntEnum):
    """The kind of memory that a piece was in when it was saved. The manifest and the index store its number."""

    DEVICE = 0
    HOST = 1
    NVME = 2

    @property
    def label(self) -> str:
        """The name of the tier in the headers of data files and in zckpt's public functions, such as ``"device"``."""
        return self.name.lower()

    @property
    def prefix(self) -> str:
        """The first characters of the names of the data files of this tier."""
        return ("", "host.", "swap.")[self]


def check_tensor_name(name: object, *, file: str | None = None) -> None:
    """Raises FormatError (N001, N002) unless ``name`` is a valid name of a tensor."""
    if not isinstance(name, str):
        raise broken("N001", f"tensor name of type {type(name).__name__}", file=file)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise broken("N001", f"tensor name {name!r} is not valid Unicode", file=file) from None
    if not 1 <= size <= NAME_BYTES_MAX:
        raise broken("N001", f"tensor name of {size} bytes: {name[:80]!r}", file=file)
    if _CONTROL.search(name):
        raise broken("N001", f"tensor name {name!r} has a control character", file=file)
    if name.startswith(FILLER_PREFIX) or name == METADATA or _RANGE_SUFFIX.search(name):
        raise broken("N002", f"tensor name {name!r} has a form that is reserved", file=file)


def check_tensor_names(tensor_names: Sequence[str], *, file: str | None = None) -> None:
    """Does what ``check_tensor_name`` does for each of ``tensor_names``. Of most checkpoints, all names together show
    at once that none breaks a rule, which takes a small part of the time."""
    joined = "\n".join(["", *tensor_names, ""])
    if joined.isascii() and not (METADATA in tensor_names or FILLER_PREFIX in joined or "\x7f" in joined):
        ends = np.flatnonzero(np.frombuffer(joined.encode(), np.uint8) < ord(" "))
        lengths = np.diff(ends) - 1
        has_controls = len(lengths) != len(tensor_names)
        if not has_controls and lengths.min(initial=1) >= 1 and lengths.max(initial=1) <= NAME_BYTES_MAX:
            return
    for name in tensor_names:
        check_tensor_name(name, file=file)


def check_part_name(part: object, *, file: str | None = None) -> None:
    """Raises FormatError (N003) unless ``part`` is a valid name of a part."""
    if not is_part_name(part):
        raise broken("N003", f"part name {part!r}", file=file)


def is_part_name(part: object) -> bool:
    """Whether ``part`` is a valid name of a part."""
    return isinstance(part, str) and _PART.fullmatch(part) is not None


def check_save_id(save_id: object, *, file: str | None = None) -> None:
    """Raises FormatError (N004) unless ``save_id`` is a valid save id."""
    if not (isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id)):
        raise broken("N004", f"save id {save_id!r}", file=file)


def piece_name(name: str, span: Span) -> str:
    """Returns the name of a piece in a data file: the name of its tensor if the piece is the whole tensor, and
    otherwise ``<name>@<start>:<stop>``. If a grid divides the tensor, its elements are not in the order of its shape.
    Then each of its pieces has the second form."""
    whole = all_of(span.grid.shape)
    return name if span is whole or span == whole else partial_name(name, span.start, span.stop)


def partial_name(name: str, start: int, stop: int) -> str:
    """Returns the name of a partial piece in a data file."""
    return f"{name}@{start}:{stop}"


def split_piece_name(entry: str) -> tuple[str, int, int] | None:
    """Returns ``(name, start, stop)`` if ``entry`` is the name of a partial piece, otherwise None."""
    match = _PIECE.fullmatch(entry)
    return (match[1], int(match[2]), int(match[3])) if match else None


def data_dir(save_id: str) -> str:
    """Returns the name of the data directory of a save."""
    return f"data-{save_id}"


def is_data_dir(name: str) -> bool:
    """Returns whether a directory with this name is the data directory of a save."""
    return name.startswith("data-") and _SAVE_ID.fullmatch(name[5:]) is not None


def temporary(of: str, digits: str) -> str:
    """Returns the name of a temporary file that is to replace the file ``of``. ``digits`` make it unique. In a
    checkpoint and in a run, these are eight hexadecimal digits."""
    return f"{of}.{digits}.tmp"


def prepared_digits(save_id: str) -> str:
    """Returns the digits in the names of the temporary manifest and the temporary ``latest`` of a write. They come from
    the save id, so another process can compute these names without listing a directory."""
    return save_id[:8]


def is_temporary(name: str, of: str) -> bool:
    """Returns whether a file with this name is a temporary one that was to replace the file ``of``."""
    return name.startswith(of) and _TEMPORARY.fullmatch(name[len(of) :]) is not None


def is_old(name: str, of: str = MANIFEST) -> bool:
    """Returns whether a file with this name is a damaged file ``of`` that a repair has put aside."""
    return name.startswith(of) and _OLD.fullmatch(name[len(of) :]) is not None


def index_path(save_id: str) -> str:
    """Returns the path of the index."""
    return f"{data_dir(save_id)}/{INDEX}"


def rank_dir(save_id: str, rank: int) -> str:
    """Returns the path of the directory of one rank."""
    return f"{data_dir(save_id)}/rank-{rank:05d}"


def split_rank_dir(name: str) -> int | None:
    """Returns the rank if this is the name of a rank's directory, otherwise None."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match and name == f"rank-{int(match[1]):05d}" else None


def digests_path(save_id: str, rank: int) -> str:
    """Returns the path of the digest table of one rank."""
    return f"{rank_dir(save_id, rank)}/{DIGESTS}"


def data_file_path(save_id: str, rank: int, part: str, tier: Tier) -> str:
    """Returns the path of a data file."""
    return f"{rank_dir(save_id, rank)}/{tier.prefix}{part}.safetensors"


def split_data_file_name(name: str) -> tuple[str, Tier] | None:
    """Returns ``(part, tier)`` if this is the name of a data file in the directory of its rank, otherwise None."""
    *prefix, part = name.removesuffix(".safetensors").split(".")
    tiers = {tier.prefix: tier for tier in Tier}
    tier = tiers.get(f"{prefix[0]}." if prefix else "")
    known = name.endswith(".safetensors") and len(prefix) < 2 and tier is not None and _PART.fullmatch(part)
    return (part, tier) if known and tier is not None else None


def encode_latest(name: str) -> bytes:
    """Returns the bytes of a file ``latest`` that names the checkpoint at the path ``name``, relative to the run.
    Raises FormatError (L001) if ``latest`` cannot contain this path."""
    raw = f"{name}\n".encode(errors="surrogateescape")
    decode_latest(raw, LATEST)
    return raw


def decode_latest(raw: bytes, file: str) -> str:
    """Returns the path, relative to the run, that the bytes of a file ``latest`` contain. Raises FormatError (L001)."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = ""
    name = name.removesuffix("\n")
    if len(raw) > LATEST_BYTES_MAX or _CONTROL.search(name) or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise broken("L001", f"`latest` holds {raw[:80]!r}", file=file)
    return name
